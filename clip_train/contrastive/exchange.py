"""Which samples of the global batch are whose, and how their features reach the ranks that need them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clip_train import dist


@dataclass(frozen=True)
class Shares:
    """Part r of a batch is `counts[r]` samples; this rank's is part `index`."""

    counts: list[int]
    index: int

    @classmethod
    def of(cls, n: int, global_size: int | None) -> Shares:
        """The global batch's. n: samples on this rank. global_size: N; None where every rank holds n.

        Ranks do not ask each other: with a size that W does not divide, the first N % W hold one more.
        """
        counts = [n] * dist.world_size() if global_size is None else dist.shares(global_size)
        if counts[dist.rank()] != n:
            raise ValueError(
                f"rank {dist.rank()} holds {n} samples of a global batch of {global_size}, and must hold "
                f"{counts[dist.rank()]}: of N samples each of W ranks holds N // W, the first N % W one more"
            )
        return cls(counts, dist.rank())

    @classmethod
    def alone(cls, n: int) -> Shares:
        """Of n samples that are a batch of their own, whatever other ranks there are."""
        return cls([n], 0)

    @property
    def divided(self) -> bool:
        return len(self.counts) > 1

    def first(self, index: int | None = None) -> int:
        """The first sample of a part, by default of this rank's."""
        return sum(self.counts[: self.index if index is None else index])

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def own(self) -> slice:
        return slice(self.first(), self.first() + self.counts[self.index])

    def gather(self, x: Tensor) -> Tensor:
        """[n, ...] on every rank -> [N, ...]."""
        return dist.gather_rows(x, self.counts) if self.divided else x

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks that share the batch, in place."""
        return dist.all_reduce_sum(x) if self.divided else x


@dataclass(frozen=True)
class Pairs:
    """Image and text features of one batch; equal rows belong together."""

    image: Tensor  # [n, D], this rank's
    text: Tensor
    image_all: Tensor  # [N, D]
    text_all: Tensor
    shares: Shares

    @classmethod
    def gathered(cls, image: Tensor, text: Tensor, shares: Shares) -> Pairs:
        """One collective: 2 N D values."""
        if not shares.divided:
            return cls(image, text, image, text, shares)
        both = shares.gather(torch.cat([image, text], dim=1))  # [N, 2 D]
        return cls(image, text, both[:, : image.shape[1]], both[:, image.shape[1] :], shares)
