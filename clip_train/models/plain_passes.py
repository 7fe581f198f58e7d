"""The backward passes of `clip_train.models.one_pass` in plain torch: what each kernel computes.

Results are elements [R, C], and sums over the rows of which a kernel returns S partial ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def gelu(z: Tensor, quick: bool) -> Tensor:
    return z * torch.sigmoid(1.702 * z) if quick else F.gelu(z)


def gelu_backward(dy: Tensor, x: Tensor, bias: Tensor, quick: bool) -> tuple[Tensor, Tensor]:
    z = wide(x) + bias
    if quick:
        sigmoid = torch.sigmoid(1.702 * z)
        gradient = dy * sigmoid * (1 + 1.702 * z * (1 - sigmoid))
    else:
        gradient = torch.ops.aten.gelu_backward(dy.to(z.dtype), z)
    return gradient.to(x.dtype), gradient.sum(0, keepdim=True)


def join(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    joined = torch.cat([dq, dk, dv], dim=1)
    return joined, wide(joined).sum(0, keepdim=True)


def norm_backward(
    dskip: Tensor, dnormed: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    g, z = wide(dnormed), (wide(x) - mean[:, None]) * rstd[:, None]
    of_weight, of_bias = (g * z).sum(0), g.sum(0)
    g = g * weight
    centered = g - g.mean(1, keepdim=True) - z * (g * z).mean(1, keepdim=True)
    dx = dskip + rstd[:, None] * centered
    return dx.to(x.dtype), torch.stack([of_weight, of_bias, dx.sum(0)])[None]
