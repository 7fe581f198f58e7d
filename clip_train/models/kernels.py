"""Triton kernels for the backward passes of `clip_train.models.one_pass`, which describes them.

`R` rows (tokens), `C` columns (features), `S` partial sums. Elements may be bfloat16, float16 or
float32; products and sums are in float32, the sums in a fixed order.

    python -m clip_train.models.kernels    # on a GPU: each kernel's error and speed
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.testing import do_bench

from clip_train.models import plain_passes

PROGRAMS = 2048  # of the kernels over tiles; an H100 has 132 multiprocessors
NORM_PROGRAMS = 528  # four for each of them
TILE_ROWS, TILE_COLUMNS = 16, 128


@triton.jit
def _gelu_backward(
    dy, x, bias, dx, sums, R, C: tl.constexpr, S: tl.constexpr, QUICK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program has COLUMNS columns and the rows of one of S parts, ROWS at a time."""
    part = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    size = tl.cdiv(R, S)
    first = part * size
    count = tl.minimum(size, R - first)
    start = first.to(tl.int64) * C  # beyond 2^31 in a large micro-batch; within a part it is not
    b = tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for row in range(0, count, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = (rows < count)[:, None] & (column < C)[None, :]
        at = rows[:, None] * C + column[None, :]
        z = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32) + b[None, :]
        g = tl.load(dy + start + at, mask=inside, other=0.0).to(tl.float32)
        if QUICK:
            sigmoid = 1 / (1 + tl.exp(-1.702 * z))
            g *= sigmoid * (1 + 1.702 * z * (1 - sigmoid))
        else:
            # Phi(z) + z phi(z)
            g *= 0.5 + 0.5 * tl.erf(z * 0.7071067811865476) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)  # fmt: skip
        tl.store(dx + start + at, g, mask=inside)
        total += g
    tl.store(sums + part * C + column, tl.sum(total, 0), mask=column < C)


