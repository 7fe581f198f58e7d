"""Which samples of the global batch each rank holds, and how ranks exchange features."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clip_train import dist
from clip_train.batch import shares
from clip_train.losses.tiles import Block
from clip_train.task import Context, Features


def share_counts(n: int, global_size: int | Sequence[int] | None) -> list[int]:
    """Samples of every rank. n: on this one. global_size: as in `Context`.

    Needs no communication: if W does not divide the size, the first N % W ranks hold one more.
    """
    if isinstance(global_size, Sequence):
        return [*global_size]
    counts = (
        [n] * dist.world_size() if global_size is None else shares(global_size, dist.world_size())
    )
    if counts[dist.rank()] != n:
        raise ValueError(
            f"rank {dist.rank()} holds {n} samples of a global batch of {global_size}, and must "
            f"hold {counts[dist.rank()]}: each of W ranks holds N // W, the first N % W one more"
        )
    return counts


def gathered_ids(context: Context, counts: Sequence[int], m: int = 1) -> Tensor | None:
    """int64 [m N], of the m texts of each sample of all ranks. None: they are not known.

    Collective. ValueError for ids of another number of texts.
    """
    ids = context.columns.get("ids")
    if ids is None:
        return None
    texts = [m * count for count in counts]  # of every rank
    own = texts[dist.rank()]
    if ids.shape != (own,):
        raise ValueError(f"ids are {list(ids.shape)}: give one for each of {own} texts")
    return dist.gather_rows(ids, texts)


def group_places(ids: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [N] -> for each sample, the number of its group (below N) and the size of the group. A
    sample whose id is below 0 forms its own group. The host does not wait for the device.
    """
    ids = torch.where(ids < 0, -1 - torch.arange(len(ids), device=ids.device), ids)
    ordered = ids.sort().values
    first = torch.searchsorted(ordered, ids)
    return first, torch.searchsorted(ordered, ids, right=True) - first


def have_negatives(ids: Tensor | None, columns: int) -> Tensor | bool:
    """Whether rows have negatives. Either all do, or none does because all columns have one id."""
    return columns > 1 if ids is None else group_places(ids)[1].max() < columns


def grouped(ids: Tensor | None) -> dict[str, Tensor | float]:
    """The metric: how many ids occur more than once."""
    return {} if ids is None else {"grouped_samples": (group_places(ids)[1] > 1).sum()}


def texts_by_image(image: Tensor, text: Tensor) -> Tensor:
    """[n, D] and [m n, D] -> [n, m D]: the m texts of each image beside each other.

    Texts i m to i m + m - 1 are image i's. ValueError for other shapes, before anything is sent.
    """
    if len(text) == 0 or len(text) % max(len(image), 1) or text.shape[1:] != image.shape[1:]:
        raise ValueError(
            f"text features {list(text.shape)} do not fit image features {list(image.shape)}: "
            "return equally many, or m texts for each image one after another, of one width"
        )
    return text.reshape(len(image), -1)


@dataclass(frozen=True)
class Pairs:
    """Image and text features of one batch; equal rows belong together.

    `Pairs(I, T, I, T)` is a batch of its own.
    """

    image: Tensor  # [n, D], this rank's
    text: Tensor
    image_all: Tensor  # [N, D]
    text_all: Tensor
    counts: Sequence[int] = ()  # samples of every rank, if several share the batch
    first: int = 0  # the place of this rank's first sample in the batch
    ids_all: Tensor | None = None  # int64 [m N], of all texts

    @classmethod
    def of(cls, features: Features, context: Context) -> "Pairs":
        """The pairs for a loss with a softmax.

        ValueError for a model with a bias, or ids of another number of texts.
        """
        if "logit_bias" in features:
            raise ValueError("a loss with a softmax has no logit_bias: it would cancel the bias")
        image, text = features["image"], features["text"]
        counts = share_counts(len(image), context.global_size)
        ids = gathered_ids(context, counts, text.numel() // image.numel())
        return cls.gathered(image, text, counts, ids)

    @classmethod
    def gathered(
        cls, image: Tensor, text: Tensor, counts: Sequence[int], ids_all: Tensor | None = None
    ) -> "Pairs":
        """counts: samples of every rank. One collective: 2 N D values."""
        if len(counts) == 1:
            return cls(image, text, image, text, counts, ids_all=ids_all)
        both = dist.gather_rows(torch.cat([image, text], dim=1), counts)  # [N, 2 D]
        D, first = image.shape[1], sum(counts[: dist.rank()])
        return cls(image, text, both[:, :D], both[:, D:], counts, first, ids_all)

    @property
    def own_rows(self) -> slice:
        return slice(self.first, self.first + len(self.image))

    @property
    def ids(self) -> tuple[Tensor, Tensor] | None:
        """int64 [N], of all positives, for rows and for columns."""
        return None if self.ids_all is None else (self.ids_all, self.ids_all)

    @property
    def rows(self) -> Block:
        """This rank's images against all texts."""
        return Block(self.image, self.text_all, self.first, ids=self.ids)

    @property
    def cols(self) -> Block:
        """This rank's texts against all images."""
        return Block(self.text, self.image_all, self.first, ids=self.ids)

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks that share the batch, in place."""
        return dist.all_reduce_sum(x) if len(self.counts) > 1 else x


def send_round(
    visitors: Tensor, collected: Tensor, counts: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield each rank's visitors, starting with this rank's, with their collected values and their
    place.

    visitors, collected: [n, ...], of this rank's samples. The caller adds to the collected values
    in place. After the loop, `collected` has this rank's values from all ranks.

    place: of the first visitor in the global batch. counts: samples of every rank.
    """
    W, here = len(counts), dist.rank()
    first, own = list(itertools.accumulate(counts, initial=0)), collected
    for hop in range(W):
        owner = (here - hop) % W
        next_rows = counts[(owner - 1) % W]
        # sent while this rank computes
        incoming = dist.pass_on(visitors, next_rows) if hop < W - 1 else None
        yield visitors, collected, first[owner]
        if W > 1:
            collected = dist.pass_on(collected, next_rows)()  # the last hop returns this rank's own
        if incoming is not None:
            visitors = incoming()
    if W > 1:
        own.copy_(collected)
