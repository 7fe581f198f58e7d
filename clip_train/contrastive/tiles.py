"""Passes over the tiles of blocks of `S = scale * A B^T` that never hold more than one tile.

Every objective's logits are made here, and nowhere else. Rows of A are usually this rank's side, rows of B the
other side of the whole global batch. Sums, exponentials and products are in float32 (float64 if a side is),
whatever the features' own dtype: bfloat16 logits alone cost 4-18% of the gradient at scales of 50-100.

`side` is the largest tile's, AUTO_SIDE the one that fits shapes and cache.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from clip_train.contrastive.config import AUTO_SIDE

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

    @property
    def rows(self) -> slice:
        return slice(self.i0, self.i1)

    @property
    def cols(self) -> slice:
        return slice(self.j0, self.j1)


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
    """Bytes of one core's second-level cache; 1 MiB where it is not known."""
    try:
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (AttributeError, ValueError, OSError):
        size = 0
    return size if size > 0 else 2**20  # 0 or -1: not known


def tiles(n: int, N: int, side: int = AUTO_SIDE) -> Iterator[Tile]:
    side = side or auto_side(n, N)
    for i in range(0, n, side):
        for j in range(0, N, side):
            yield Tile(i, min(i + side, n), j, min(j + side, N))


class TileBuffer:
    """One allocation that every tile of a pass is computed into."""

    def __init__(self, n: int, N: int, side: int, like: Tensor, dtype: torch.dtype):
        side = side or auto_side(n, N)
        self.flat = torch.empty(min(n, side) * min(N, side), dtype=dtype, device=like.device)

    def view(self, tile: Tile) -> Tensor:
        rows, cols = tile.i1 - tile.i0, tile.j1 - tile.j0
        return self.flat[: rows * cols].view(rows, cols)


@dataclass(frozen=True)
class Block:
    """Rows `row + i` of S, made by A [r, D], against its columns `col + j`, made by B [c, D].

    Row x and column x are a pair: such an entry is a positive. ids, int64 [r] and [c]: entries of one sample are
    no negatives either; a negative id is of no known sample.
    """

    A: Tensor
    B: Tensor
    row: int = 0
    col: int = 0
    ids: tuple[Tensor, Tensor] | None = None

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + len(self.A))

    @property
    def cols(self) -> slice:
        return slice(self.col, self.col + len(self.B))

    @property
    def dtype(self) -> torch.dtype:
        return accumulation_dtype(self.A, self.B)

    def buffer(self, side: int) -> TileBuffer:
        return TileBuffer(len(self.A), len(self.B), side, self.A, self.dtype)

    def logits(self, scale: float, offset: float, side: int) -> Iterator[tuple[Tile, Tensor, Tensor, Tensor]]:
        """Tile by tile, in the same memory: the tile, its rows of A and of B, and `S = scale * a b^T + offset`."""
        buffer = self.buffer(side)
        for t in tiles(len(self.A), len(self.B), side):
            a, b, S = self.A[t.rows].to(self.dtype), self.B[t.cols].to(self.dtype), buffer.view(t)
            if offset == 0:
                torch.addmm(S, a, b.t(), beta=0, alpha=scale, out=S)  # beta = 0: whatever is in S is ignored
            else:
                S.fill_(offset).addmm_(a, b.t(), alpha=scale)
            yield t, a, b, S

    def fill(self, t: Tile, S: Tensor, value: float) -> None:
        """Overwrite the entries of the tile `S` that are no negatives."""
        first = self.row - self.col  # row i's own pair is column first + i of the block, where it has one
        lo, hi = max(t.i0 + first, t.j0), min(t.i1 + first, t.j1)
        if lo < hi:
            S[lo - first - t.i0 : hi - first - t.i0, lo - t.j0 : hi - t.j0].diagonal().fill_(value)
        if self.ids is not None:
            rows, cols = self.ids[0][t.rows, None], self.ids[1][None, t.cols]
            S.masked_fill_((rows == cols) & (cols >= 0), value)


def exp_sums(block: Block, scale: float, shift: float, side: int) -> tuple[Tensor, Tensor]:
    """Row sums [r] and column sums [c] of `exp(S - shift)` over the negatives of the block.

    One exponential per entry feeds both directions (2 r c D flops). The caller picks a `shift` that cannot
    overflow and checks that nothing that matters underflowed.
    """
    rows, cols = (x.new_zeros(len(x), dtype=block.dtype) for x in (block.A, block.B))
    for t, _, _, S in block.logits(scale, -shift, side):
        S.exp_()
        block.fill(t, S, 0.0)
        rows[t.rows] += S.sum(1)
        cols[t.cols] += S.sum(0)
    return rows, cols


