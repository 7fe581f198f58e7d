"""The product of the linears, whichever library makes it: against float64, at sizes on both sides of the choice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clip_train.models.blocks import linear

SIZES = [(2, 3, 8, 8), (16, 17, 96, 160), (1, 300, 128, 64)]  # samples, tokens, in, out


def made(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(got: Tensor | None, wanted: Tensor) -> None:
    assert got is not None and got.shape == wanted.shape and got.dtype == torch.float32
    assert (got.double() - wanted).abs().max() <= 3e-6 * wanted.abs().max()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("layout", ["as made", "apart", "summed"])
def test_values_and_gradients(size: tuple[int, ...], with_bias: bool, layout: str) -> None:
    """apart: samples are not neighbours; summed: the gradient's strides are zero. Weights are a part of larger ones."""
    b, tokens, width, out = size
    x, weight, bias = made(b, tokens, width), made(2 * out, width), made(2 * out)
    upstream = torch.ones(()) if layout == "summed" else made(b, tokens, out)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    w, c = weight.split([out, out])[1], bias.split([out, out])[1]
    asked = x.transpose(0, 1).contiguous().transpose(0, 1) if layout == "apart" else x
    y = linear(asked, w, c if with_bias else None)
    (y.sum() if layout == "summed" else (y * upstream).sum()).backward()

    x64, w64, c64 = x.detach().double(), w.detach().double(), c.detach().double()
    g64 = upstream.double().expand(b, tokens, out)
    close(y.detach(), torch.einsum("bti,oi->bto", x64, w64) + (c64 if with_bias else 0))
    close(leaves[0].grad, torch.einsum("bto,oi->bti", g64, w64))
    half = torch.zeros(out, width, dtype=torch.float64)
    close(leaves[1].grad, torch.cat([half, torch.einsum("bto,bti->oi", g64, x64)]))
    if with_bias:
        close(leaves[2].grad, torch.cat([half[:, 0], g64.sum((0, 1))]))
    else:
        assert leaves[2].grad is None


@pytest.mark.parametrize("trained", ["x", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient(trained: str) -> None:
    inputs = {"x": made(16, 17, 96), "weight": made(160, 96), "bias": made(160)}
    inputs[trained].requires_grad_()
    linear(**inputs).square().sum().backward()
    assert {name for name, each in inputs.items() if each.grad is not None} == {trained}


def test_autocast_is_obeyed() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(made(16, 17, 96), made(160, 96)).dtype == torch.bfloat16
