"""Which samples of the global batch each rank holds, and how ranks exchange features."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clip_train import dist
from clip_train.batch import shares
from clip_train.losses.tiles import Block, EntryIds
from clip_train.task import Context, Features


def share_counts(n: int, global_size: int | Sequence[int] | None) -> list[int]:
    """Compute how many samples every rank holds. n: on this rank. global_size: as in `Context`.

    This needs no communication: if W does not divide the size, the first N % W ranks hold one more.
    """
    if isinstance(global_size, Sequence):
        return [*global_size]
    if global_size is None:
        return [n] * dist.world_size()
    counts = shares(global_size, dist.world_size())
    if counts[dist.rank()] != n:
        raise ValueError(
            f"rank {dist.rank()} holds {n} samples of a global batch of {global_size}, and must "
            f"hold {counts[dist.rank()]}: each of W ranks holds N // W, the first N % W one more"
        )
    return counts


def gathered_ids(context: Context, counts: Sequence[int], m: int = 1) -> Tensor | None:
    """Gather the ids of all ranks, int64 [m N]: one for each of the m texts of each sample. None:
    there are no ids. Collective.

    Raises ValueError if this rank does not have one id for each of its texts.
    """
    ids = context.columns.get("ids")
    if ids is None:
        return None
    # texts of every rank
    texts = [m * count for count in counts]
    own = texts[dist.rank()]
    if ids.shape != (own,):
        raise ValueError(f"ids are {list(ids.shape)}: give one for each of {own} texts")
    return dist.gather_rows(ids, texts)


def group_places(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each of N samples the index of its group (below N) and the size of the group.

    ids: int64 [N]. A sample whose id is below 0 forms its own group. The host does not wait for the
    device.
    """
    indices = torch.arange(len(ids), device=ids.device)
    unique_ids = torch.where(ids < 0, -1 - indices, ids)
    ordered = unique_ids.sort().values
    # a group's index is the place of its first sample in this order
    first = torch.searchsorted(ordered, unique_ids)
    return first, torch.searchsorted(ordered, unique_ids, right=True) - first


def have_negatives(ids: Tensor | None, columns: int) -> Tensor | bool:
    """Whether rows have negatives. Either all rows do, or none does because all columns have the
    same id."""
    if ids is None:
        return columns > 1
    _, sizes = group_places(ids)
    return sizes.max() < columns


def grouped(ids: Tensor | None) -> dict[str, Tensor | float]:
    """The metric: how many samples share their id with another one."""
    if ids is None:
        return {}
    _, sizes = group_places(ids)
    return {"grouped_samples": (sizes > 1).sum()}


def texts_by_image(image: Tensor, text: Tensor) -> Tensor:
    """Put the m texts of each image beside each other: [n, D] and [m n, D] -> [n, m D].

    Texts i m to i m + m - 1 are image i's. Raises ValueError for other shapes, before any rank
    waits in a collective.
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

    `Pairs(I, T, I, T)` is a batch that this rank does not share with others.
    """

    image: Tensor  # [n, D], on this rank
    text: Tensor  # [n, D], or [n, m D] with m texts for each image
    image_all: Tensor  # [N, D], on all ranks
    text_all: Tensor
    counts: Sequence[int] = ()  # samples of every rank, if several share the batch
    first: int = 0  # the index of this rank's first sample in the batch
    ids_all: Tensor | None = None  # int64 [m N], of all texts

    @classmethod
    def of(cls, features: Features, context: Context) -> "Pairs":
        """Gather the pairs for a loss with a softmax. Collective.

        Raises ValueError for a model with a bias, or for another number of ids than texts.
        """
        if "logit_bias" in features:
            raise ValueError("a loss with a softmax has no logit_bias: it would cancel the bias")
        image, text = features["image"], features["text"]
        counts = share_counts(len(image), context.global_size)
        texts_per_image = text.numel() // image.numel()
        ids = gathered_ids(context, counts, texts_per_image)
        return cls.gathered(image, text, counts, ids)

    @classmethod
    def gathered(
        cls, image: Tensor, text: Tensor, counts: Sequence[int], ids_all: Tensor | None = None
    ) -> "Pairs":
        """Gather the features of all ranks, in one collective of 2 N D values.

        counts: samples of every rank.
        """
        if len(counts) == 1:
            return cls(image, text, image, text, counts, ids_all=ids_all)
        both = dist.gather_rows(torch.cat([image, text], dim=1), counts)  # [N, 2 D]
        D = image.shape[1]
        return cls(
            image,
            text,
            image_all=both[:, :D],
            text_all=both[:, D:],
            counts=counts,
            first=sum(counts[: dist.rank()]),
            ids_all=ids_all,
        )

    @property
    def own_rows(self) -> slice:
        return slice(self.first, self.first + len(self.image))

    @property
    def ids(self) -> EntryIds | None:
        """The ids of rows and columns, with one text for each image."""
        if self.ids_all is None:
            return None
        return EntryIds(rows=self.ids_all, cols=self.ids_all)

    @property
    def rows(self) -> Block:
        """This rank's images against all texts."""
        return Block(self.image, self.text_all, row=self.first, ids=self.ids)

    @property
    def cols(self) -> Block:
        """This rank's texts against all images."""
        return Block(self.text, self.image_all, row=self.first, ids=self.ids)

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks that share the batch, in place."""
        return dist.all_reduce_sum(x) if len(self.counts) > 1 else x


def send_round(
    visitors: Tensor, collected: Tensor, counts: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Send rows around the ring of ranks. All ranks send theirs at the same time, so each rank sees
    every rank's rows once, its own first.

    Args:
        visitors: [n, ...], the rows of this rank's samples that travel.
        collected: [n, ...], the values that they collect. The caller adds to the yielded values in
            place. After the loop, this tensor has the values from all ranks.
        counts: samples of every rank.

    Yields:
        The rows that visit this rank, their collected values, and the index of the first of these
        rows in the global batch.
    """
    W, rank = len(counts), dist.rank()
    first = list(itertools.accumulate(counts, initial=0))
    own = collected
    for hop in range(W):
        owner = (rank - hop) % W
        next_rows = counts[(owner - 1) % W]
        # sent while this rank computes
        incoming = dist.pass_on(visitors, next_rows) if hop < W - 1 else None
        yield visitors, collected, first[owner]
        if W > 1:
            # the last hop returns this rank's own values
            collected = dist.pass_on(collected, next_rows)()
        if incoming is not None:
            visitors = incoming()
    if W > 1:
        own.copy_(collected)
