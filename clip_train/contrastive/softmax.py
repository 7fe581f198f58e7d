"""The softmaxes over the rows and over the columns of `S = scale * I T^T`, from sums over tiles and ranks.

All that the objectives with a softmax (InfoNCE, with memory banks, distillation) need of the logits. The positive
is kept outside the sums: loss and gradient then keep their digits when the loss is tiny.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from clip_train.contrastive.exchange import Pairs
from clip_train.contrastive.tiles import (
    Block,
    accumulation_dtype,
    add_softmax_gradient,
    exp_sums,
    row_dots,
    row_logsumexp,
)

HEADROOM = 60.0  # exponents may reach +60: e^60 times a million columns is still far below float32's e^88
SMALLEST_SUM = 1e-28  # of exponentials: below it, terms that matter may have underflowed


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) for every x; torch's own turns linear at 20, which is 2e-9 off."""
    return torch.logaddexp(x, x.new_zeros(()))


@dataclass(frozen=True)
class Softmaxes:
    """Of R rows and R columns, of which row x and column x are a pair; vectors are float64 [R]."""

    scale: float
    positive: Tensor  # S_xx
    row_gap: Tensor  # log-sum-exp over the negatives of row x, minus S_xx: 1 - p_xx is its sigmoid
    col_gap: Tensor  # of column x
    shift: float | None  # see `add_softmax_gradient`

    @classmethod
    def over(
        cls,
        rows: list[Block],
        cols: list[Block],
        positive: Tensor,
        scale: float,
        side: int,
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> Softmaxes:
        """rows: this rank's blocks of S; over all ranks they hold every negative of every pair once. cols: of S^T.

        B of every block is the same on all ranks. S may have more rows and columns than `positive` has entries:
        they are negatives only.
        """
        shift = _stabiliser(rows, cols, scale)
        R, size = len(positive), max(block.cols.stop for block in rows)
        sums = positive.new_zeros((2, size))
        for block in rows:
            row_sums, col_sums = exp_sums(block, scale, shift, side)
            sums[0, block.rows] += row_sums
            sums[1, block.cols] += col_sums
        sums = sum_over_ranks(sums)[:, :R]  # one collective: a row's sum is zero on all ranks but its own
        if sums.min().item() > SMALLEST_SUM:  # all ranks see the same sums, so they take the same branch
            lse = sums.log() + shift
            return cls(scale, positive, lse[0] - positive, lse[1] - positive, shift)
        sums = positive.new_zeros((2, size))
        for direction, blocks in enumerate((rows, cols)):
            lse = positive.new_full((size,), -torch.inf)
            for block in blocks:
                lse[block.rows] = torch.logaddexp(lse[block.rows], row_logsumexp(block, scale, side).double())
                sums[direction, block.rows] = lse[block.rows]
        lse = sum_over_ranks(sums)[:, :R]
        return cls(scale, positive, lse[0] - positive, lse[1] - positive, None)

    @classmethod
    def of(cls, pairs: Pairs, scale: float, side: int) -> Softmaxes:
        """Of a batch: every other sample is a negative."""
        positive = row_dots(pairs.image_all, pairs.text_all) * scale
        return cls.over([rows_of(pairs)], [cols_of(pairs)], positive, scale, side, pairs.shares.sum)

    def loss(self) -> Tensor:
        """The mean cross-entropy of both directions, []."""
        return (softplus(self.row_gap) + softplus(self.col_gap)).mean() / 2

    @property
    def missing(self) -> Tensor:
        """2 - p_xx - p'_xx: minus the loss's derivative by S_xx, but for its factor."""
        return self.row_gap.sigmoid() + self.col_gap.sigmoid()

    @property
    def row_lse(self) -> Tensor:
        return self.positive + softplus(self.row_gap)

    @property
    def col_lse(self) -> Tensor:
        return self.positive + softplus(self.col_gap)


def rows_of(pairs: Pairs) -> Block:
    """This rank's images against all texts."""
    return Block(pairs.image, pairs.text_all, pairs.shares.first())


def cols_of(pairs: Pairs) -> Block:
    """This rank's texts against all images."""
    return Block(pairs.text, pairs.image_all, pairs.shares.first())


def _stabiliser(rows: list[Block], cols: list[Block], scale: float) -> float:
    """|S_xy| <= s max|I| max|T| (Cauchy-Schwarz), so no pass over the logits is needed for a maximum."""
    longest_text, longest_image = (
        max(torch.linalg.vector_norm(b.B, dim=1, dtype=accumulation_dtype(b.B)).max().item() for b in blocks)
        for blocks in (rows, cols)
    )
    return max(scale * longest_image * longest_text - HEADROOM, 0.0)


def add_cross_entropy_gradient(
    d_image: Tensor, d_text: Tensor, pairs: Pairs, softmaxes: Softmaxes, weight: float, side: int,
    values: Pairs | None = None,
) -> None:  # fmt: skip
    """Add `weight * (P + P' - 2) T` and its like for the texts; P, P' are the softmaxes over rows and columns.

    weight = s / 2N makes it the gradient of `softmaxes.loss()`. values: whose features stand for I and T in the
    products; by default `pairs`.
    """
    of, own = values or pairs, pairs.shares.own
    along = (softmaxes.missing[own, None] * -weight).to(d_image.dtype)  # [n, 1]
    d_image.addcmul_(of.text.to(d_image.dtype), along)
    d_text.addcmul_(of.image.to(d_image.dtype), along)
    tiled_pass = partial(add_softmax_gradient, scale=softmaxes.scale, weight=weight, shift=softmaxes.shift, side=side)
    row_lse, col_lse = softmaxes.row_lse, softmaxes.col_lse
    if not pairs.shares.divided:  # the same tile serves both sides, 8 N^2 D flops in all
        tiled_pass(d_image, d_text, rows_of(pairs), row_lse=row_lse, col_lse=col_lse, values=(of.image, of.text))
    else:  # 10 n N D flops, and no collective
        tiled_pass(d_image, None, rows_of(pairs), row_lse=row_lse, col_lse=col_lse, values=(of.image, of.text_all))
        tiled_pass(d_text, None, cols_of(pairs), row_lse=col_lse, col_lse=row_lse, values=(of.text, of.image_all))
