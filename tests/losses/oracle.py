"""Textbook losses over full logits, by autograd in float64. Shares no code with what it judges."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.toy import oracle_loss


def features(
    N: int, D: int, dtype: torch.dtype, aligned: float = 0.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """N random pairs of length 1; the more `aligned`, the closer the two of a pair."""
    g = torch.Generator().manual_seed(seed)
    image = torch.randn(N, D, generator=g, dtype=torch.float64)
    text = torch.randn(N, D, generator=g, dtype=torch.float64) + aligned * image
    return F.normalize(image, dim=1).to(dtype), F.normalize(text, dim=1).to(dtype)


def siglip(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Algorithm 1 of arXiv 2303.15343, word for word (there: t = log(scale), n = N)."""
    logits = image @ text.T * scale + bias
    labels = 2 * torch.eye(len(logits), dtype=logits.dtype) - torch.ones_like(logits)
    return -F.logsigmoid(labels * logits).sum() / len(logits)


def autograd(
    image: Tensor,
    text: Tensor,
    scale: float,
    bias: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """(loss, d_image, d_text, d_scale[, d_bias]) of InfoNCE, or with a bias of the sigmoid loss."""
    leaves = [image.to(dtype), text.to(dtype), torch.tensor([scale], dtype=dtype)]
    leaves += [] if bias is None else [torch.tensor([bias], dtype=dtype)]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    loss = oracle_loss(*leaves) if bias is None else siglip(*leaves)
    loss.backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)  # type: ignore[misc]


def relative(x: Tensor, y: Tensor) -> float:
    """Error of x against the truth y."""
    return ((x.double() - y.double()).norm() / y.double().norm()).item()
