"""Compute blocks of `S = scale * A B^T` tile by tile, never holding more than one tile.

All logits of all objectives are made here. A usually has this rank's features of one kind, such as
images, and B the features of the other kind from the whole global batch. Sums, exponentials and
products are in float32 (float64 if A or B is), whatever the features' own dtype: bfloat16 logits
alone cost 4-18% of the gradient at scales of 50-100.

`[r, c]` is the shape of a block. `tile_side` is the side of its largest tile; AUTO_SIDE chooses one
by the shape of the block and the cache.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

AUTO_SIDE = 0
# 64 MiB of logits: enough work to hide a kernel's launch, small beside a model
GPU_SIDE = 4096


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def auto_side(n: int, N: int) -> int:
    """Choose the side of the tiles of an n x N matrix: as large as fits into the second-level
    caches.

    The elementwise passes over a tile then read the matrix product from cache, and the product is
    large enough to run at full speed. The side is rounded so that no thin strip is left at an edge.
    """
    if torch.cuda.is_available():
        side = GPU_SIDE
    else:
        cache = 0  # bytes for one core; 0 if unknown
        if "SC_LEVEL2_CACHE_SIZE" in os.sysconf_names:
            cache = max(os.sysconf("SC_LEVEL2_CACHE_SIZE"), 0)
        entries = torch.get_num_threads() * (cache or 2**20) / 4
        side = min(max(2 ** int(math.log2(entries**0.5)), 512), 2048)
    longest = max(n, N, 1)
    pieces = math.ceil(longest / side)
    # 16 floats: the widest vector, so rows stay aligned
    return 16 * math.ceil(longest / pieces / 16)


def tile_shape(n: int, N: int, tile_side: int = AUTO_SIDE) -> tuple[int, int]:
    """Return how many rows and columns the tiles of an n x N matrix have. If the matrix has fewer
    rows than a square tile, its tiles have more columns instead.

    No tile has more than tile_side * tile_side entries, except that its columns are rounded up to a
    multiple of 16.
    """
    tile_side = tile_side or auto_side(n, N)
    rows = max(min(n, tile_side), 1)
    if rows == tile_side:
        return rows, tile_side
    pieces = math.ceil(N * rows / (tile_side * tile_side))
    cols = math.ceil(N / max(pieces, 1))
    return rows, 16 * math.ceil(cols / 16)


def tiles(n: int, N: int, tile_side: int = AUTO_SIDE) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of each tile of an n x N matrix, row after row."""
    rows, cols = tile_shape(n, N, tile_side)
    for i in range(0, n, rows):
        for j in range(0, N, cols):
            yield slice(i, min(i + rows, n)), slice(j, min(j + cols, N))


class EntryIds(NamedTuple):
    """The ids of all rows and of all columns of S, int64. An entry whose row and column have the
    same id is not a negative, unless the id is below 0."""

    rows: Tensor
    cols: Tensor


class Values(NamedTuple):
    """What the softmaxes of a block are multiplied with, such as the values of an attention."""

    A: Tensor  # [r, E]
    B: Tensor  # [c, E]


