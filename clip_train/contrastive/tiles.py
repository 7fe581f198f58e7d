"""Sweeps over the tiles of `S = scale * A B^T` that never hold more than one tile.

A is this rank's side [n, D], B the other side of the whole global batch [N, D]; the positive of row i is
column `first + i`. Sums, exponentials and products are in float32 (float64 if a side is), whatever the
features' own dtype: bfloat16 logits alone cost 4-18% of the gradient at scales of 50-100.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


@dataclass(frozen=True)
class Tile:
    """Rows `[i0, i1)` of A against columns `[j0, j1)` of B."""

    i0: int
    i1: int
    j0: int
    j1: int

    def fill_positives(self, S: Tensor, first: int, value: float) -> None:
        """Overwrite the entries of `S` [i1-i0, j1-j0] whose row and column are the same sample."""
        lo, hi = max(self.i0 + first, self.j0), min(self.i1 + first, self.j1)
        if lo < hi:
            S[lo - first - self.i0 : hi - first - self.i0, lo - self.j0 : hi - self.j0].diagonal().fill_(value)


def tiles(n: int, N: int, side: int) -> Iterator[Tile]:
    for i in range(0, n, side):
        for j in range(0, N, side):
            yield Tile(i, min(i + side, n), j, min(j + side, N))


class TileBuffer:
    """One allocation that every tile of a sweep is computed into."""

    def __init__(self, n: int, N: int, side: int, like: Tensor, dtype: torch.dtype):
        self.flat = torch.empty(min(n, side) * min(N, side), dtype=dtype, device=like.device)

    def view(self, tile: Tile) -> Tensor:
        rows, cols = tile.i1 - tile.i0, tile.j1 - tile.j0
        return self.flat[: rows * cols].view(rows, cols)


def exp_sums(A: Tensor, B: Tensor, scale: float, shift: float, first: int, side: int) -> tuple[Tensor, Tensor]:
    """Row sums [n] and column partial sums [N] of `exp(S - shift)` without the positives.

    One exponential per entry feeds both directions (2 n N D flops). The caller picks a `shift` that cannot
    overflow and checks that nothing that matters underflowed.
    """
    dtype = accumulation_dtype(A, B)
    rows, cols = A.new_zeros(len(A), dtype=dtype), B.new_zeros(len(B), dtype=dtype)
    buffer = TileBuffer(len(A), len(B), side, A, dtype)
    for t in tiles(len(A), len(B), side):
        S = buffer.view(t).fill_(-shift)
        S.addmm_(A[t.i0 : t.i1].to(dtype), B[t.j0 : t.j1].to(dtype).t(), alpha=scale).exp_()
        t.fill_positives(S, first, 0.0)
        rows[t.i0 : t.i1] += S.sum(1)
        cols[t.j0 : t.j1] += S.sum(0)
    return rows, cols


def row_logsumexp(A: Tensor, B: Tensor, scale: float, first: int, side: int) -> Tensor:
    """log of the row sums [n] of `exp(S)` without the positives, for any logits: a running maximum per row.

    The slow and always safe form of `exp_sums`; a row without negatives gives -inf.
    """
    dtype = accumulation_dtype(A, B)
    total = A.new_full((len(A),), -torch.inf, dtype=dtype)
    buffer = TileBuffer(len(A), len(B), side, A, dtype)
    for t in tiles(len(A), len(B), side):
        S = buffer.view(t).zero_()
        S.addmm_(A[t.i0 : t.i1].to(dtype), B[t.j0 : t.j1].to(dtype).t(), alpha=scale)
        t.fill_positives(S, first, -torch.inf)
        total[t.i0 : t.i1] = torch.logaddexp(total[t.i0 : t.i1], S.logsumexp(1))
    return total


def add_softmax_gradient(
    dA: Tensor,
    dB: Tensor | None,
    A: Tensor,
    B: Tensor,
    *,
    scale: float,
    weight: float,
    row_lse: Tensor,
    col_lse: Tensor,
    shift: float | None,
    first: int,
    side: int,
) -> None:
    """`dA += weight * scale * G B` and, if asked, `dB += weight * scale * G^T A`.

    `G = exp(S - row_lse) + exp(S - col_lse)` off the positives and zero on them; the LSEs [n], [N] are of
    whole rows and columns, positives included. With a `shift` that `exp_sums` found good, one exponential
    per entry serves both terms; with None each term takes its own, and any logits are safe.
    """
    dtype = accumulation_dtype(A, B)
    buffer, spare = (TileBuffer(len(A), len(B), side, A, dtype) for _ in range(2))
    if shift is not None:
        row_factor, col_factor = (shift - row_lse).exp(), (shift - col_lse).exp()
    for t in tiles(len(A), len(B), side):
        a, b = A[t.i0 : t.i1].to(dtype), B[t.j0 : t.j1].to(dtype)
        S, G = buffer.view(t), spare.view(t)
        if shift is not None:
            S.fill_(-shift).addmm_(a, b.t(), alpha=scale).exp_()
            torch.add(row_factor[t.i0 : t.i1, None], col_factor[None, t.j0 : t.j1], out=G)
            G.mul_(S)
        else:
            S.zero_().addmm_(a, b.t(), alpha=scale)
            torch.sub(S, row_lse[t.i0 : t.i1, None], out=G).exp_()
            G.add_(S.sub_(col_lse[None, t.j0 : t.j1]).exp_())
        t.fill_positives(G, first, 0.0)
        dA[t.i0 : t.i1].addmm_(G, b, alpha=weight * scale)
        if dB is not None:
            dB[t.j0 : t.j1].addmm_(G.t(), a, alpha=weight * scale)
