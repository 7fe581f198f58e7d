"""Parts of a transformer block whose backward is one pass over their bytes.

Most of a block's backward outside of its products waits for memory. torch.compile makes two or
three passes where a sum over rows follows an operation on elements or on columns:

- `add_norm`: x + y + bias, and its layer norm. One pass gives all gradients. `fork_norm` is the
  same for x alone.
- `bias_gelu`: gelu(x + bias), exact. The bias's gradient is summed where that of x is made.
- `linear_split`: queries, keys and values, from one product. The bias's gradient is summed where
  their gradients are joined.

The forwards are plain torch, which inductor fuses. Each backward is a Triton kernel
(`clip_train.models.kernels`) on a GPU, and plain torch (`clip_train.models.plain_passes`) elsewhere
and in float64. `R` rows (tokens), `C` columns (features), `S` partial sums.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train.models import plain_passes
from clip_train.models.plain_passes import wide

_HAS_TRITON = find_spec("triton") is not None


def compiles_to_kernels(x: Tensor) -> bool:
    """Whether x is in a graph of torch.compile, on a device that the kernels serve."""
    return torch.compiler.is_compiling() and _served(x)


def _served(x: Tensor) -> bool:
    return _HAS_TRITON and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def bias_gelu(x: Tensor, bias: Tensor, quick: bool) -> Tensor:
    """[..., C], [C] -> gelu(x + bias) [..., C]. quick: OpenAI's approximation."""
    return _BiasGelu.apply(x.flatten(0, -2), bias, quick).view_as(x)


def linear_split(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """[..., in], [3 C, in], [3 C] -> the three thirds of the product, [..., C] each."""
    parts = _LinearSplit.apply(x.flatten(0, -2), weight, bias)
    return [part.unflatten(0, x.shape[:-1]) for part in parts]


def add_norm(x: Tensor, y: Tensor, y_bias: Tensor, norm: torch.nn.LayerNorm) -> list[Tensor]:
    """[..., C], [..., C], [C] -> x + y + y_bias, and its layer norm."""
    rows, y = x.flatten(0, -2), y.flatten(0, -2)
    both = _AddNorm.apply(rows, y, y_bias, norm.weight, norm.bias, norm.eps)
    return [each.view_as(x) for each in both]


def fork_norm(x: Tensor, norm: torch.nn.LayerNorm) -> list[Tensor]:
    """[..., C] -> x, to be used beside its layer norm, and the norm."""
    both = _ForkNorm.apply(x.flatten(0, -2), norm.weight, norm.bias, norm.eps)
    return [each.view_as(x) for each in both]


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, quick: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.quick = quick
        return plain_passes.gelu(wide(x) + bias, quick).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        backward = plain_passes.gelu_backward
        if _served(x):
            from clip_train.models.kernels import gelu_backward as backward
        dx, sums = backward(dy.contiguous(), x, bias, ctx.quick)
        return dx, sums.sum(0).to(bias.dtype), None


class _LinearSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        q, k, v = F.linear(x, weight, bias).split(len(weight) // 3, dim=1)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, ...]:
        x, weight = ctx.saved_tensors
        backward = plain_passes.join
        if _served(x):
            from clip_train.models.kernels import join as backward
        joined, sums = backward(dq.contiguous(), dk.contiguous(), dv.contiguous())
        return joined @ weight, joined.t() @ x, sums.sum(0).to(weight.dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, y_bias: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        skip = (wide(x) + y + y_bias).to(x.dtype)
        normed, mean, rstd = torch.native_layer_norm(skip, weight.shape, weight, bias, eps)
        ctx.save_for_backward(skip, mean.flatten(), rstd.flatten(), weight)
        return skip, normed

    @staticmethod
    def backward(ctx: Any, dskip: Tensor, dnormed: Tensor) -> tuple[Tensor | None, ...]:
        dx, of_weight, of_bias, of_x = _norm_gradients(ctx.saved_tensors, dskip, dnormed)
        return dx, dx, of_x, of_weight, of_bias, None


class _ForkNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        normed, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean.flatten(), rstd.flatten(), weight)
        return x.view_as(x), normed

    @staticmethod
    def backward(ctx: Any, dskip: Tensor, dnormed: Tensor) -> tuple[Tensor | None, ...]:
        dx, of_weight, of_bias, _ = _norm_gradients(ctx.saved_tensors, dskip, dnormed)
        return dx, of_weight, of_bias, None


def _norm_gradients(saved: Any, dskip: Tensor, dnormed: Tensor) -> tuple[Tensor, ...]:
    x, mean, rstd, weight = saved
    backward = plain_passes.norm_backward
    if _served(x):
        from clip_train.models.kernels import norm_backward as backward
    dx, sums = backward(dskip.contiguous(), dnormed.contiguous(), x, mean, rstd, weight)
    return dx, *sums.sum(0).to(weight.dtype).unbind()
