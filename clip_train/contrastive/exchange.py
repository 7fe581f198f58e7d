"""Which rank holds which samples of the global batch, and how ranks get each other's features."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clip_train import dist
from clip_train.batch import shares
from clip_train.contrastive.tiles import Block
from clip_train.task import Features


def share_counts(n: int, global_size: int | None) -> list[int]:
    """Samples of every rank. n: on this one. global_size: N, or None if every rank holds n.

    Ranks do not ask each other: with a size that W does not divide, the first N % W hold one more.
    """
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

    @classmethod
    def of(cls, features: Features, global_size: int | None) -> "Pairs":
        """The pairs for a loss with a softmax. ValueError for a model with a bias."""
        if "logit_bias" in features:
            raise ValueError("a loss with a softmax has no logit_bias: it would cancel the bias")
        counts = share_counts(len(features["image"]), global_size)
        return cls.gathered(features["image"], features["text"], counts)

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
    def rows(self) -> Block:
        """This rank's images against all texts."""
        return Block(self.image, self.text_all, self.first)

    @property
    def cols(self) -> Block:
        """This rank's texts against all images."""
        return Block(self.text, self.image_all, self.first)

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