def row_logsumexp(block: Block, scale: float, side: int) -> Tensor:
    """log of the row sums [r] of `exp(S)` over the negatives, for any logits: a running maximum per row.

    The slow and always safe form of `exp_sums`; a row without negatives gives -inf.
    """
    total = block.A.new_full((len(block.A),), -torch.inf, dtype=block.dtype)
    for t, _, _, S in block.logits(scale, 0, side):
        block.fill(t, S, -torch.inf)
        total[t.rows] = torch.logaddexp(total[t.rows], S.logsumexp(1))
    return total


def add_softmax_gradient(
    dA: Tensor,
    dB: Tensor | None,
    block: Block,
    *,
    scale: float,
    weight: float,
    row_lse: Tensor,
    col_lse: Tensor,
    shift: float | None,
    side: int,
    values: tuple[Tensor, Tensor] | None = None,
) -> None:
    """`dA += weight * G B` and, if asked, `dB += weight * G^T A`.

    `G = exp(S - row_lse) + exp(S - col_lse)` on the negatives and zero elsewhere; the LSEs are of all rows and all
    columns of S, positives included; one of inf leaves its term out. With a `shift` that `exp_sums` found good,
    one exponential per entry serves both terms; with None each takes its own, and any logits are safe. values:
    stand for A and B in the two products, as in attention; by default A and B do.
    """
    A, B = values or (block.A, block.B)
    spare = block.buffer(side)
    row_lse, col_lse = row_lse[block.rows], col_lse[block.cols]
    if shift is not None:
        row_factor, col_factor = (shift - row_lse).exp().to(block.dtype), (shift - col_lse).exp().to(block.dtype)
    row_lse, col_lse = row_lse.to(block.dtype), col_lse.to(block.dtype)
    for t, _, _, S in block.logits(scale, 0 if shift is None else -shift, side):
        G = spare.view(t)
        if shift is not None:
            torch.add(row_factor[t.rows, None], col_factor[None, t.cols], out=G)
            G.mul_(S.exp_())
        else:
            torch.sub(S, row_lse[t.rows, None], out=G).exp_()
            G.add_(S.sub_(col_lse[None, t.cols]).exp_())
        block.fill(t, G, 0.0)
        dA[t.rows].addmm_(G, B[t.cols].to(block.dtype), alpha=weight)
        if dB is not None:
            dB[t.cols].addmm_(G.t(), A[t.rows].to(block.dtype), alpha=weight)


def add_sigmoid_gradient(
    dA: Tensor,
    dB: Tensor | None,
    block: Block,
    *,
    scale: float,
    bias: float,
    weight: float,
    side: int,
    with_sums: bool = True,
) -> tuple[Tensor, Tensor]:
    """`dA += weight * G B`, if asked `dB += weight * G^T A`, with `G = sigmoid(S + bias)` on the negatives.

    Returns the sums of `softplus(S + bias)` and of G over them, float64 [] (zeros without `with_sums`).
    """
    spare = block.buffer(side)
    value, slope = (block.A.new_zeros((), dtype=torch.float64) for _ in range(2))
    zero = block.A.new_zeros((), dtype=block.dtype)
    for t, a, b, S in block.logits(scale, bias, side):
        G = spare.view(t)
        block.fill(t, S, -torch.inf)  # adds nothing to either sum, and its gradient is zero
        torch.sigmoid(S, out=G)
        if with_sums:
            slope += G.sum()
            value += torch.logaddexp(S, zero, out=S).sum()  # softplus; torch's own turns linear at 20
        dA[t.rows].addmm_(G, b, alpha=weight)
        if dB is not None:
            dB[t.cols].addmm_(G.t(), a, alpha=weight)
    return value, slope


def row_dots(A: Tensor, B: Tensor) -> Tensor:
    """`(A * B).sum(1)` [n] in float64, without an n x D product in memory: digits a loss near zero needs."""
    chunks = zip(A.split(256), B.split(256), strict=True)
    return torch.cat([(a.double() * b.double()).sum(1) for a, b in chunks])
