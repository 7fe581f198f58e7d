"""Which samples of the global batch are whose, and how their features reach the ranks that need them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clip_train import dist


@dataclass(frozen=True)
class Shares:
    """Rank r holds `counts[r]` samples, this one `[first, first + n)` of the global batch."""

    counts: list[int]
    first: int

    @classmethod
    def of(cls, n: int, global_size: int | None) -> Shares:
        """n: samples on this rank. global_size: N; None where every rank holds n.

        Ranks do not ask each other: with a size that W does not divide, the first N % W hold one more.
        """
        counts = [n] * dist.world_size() if global_size is None else dist.shares(global_size)
        if counts[dist.rank()] != n:
            raise ValueError(
                f"rank {dist.rank()} holds {n} samples of a global batch of {global_size}, and must hold "
                f"{counts[dist.rank()]}: of N samples each of W ranks holds N // W, the first N % W one more"
            )
        return cls(counts, sum(counts[: dist.rank()]))

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def own(self) -> slice:
        return slice(self.first, self.first + self.counts[dist.rank()])


def gather_pairs(I: Tensor, T: Tensor, shares: Shares) -> tuple[Tensor, Tensor]:
    """Image and text features [n, D] of every rank -> those of the global batch [N, D], in one collective."""
    if dist.world_size() == 1:
        return I, T
    both = dist.gather_rows(torch.cat([I, T], dim=1), shares.counts)  # [N, 2 D]
    return both[:, : I.shape[1]], both[:, I.shape[1] :]
