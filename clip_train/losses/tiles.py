"""Compute blocks of `S = scale * A B^T` tile by tile, never holding more than one tile.

All logits of all objectives are made here. Rows of A are usually this rank's side,
rows of B the other side of the whole global batch. Sums, exponentials and products are in float32
(float64 if a side is), whatever the features' own dtype: bfloat16 logits alone cost 4-18% of the
gradient at scales of 50-100.

`side` is the largest tile's, AUTO_SIDE the one that fits shapes and cache; `[r, c]` is a block's
shape.
"""

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


def auto_side(n: int, N: int) -> int:
    """The side of the tiles of an n x N matrix: as large as fits into the second-level caches.

    The elementwise passes over a tile then read the matrix product from cache, and the product is
    large enough to run at full speed. Rounded so that no thin strip is left at an edge.
    """
    if torch.cuda.is_available():
        side = GPU_SIDE
    else:
        cache = 0  # bytes of one core's; 0 if it is not known
        if "SC_LEVEL2_CACHE_SIZE" in os.sysconf_names:
            cache = max(os.sysconf("SC_LEVEL2_CACHE_SIZE"), 0)
        entries = torch.get_num_threads() * (cache or 2**20) / 4
        side = min(max(2 ** int(math.log2(entries**0.5)), 512), 2048)
    longest = max(n, N, 1)
    pieces = math.ceil(longest / side)
    # 16 floats: the widest vector, so rows stay aligned
    return 16 * math.ceil(longest / pieces / 16)


def tile_shape(n: int, N: int, side: int = AUTO_SIDE) -> tuple[int, int]:
    """Rows and columns of the tiles of an n x N matrix: squares, or as long as rows are few.

    No tile has more than side * side entries, up to the rounding of its columns to 16.
    """
    side = side or auto_side(n, N)
    rows = max(min(n, side), 1)
    pieces = math.ceil(N * rows / (side * side))
    cols = math.ceil(N / max(pieces, 1))
    return rows, side if rows == side else 16 * math.ceil(cols / 16)


def tiles(n: int, N: int, side: int = AUTO_SIDE) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of each tile of an n x N matrix, row after row."""
    rows, cols = tile_shape(n, N, side)
    for i in range(0, n, rows):
        for j in range(0, N, cols):
            yield slice(i, min(i + rows, n)), slice(j, min(j + cols, N))


@dataclass(frozen=True)
class Block:
    """Rows `row + i` of S, made by A [r, D], against its columns `col + j`, made by B [c, D].

    Row x and column x are a pair, so that entry is a positive. `ids` holds one int64 for each row
    and one for each column of S. An entry whose row and column have the same id is not a negative,
    unless the id is below 0.
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

    def logits(
        self, scale: Tensor, shift: Tensor | None, side: int
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Each tile's rows, columns, `S = scale * a b^T - shift`, and a spare tile of memory.

        scale, shift: [1], on the device, because reading their values would wait for it. None: no
        shift.
        """
        r, c = len(self.A), len(self.B)
        most_rows, most_cols = tile_shape(r, c, side)
        entries = min(r, most_rows) * min(c, most_cols)
        memory = torch.empty(2, entries, dtype=self.dtype, device=self.A.device)
        for rows, cols in tiles(r, c, side):
            if cols.start == 0:
                a = self.A[rows].to(self.dtype) * scale.to(self.dtype)
            b = self.B[cols].to(self.dtype)
            S, spare = memory[:, : len(a) * len(b)].view(2, len(a), len(b))
            torch.mm(a, b.t(), out=S)
            yield rows, cols, S if shift is None else S.sub_(shift), spare

    def same(self, rows: slice, cols: slice) -> Tensor | None:
        """bool, as the tile: entries of one id. None: no ids are known."""
        if self.ids is None:
            return None
        row_ids, col_ids = self.ids[0][self.rows][rows, None], self.ids[1][self.cols][None, cols]
        return (row_ids == col_ids) & (col_ids >= 0)

    def fill(self, rows: slice, cols: slice, S: Tensor, value: float) -> None:
        """Overwrite the entries of the tile `S` that are not negatives."""
        self.fill_pairs(rows, cols, S, value)
        same = self.same(rows, cols)
        if same is not None:
            S.masked_fill_(same, value)

    def fill_pairs(self, rows: slice, cols: slice, S: Tensor, value: float) -> None:
        """Overwrite the entries of the tile `S` whose row and column are a pair."""
        # the pair of row i is column first + i of the block, if it is there
        first = self.row - self.col
        lo, hi = max(rows.start + first, cols.start), min(rows.stop + first, cols.stop)
        if lo < hi:
            of_rows = slice(lo - first - rows.start, hi - first - rows.start)
            S[of_rows, lo - cols.start : hi - cols.start].diagonal().fill_(value)

    def add_products(
        self, rows: slice, cols: slice, G: Tensor, weight: float, dA: Tensor, dB: Tensor | None,
        values: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """For the tile G: `dA += weight * G B`, if asked `dB += weight * G^T A`.

        values: stand for A and B.
        """
        A, B = values or (self.A, self.B)
        dA[rows].addmm_(G, B[cols].to(self.dtype), alpha=weight)
        if dB is not None:
            dB[cols].addmm_(G.t(), A[rows].to(self.dtype), alpha=weight)


def exp_sums(block: Block, scale: Tensor, shift: Tensor | None, side: int) -> tuple[Tensor, Tensor]:
    """Row sums [r] and column sums [c] of `exp(S - shift)` over the negatives of the block.

    One exponential per entry feeds both directions (2 r c D flops). The caller picks a `shift` that
    cannot overflow and checks that nothing that matters underflowed.
    """
    row_sums, col_sums = (x.new_zeros(len(x), dtype=block.dtype) for x in (block.A, block.B))
    for rows, cols, S, _ in block.logits(scale, shift, side):
        S.exp_()
        block.fill(rows, cols, S, 0.0)
        row_sums[rows] += S.sum(1)
        col_sums[cols] += S.sum(0)
    return row_sums, col_sums


def row_logsumexp(block: Block, scale: Tensor, side: int) -> Tensor:
    """log of the row sums [r] of `exp(S)` over the negatives, with a running maximum per row.

    The slow and always safe form of `exp_sums`; a row without negatives gives -inf.
    """
    total = block.A.new_full((len(block.A),), -torch.inf, dtype=block.dtype)
    for rows, cols, S, _ in block.logits(scale, None, side):
        block.fill(rows, cols, S, -torch.inf)
        total[rows] = torch.logaddexp(total[rows], S.logsumexp(1))
    return total


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) for every x; torch's own turns linear at 20, which is 2e-9 off."""
    return torch.logaddexp(x, x.new_zeros(()))


def row_dots(A: Tensor, B: Tensor) -> Tensor:
    """`(A * B).sum(1)` [n], summed in float64, without an n x D product in memory.

    A loss near zero needs these digits.
    """
    size = 256 if A.device.type == "cpu" else 8192  # rows: few launches on a GPU, in cache on a CPU
    dtype = accumulation_dtype(A, B)
    chunks = zip(A.split(size), B.split(size), strict=True)
    return torch.cat([(a.to(dtype) * b.to(dtype)).sum(1, dtype=torch.float64) for a, b in chunks])