@triton.jit
def _join(
    dq, dk, dv, joined, sums, R, C: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Three [R, C] side by side, [R, 3 C], and the sums over rows, [S, 3 C]."""
    tiles: tl.constexpr = (C + COLUMNS - 1) // COLUMNS  # of one of the three
    which = tl.program_id(0) // tiles
    part = tl.program_id(1)
    source = dq
    if which == 1:
        source = dk
    if which == 2:
        source = dv
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    size = tl.cdiv(R, S)
    first = part * size
    count = tl.minimum(size, R - first)
    source += first.to(tl.int64) * C
    target = joined + first.to(tl.int64) * 3 * C + which * C
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for row in range(0, count, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = (rows < count)[:, None] & (column < C)[None, :]
        g = tl.load(source + rows[:, None] * C + column[None, :], mask=inside, other=0.0)
        tl.store(target + rows[:, None] * 3 * C + column[None, :], g, mask=inside)
        total += g.to(tl.float32)
    tl.store(sums + part * 3 * C + which * C + column, tl.sum(total, 0), mask=column < C)


@triton.jit
def _norm_backward(
    dskip, dnormed, x, mean, rstd, weight, dx, sums, R, C: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program has whole rows, those of one of S parts, ROWS at a time. COLUMNS >= C."""
    part = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    size = tl.cdiv(R, S)
    first = part * size
    count = tl.minimum(size, R - first)
    start = first.to(tl.int64) * C
    w = tl.load(weight + column, mask=column < C, other=0.0).to(tl.float32)
    of_weight = tl.zeros([COLUMNS], tl.float32)
    of_bias = tl.zeros([COLUMNS], tl.float32)
    of_x = tl.zeros([COLUMNS], tl.float32)
    for row in range(0, count, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = (rows < count)[:, None] & (column < C)[None, :]
        at = rows[:, None] * C + column[None, :]
        center = tl.load(mean + first + rows, mask=rows < count, other=0.0)[:, None]
        scale = tl.load(rstd + first + rows, mask=rows < count, other=0.0)[:, None]
        g = tl.load(dnormed + start + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dskip + start + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.where(inside, (z - center) * scale, 0.0)
        of_weight += tl.sum(g * z, 0)
        of_bias += tl.sum(g, 0)
        g *= w[None, :]
        along = tl.sum(g * z, 1)[:, None] / C
        level = tl.sum(g, 1)[:, None] / C
        d += scale * (g - level - along * z)
        tl.store(dx + start + at, d, mask=inside)
        of_x += tl.sum(tl.where(inside, d, 0.0), 0)
    sums += part * 3 * C
    tl.store(sums + column, of_weight, mask=column < C)
    tl.store(sums + C + column, of_bias, mask=column < C)
    tl.store(sums + 2 * C + column, of_x, mask=column < C)


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **sizes: int) -> None:
    """In the graph of torch.compile, or at once."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    (kernel if interpreted else torch.library.wrap_triton(kernel))[grid](*args, **sizes)


@torch.library.triton_op("clip_train::gelu_backward", mutates_args={})
def gelu_backward(dy: Tensor, x: Tensor, bias: Tensor, quick: bool) -> tuple[Tensor, Tensor]:
    """[R, C], [R, C], [C] -> the gradients of x [R, C] and, as partial sums, of the bias [S, C]."""
    R, C = x.shape
    tiles = triton.cdiv(C, TILE_COLUMNS)
    S = triton.cdiv(PROGRAMS, tiles)
    dx, sums = torch.empty_like(x), x.new_empty(S, C, dtype=torch.float32)
    _launch(
        _gelu_backward, (tiles, S), dy, x, bias, dx, sums, R,
        C=C, S=S, QUICK=quick, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS,
    )  # fmt: skip
    return dx, sums


@torch.library.triton_op("clip_train::join", mutates_args={})
def join(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """Three [R, C] -> [R, 3 C], and partial sums over its rows [S, 3 C]."""
    R, C = dq.shape
    tiles = 3 * triton.cdiv(C, TILE_COLUMNS)
    S = triton.cdiv(PROGRAMS, tiles)
    joined, sums = dq.new_empty(R, 3 * C), dq.new_empty(S, 3 * C, dtype=torch.float32)
    _launch(
        _join, (tiles, S), dq, dk, dv, joined, sums, R,
        C=C, S=S, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS,
    )  # fmt: skip
    return joined, sums


@torch.library.triton_op("clip_train::norm_backward", mutates_args={})
def norm_backward(
    dskip: Tensor, dnormed: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """[R, C], [R, C], [R, C], [R], [R], [C] -> the gradient of x [R, C], and partial sums [S, 3, C]
    of those of the norm's weight and bias, and of that of x over its rows."""
    R, C = x.shape
    columns = triton.next_power_of_2(C)
    dx, sums = torch.empty_like(x), x.new_empty(NORM_PROGRAMS, 3, C, dtype=torch.float32)
    _launch(
        _norm_backward, (NORM_PROGRAMS,), dskip, dnormed, x, mean, rstd, weight, dx, sums, R,
        C=C, S=NORM_PROGRAMS, ROWS=2 if columns <= 1024 else 1, COLUMNS=columns,
        num_warps=4 if columns <= 1024 else 8,
    )  # fmt: skip
    return dx, sums


@dataclass
class Check:
    """A kernel's largest relative errors against float64, and its time beside the plain version."""

    kernel: str
    rows: int
    columns: int
    dtype: str
    errors: list[float]  # of each result: |x - exact| / |exact|, by Frobenius norms
    milliseconds: float | None  # None where nothing is timed
    plain_milliseconds: float | None

    @property
    def is_right(self) -> bool:
        """Elements are rounded once, which Triton's interpreter does towards zero; sums are
        float32."""
        elements, sums = self.errors
        most = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 1e-6}[self.dtype]
        return elements < most and sums < 2e-6


def check(
    device: str,
    num_rows: Sequence[int] = (1, 7 * 77, 1024 * 50),
    widths: Sequence[int] = (768, 512, 1024, 1280, 1664),
    timed: Sequence[int] = (768, 1024),
) -> Iterator[Check]:
    """Every kernel against its plain version in float64: in bfloat16 for each width, in float32 for
    the first one. timed: widths for which the most rows in bfloat16 are timed as well."""
    for C, dtype in [(C, torch.bfloat16) for C in widths] + [(widths[0], torch.float32)]:
        for R in num_rows:
            for name, inputs in _inputs(device, R, C, dtype):
                kernel, plain = _KERNELS[name], getattr(plain_passes, name)
                errors = _errors(kernel, plain, inputs)
                times: list[float | None] = [None, None]
                if C in timed and max(num_rows) == R and dtype == torch.bfloat16:
                    times = [_milliseconds(kernel, inputs), _milliseconds(plain, inputs)]
                yield Check(name, R, C, str(dtype).removeprefix("torch."), errors, *times)


def _errors(kernel: Any, plain: Any, inputs: Sequence[Any]) -> list[float]:
    elements, sums = kernel(*inputs)
    found = (elements.double(), sums.double().sum(0))
    elements, sums = plain(*(x.double() if isinstance(x, Tensor) else x for x in inputs))
    exact = (elements, sums.sum(0))
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def _milliseconds(function: Any, inputs: Sequence[Any]) -> float:
    """Compiled, as in a step."""

    def both(*args: Any) -> tuple[Tensor, Tensor]:
        elements, sums = function(*args)
        return elements, sums.sum(0)

    compiled = torch.compile(both)
    return float(do_bench(lambda: compiled(*inputs), return_mode="median"))


def _inputs(
    device: str, R: int, C: int, dtype: torch.dtype
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Of each kernel, for a block of width C: its feed-forward layer is four times as wide."""
    generator = torch.Generator(device).manual_seed(R + C)

    def draw(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(of)

    for quick in (False, True):
        yield "gelu_backward", (draw(R, 4 * C), draw(R, 4 * C), draw(4 * C), quick)
    yield "join", (draw(R, C), draw(R, C), draw(R, C))
    x = 2 * draw(R, C) + 1
    variance, mean = torch.var_mean(x.float(), 1, correction=0)
    rstd = (variance + 1e-5).rsqrt()
    yield "norm_backward", (draw(R, C), draw(R, C), x, mean, rstd, draw(C))


def main() -> int:
    if "--interpret" in sys.argv:  # Triton's interpreter runs one program after another
        global PROGRAMS, NORM_PROGRAMS
        PROGRAMS, NORM_PROGRAMS = 3, 3
        checks = check("cpu", num_rows=(1, 7, 60), widths=(20, 136), timed=())
    else:
        checks = check("cuda")
    wrong = 0
    for each in checks:
        wrong += not each.is_right
        times = ""
        if each.milliseconds is not None:
            times = f"{each.milliseconds:8.3f} ms, compiled by torch {each.plain_milliseconds:8.3f}"
        errors = ", ".join(f"{error:.1e}" for error in each.errors)
        shape = f"[{each.rows}, {each.columns}] {each.dtype}"
        print(f"{each.kernel:14} {shape:24} errors {errors}  {times}", flush=True)
    print(f"{wrong} results are wrong" if wrong else "all results are right")
    return 1 if wrong else 0


_KERNELS = {"gelu_backward": gelu_backward, "join": join, "norm_backward": norm_backward}

if __name__ == "__main__":
    sys.exit(main())
