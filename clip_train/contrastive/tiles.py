"""Sweeps over the tiles of `S = scale * A B^T` that never hold more than one tile.

A is this rank's side [n, D], B the other side of the whole global batch [N, D]; the positive of row i is
column `first + i`. Sums, exponentials and products are in float32 (float64 if a side is), whatever the
features' own dtype: bfloat16 logits alone cost 4-18% of the gradient at scales of 50-100.

`side` is the largest tile's, AUTO_SIDE the one that fits shapes and cache.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

AUTO_SIDE = 0
GPU_SIDE = 4096  # 64 MiB of logits: enough work to hide a kernel's launch, small beside a model


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


def auto_side(n: int, N: int) -> int:
    """The side of the tiles of an n x N matrix: as large as fits into the cores' second-level caches.

    The elementwise passes over a tile then read from cache what the matrix product left there, and the
    product is large enough to run at full speed. Rounded so that no thin strip is left at an edge.
    """
    if torch.cuda.is_available():
        side = GPU_SIDE
    else:
        cores = max(torch.get_num_threads(), 1)
        side = 2 ** int(math.log2((cores * _second_level_cache() / 4) ** 0.5))  # 4 bytes an entry
        side = min(max(side, 512), 2048)
    longest = max(n, N, 1)
    pieces = math.ceil(longest / side)
    return 16 * math.ceil(longest / pieces / 16)  # 16 floats: the widest vector, so rows stay aligned


def _second_level_cache() -> int:
    """Bytes of one core's second-level cache; 1 MiB where the system does not tell."""
    try:
        return os.sysconf("SC_LEVEL2_CACHE_SIZE") or 2**20
    except (AttributeError, ValueError, OSError):
        return 2**20


def tiles(n: int, N: int, side: int = AUTO_SIDE) -> Iterator[Tile]:
    side = side or auto_side(n, N)
    for i in range(0, n, side):
        for j in range(0, N, side):
            yield Tile(i, min(i + side, n), j, min(j + side, N))


class TileBuffer:
    """One allocation that every tile of a sweep is computed into."""

    def __init__(self, n: int, N: int, side: int, like: Tensor, dtype: torch.dtype):
        side = side or auto_side(n, N)
        self.flat = torch.empty(min(n, side) * min(N, side), dtype=dtype, device=like.device)

    def view(self, tile: Tile) -> Tensor:
        rows, cols = tile.i1 - tile.i0, tile.j1 - tile.j0
        return self.flat[: rows * cols].view(rows, cols)


def scaled_product(S: Tensor, a: Tensor, b: Tensor, scale: float, offset: float) -> None:
    """`S = scale * a b^T + offset`, in the memory of S."""
    if offset == 0:
        torch.addmm(S, a, b.t(), beta=0, alpha=scale, out=S)  # beta = 0: whatever is in S is ignored
    else:
        S.fill_(offset).addmm_(a, b.t(), alpha=scale)


def exp_sums(A: Tensor, B: Tensor, scale: float, shift: float, first: int, side: int) -> tuple[Tensor, Tensor]:
    """Row sums [n] and column partial sums [N] of `exp(S - shift)` without the positives.

    One exponential per entry feeds both directions (2 n N D flops). The caller picks a `shift` that cannot
    overflow and checks that nothing that matters underflowed.
    """
    dtype = accumulation_dtype(A, B)
    rows, cols = A.new_zeros(len(A), dtype=dtype), B.new_zeros(len(B), dtype=dtype)
    buffer = TileBuffer(len(A), len(B), side, A, dtype)
    for t in tiles(len(A), len(B), side):
        S = buffer.view(t)
        scaled_product(S, A[t.i0 : t.i1].to(dtype), B[t.j0 : t.j1].to(dtype), scale, -shift)
        S.exp_()
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
        S = buffer.view(t)
        scaled_product(S, A[t.i0 : t.i1].to(dtype), B[t.j0 : t.j1].to(dtype), scale, 0)
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
        row_factor, col_factor = (shift - row_lse).exp().to(dtype), (shift - col_lse).exp().to(dtype)
    row_lse, col_lse = row_lse.to(dtype), col_lse.to(dtype)
    for t in tiles(len(A), len(B), side):
        a, b = A[t.i0 : t.i1].to(dtype), B[t.j0 : t.j1].to(dtype)
        S, G = buffer.view(t), spare.view(t)
        if shift is not None:
            scaled_product(S, a, b, scale, -shift)
            S.exp_()
            torch.add(row_factor[t.i0 : t.i1, None], col_factor[None, t.j0 : t.j1], out=G)
            G.mul_(S)
        else:
            scaled_product(S, a, b, scale, 0)
            torch.sub(S, row_lse[t.i0 : t.i1, None], out=G).exp_()
            G.add_(S.sub_(col_lse[None, t.j0 : t.j1]).exp_())
        t.fill_positives(G, first, 0.0)
        dA[t.i0 : t.i1].addmm_(G, b, alpha=weight * scale)
        if dB is not None:
            dB[t.j0 : t.j1].addmm_(G.t(), a, alpha=weight * scale)


def add_sigmoid_gradient(
    dA: Tensor,
    dB: Tensor | None,
    A: Tensor,
    B: Tensor,
    *,
    scale: float,
    bias: float,
    weight: float,
    first: int | None,
    side: int,
    with_sums: bool = True,
) -> tuple[Tensor, Tensor]:
    """`dA += weight * scale * G B`, if asked `dB += weight * scale * G^T A`, with `G = sigmoid(S + bias)`.

    Returns the sums of `softplus(S + bias)` and of G, float64 [] (zeros without `with_sums`). Positives are left
    out of all four; first = None: this B holds none.
    """
    dtype = accumulation_dtype(A, B)
    buffer, spare = (TileBuffer(len(A), len(B), side, A, dtype) for _ in range(2))
    value, slope = (A.new_zeros((), dtype=torch.float64) for _ in range(2))
    zero = A.new_zeros((), dtype=dtype)
    for t in tiles(len(A), len(B), side):
        a, b = A[t.i0 : t.i1].to(dtype), B[t.j0 : t.j1].to(dtype)
        S, G = buffer.view(t), spare.view(t)
        scaled_product(S, a, b, scale, bias)
        if first is not None:
            t.fill_positives(S, first, -torch.inf)  # adds nothing to either sum, and its gradient is zero
        torch.sigmoid(S, out=G)
        if with_sums:
            slope += G.sum()
            value += torch.logaddexp(S, zero, out=S).sum()  # softplus; torch's own turns linear at 20
        dA[t.i0 : t.i1].addmm_(G, b, alpha=weight * scale)
        if dB is not None:
            dB[t.j0 : t.j1].addmm_(G.t(), a, alpha=weight * scale)
    return value, slope


def row_dots(A: Tensor, B: Tensor) -> Tensor:
    """`(A * B).sum(1)` [n] in float64, without an n x D product in memory: digits a loss near zero needs."""
    chunks = zip(A.split(256), B.split(256), strict=True)
    return torch.cat([(a.double() * b.double()).sum(1) for a, b in chunks])