@dataclass(frozen=True)
class Block:
    """A part of S: the rows from `row` on, made by A, and the columns from `col` on, made by B.

    Row x and column x of S are a pair, so entry (x, x) is a positive.
    """

    A: Tensor  # [r, D]
    B: Tensor  # [c, D]
    row: int = 0
    col: int = 0
    ids: EntryIds | None = None

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + len(self.A))

    @property
    def cols(self) -> slice:
        return slice(self.col, self.col + len(self.B))

    @property
    def dtype(self) -> torch.dtype:
        return accumulation_dtype(self.A, self.B)

    def logits(
        self, scale: Tensor, shift: Tensor | None, tile_side: int
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Yield each tile's rows, columns, `S = scale * a b^T - shift`, and a spare tile of memory.
        Rows and columns count from the first ones of this block.

        scale, shift: [1], on the device, because reading their values would wait for it. None: no
        shift.
        """
        r, c = len(self.A), len(self.B)
        most_rows, most_cols = tile_shape(r, c, tile_side)
        entries = min(r, most_rows) * min(c, most_cols)
        memory = torch.empty(2, entries, dtype=self.dtype, device=self.A.device)
        for rows, cols in tiles(r, c, tile_side):
            if cols.start == 0:
                a = self.A[rows].to(self.dtype) * scale.to(self.dtype)
            b = self.B[cols].to(self.dtype)
            S, spare = memory[:, : len(a) * len(b)].view(2, len(a), len(b))
            torch.mm(a, b.t(), out=S)
            if shift is not None:
                S.sub_(shift)
            yield rows, cols, S, spare

    def same(self, rows: slice, cols: slice) -> Tensor | None:
        """Mark the entries of a tile whose row and column have the same id, in a bool tensor of its
        shape. None: no ids are known."""
        if self.ids is None:
            return None
        row_ids = self.ids.rows[self.rows][rows, None]
        col_ids = self.ids.cols[self.cols][None, cols]
        return (row_ids == col_ids) & (col_ids >= 0)

    def fill(self, rows: slice, cols: slice, S: Tensor, value: float) -> None:
        """Overwrite the entries of the tile `S` that are not negatives."""
        self.fill_pairs(rows, cols, S, value)
        same = self.same(rows, cols)
        if same is not None:
            S.masked_fill_(same, value)

    def fill_pairs(self, rows: slice, cols: slice, S: Tensor, value: float) -> None:
        """Overwrite the entries of the tile `S` whose row and column are a pair."""
        # the pair of row i of the block is its column i + offset, if the block has that column
        offset = self.row - self.col
        # the columns of the tile whose pairs are rows of the tile
        start = max(rows.start + offset, cols.start)
        stop = min(rows.stop + offset, cols.stop)
        if start < stop:
            paired_rows = slice(start - offset - rows.start, stop - offset - rows.start)
            paired_cols = slice(start - cols.start, stop - cols.start)
            S[paired_rows, paired_cols].diagonal().fill_(value)

    def add_products(
        self,
        rows: slice,
        cols: slice,
        G: Tensor,
        *,
        weight: float,
        dA: Tensor,
        dB: Tensor | None,
        values: Values | None = None,
    ) -> None:
        """Add the products of the tile G: `dA += weight * G B`, and `dB += weight * G^T A` unless
        dB is None.

        values: used in place of A and B.
        """
        A, B = values or (self.A, self.B)
        dA[rows].addmm_(G, B[cols].to(self.dtype), alpha=weight)
        if dB is not None:
            dB[cols].addmm_(G.t(), A[rows].to(self.dtype), alpha=weight)


def exp_sums(
    block: Block, scale: Tensor, shift: Tensor | None, tile_side: int
) -> tuple[Tensor, Tensor]:
    """Compute row sums [r] and column sums [c] of `exp(S - shift)` over the negatives of the block.

    One exponential per entry feeds both directions (2 r c D flops). The caller picks a `shift` that
    cannot overflow and checks that nothing that matters underflowed.
    """
    row_sums = block.A.new_zeros(len(block.A), dtype=block.dtype)
    col_sums = block.B.new_zeros(len(block.B), dtype=block.dtype)
    for rows, cols, S, _ in block.logits(scale, shift, tile_side):
        S.exp_()
        block.fill(rows, cols, S, 0.0)
        row_sums[rows] += S.sum(1)
        col_sums[cols] += S.sum(0)
    return row_sums, col_sums


def row_logsumexp(block: Block, scale: Tensor, tile_side: int) -> Tensor:
    """Compute the log of the row sums [r] of `exp(S)` over the negatives, with a running maximum per
    row.

    The slow and always safe form of `exp_sums`; a row without negatives gives -inf.
    """
    total = block.A.new_full((len(block.A),), -torch.inf, dtype=block.dtype)
    for rows, cols, S, _ in block.logits(scale, None, tile_side):
        block.fill(rows, cols, S, -torch.inf)
        total[rows] = torch.logaddexp(total[rows], S.logsumexp(1))
    return total


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + e^x) for every x. torch's `softplus` is linear above 20, an error of 2e-9."""
    return torch.logaddexp(x, x.new_zeros(()))


def row_dots(A: Tensor, B: Tensor) -> Tensor:
    """Compute `(A * B).sum(1)` [n] in float64, without an n x D product in memory.

    A loss near zero needs these digits.
    """
    # rows of a chunk: it fits into the cache of a CPU, and needs few launches on a GPU
    size = 256 if A.device.type == "cpu" else 8192
    dtype = accumulation_dtype(A, B)
    chunks = zip(A.split(size), B.split(size), strict=True)
    return torch.cat([(a.to(dtype) * b.to(dtype)).sum(1, dtype=torch.float64) for a, b in chunks])
