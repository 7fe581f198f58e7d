"""How the loss multiplies float32 matrices: in full, or faster on a GPU's tensor cores.

    highest  float32
    tf32     factors rounded to 11 significant bits: on an H200 7 times the speed
    bf16x3   each factor a sum of two bfloat16, of whose four products the three large ones are
             taken: 16 bits, at a third of bfloat16's speed (arXiv 1904.06376)

Sums are float32 always. `benchmarks/matmul.py` has what each does to the gradient. On a CPU the
factors are rounded as a GPU would round them, and the products are float32: the same numbers, and
no faster.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from clip_train.settings import Matmul

_chosen: ContextVar[Matmul] = ContextVar("matmul", default="highest")


@contextmanager
def matmul_precision(chosen: Matmul) -> Iterator[None]:
    """For every `add_product` inside; whatever the model's own matrices are multiplied in."""
    token, of_torch = _chosen.set(chosen), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if chosen == "tf32" else "highest")
    try:
        yield
    finally:
        _chosen.reset(token)
        torch.set_float32_matmul_precision(of_torch)


def add_product(
    out: Tensor, a: Tensor, b: Tensor, weight: float = 1.0, keep: bool = True
) -> Tensor:
    """`out = weight * a b`, `+ out` with `keep`, in place.

    a: [r, D], b: [D, c], out: [r, c], all of one dtype.
    """
    chosen = _chosen.get()
    if chosen == "highest" or out.dtype != torch.float32 or (chosen == "tf32" and out.is_cuda):
        return out.addmm_(a, b, alpha=weight) if keep else torch.mm(a, b, out=out)
    if chosen == "tf32":
        return out.addmm_(rounded(a, 13), rounded(b, 13), beta=float(keep), alpha=weight)
    (a, a_rest), (b, b_rest) = halves(a), halves(b)
    for i, (x, y) in enumerate(((a, b), (a, b_rest), (a_rest, b))):
        beta = float(keep or i > 0)
        if out.is_cuda:
            out.mul_(beta).add_(torch.mm(x, y, out_dtype=torch.float32), alpha=weight)
        else:
            out.addmm_(x.float(), y.float(), beta=beta, alpha=weight)
    return out


def rounded(x: Tensor, bits: int) -> Tensor:
    """float32 to the nearest number whose last `bits` bits are zero."""
    whole = x.contiguous().view(torch.int32)
    return ((whole + (1 << (bits - 1))) & -(1 << bits)).view(torch.float32)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two bfloat16 whose sum is x to 16 bits."""
    high = x.bfloat16()
    return high, (x - high).bfloat16()
