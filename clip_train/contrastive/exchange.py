"""Which rank holds which samples of the global batch, and how ranks get each other's features."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clip_train import dist
from clip_train.batch import shares
from clip_train.contrastive.tiles import Block
from clip_train.task import Context, Features


def share_counts(n: int, global_size: int | Sequence[int] | None) -> list[int]:
    """Samples of every rank. n: on this one. global_size: as in `Context`.

    Ranks do not ask each other: with a size that W does not divide, the first N % W hold one more.
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
    ids_all: Tensor | None = None  # int64 [N, m], of all texts

    @classmethod
    def of(cls, features: Features, context: Context) -> "Pairs":
        """The pairs for a loss with a softmax.

        ValueError for a model with a bias, or ids of another number of texts.
        """
        if "logit_bias" in features:
            raise ValueError("a loss with a softmax has no logit_bias: it would cancel the bias")
        image, text, ids = features["image"], features["text"], context.ids
        counts = share_counts(len(image), context.global_size)
        if ids is None:
            return cls.gathered(image, text, counts)
        m = text.numel() // image.numel()
        if ids.shape != (m * len(image),):
            raise ValueError(
                f"ids are {list(ids.shape)}: give one for each of {m * len(image)} texts"
            )
        ids_all = dist.gather_rows(ids.view(-1, m), counts)
        return replace(cls.gathered(image, text, counts), ids_all=ids_all)

    @classmethod
    def gathered(cls, image: Tensor, text: Tensor, counts: Sequence[int]) -> "Pairs":
        """counts: samples of every rank. One collective: 2 N D values."""
        if len(counts) == 1:
            return cls(image, text, image, text, counts)
        both = dist.gather_rows(torch.cat([image, text], dim=1), counts)  # [N, 2 D]
        D = image.shape[1]
        return cls(image, text, both[:, :D], both[:, D:], counts, sum(counts[: dist.rank()]))

    @property
    def own(self) -> slice:
        return slice(self.first, self.first + len(self.image))

    @property
    def ids(self) -> tuple[Tensor, Tensor] | None:
        """int64 [n] and [N]: the positives of this rank, and of all."""
        return None if self.ids_all is None else (self.ids_all[self.own, 0], self.ids_all[:, 0])

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
    visit: Callable[[Tensor, Tensor, int], None],
    visitors: Tensor,
    collected: Tensor,
    counts: Sequence[int],
) -> Tensor:
    """Call `visit(visitors, collected, place)` with the visitors of each rank, this rank's first.

    visitors, collected: [n, ...], of this rank's samples. `visit` changes `collected` in place.
    place: of the first visitor in the global batch. counts: samples of every rank. Returns what
    this rank's visitors have collected.
    """
    W, here = len(counts), dist.rank()
    first = list(itertools.accumulate(counts, initial=0))
    for hop in range(W):
        owner = (here - hop) % W
        next_rows = counts[(owner - 1) % W]
        # on its way while this rank computes
        incoming = dist.pass_on(visitors, next_rows) if hop < W - 1 else None
        visit(visitors, collected, first[owner])
        if W > 1:
            collected = dist.pass_on(collected, next_rows)()  # the last hop brings our own home
        if incoming is not None:
            visitors = incoming()
    return collected
