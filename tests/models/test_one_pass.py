"""Backward passes that are one pass over their bytes, against torch's own in float64; the Triton kernels by Triton's
interpreter, where Triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clip_train.models import one_pass
from clip_train.models.clip import build_model
from clip_train.models.lora import Lora
from tests.models.small import small_architecture

LAYERS = ("in_proj_weight", "out_proj", "c_fc", "c_proj")


def draw(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def leaves(*tensors):
    return [each.clone().requires_grad_() for each in tensors]


def same_gradients(ours, plain, tensors, cotangents):
    """The outputs and gradients of two functions of the same tensors."""
    results = []
    for function in (ours, plain):
        own = leaves(*tensors)
        outputs = function(*own)
        gradients = torch.autograd.grad(outputs, own, cotangents[: len(outputs)])
        results.append((outputs, gradients))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("quick", [False, True])
def test_gelu_of_a_sum_with_a_bias(quick):
    def plain(x, bias):
        z = x + bias
        return (z * torch.sigmoid(1.702 * z) if quick else F.gelu(z),)

    def ours(x, bias):
        return (one_pass.bias_gelu(x, bias, quick),)

    tensors = [draw(3, 5, 12), draw(12, seed=1)]
    same_gradients(ours, plain, tensors, [draw(3, 5, 12, seed=2)])


def test_queries_keys_and_values():
    def plain(x, weight, bias):
        return F.linear(x, weight, bias).chunk(3, dim=-1)

    tensors = [draw(3, 5, 8), draw(36, 8, seed=1), draw(36, seed=2)]
    cotangents = [draw(3, 5, 12, seed=seed) for seed in (3, 4, 5)]
    same_gradients(one_pass.linear_split, plain, tensors, cotangents)


@pytest.mark.parametrize("added", [False, True])
def test_layer_norm_and_what_goes_on_beside_it(added):
    C = 12
    norm = nn.LayerNorm(C, dtype=torch.float64)

    def plain(x, weight, bias, *more):
        x = x + more[0] + more[1] if more else 1 * x
        return x, F.layer_norm(x, (C,), weight, bias, norm.eps)

    def ours(x, weight, bias, *more):
        del norm.weight, norm.bias
        norm.weight, norm.bias = weight, bias
        return one_pass.add_norm(x, *more, norm) if more else one_pass.fork_norm(x, norm)

    norm.register_parameter("weight", None)
    norm.register_parameter("bias", None)
    tensors = [draw(3, 5, C), draw(C, seed=1), draw(C, seed=2)]
    if added:
        tensors += [draw(3, 5, C, seed=3), draw(C, seed=4)]
    same_gradients(ours, plain, tensors, [draw(3, 5, C, seed=5), draw(3, 5, C, seed=6)])


def a_block(lora=None, **options):
    """The first of an image tower, in float64."""
    changes = {"quick_gelu": options.pop("quick_gelu", False)}
    architecture = small_architecture(**changes).model_copy(update={"lora": lora})
    torch.manual_seed(2)
    block = build_model(architecture, **options).double().train().visual.transformer.resblocks[0]
    for p in block.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return block


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_a_block_of_joined_passes(quick_gelu):
    block = a_block(quick_gelu=quick_gelu)
    assert block.has_plain_layers()
    (x,) = leaves(draw(3, 5, 32))
    inputs = (x, *block.parameters())
    joined, plain = block.with_joined_passes(x, None), block(x, None)
    for each in (joined, plain):
        gradients = torch.autograd.grad(each, inputs, draw(3, 5, 32, seed=1))
        if each is joined:
            found = gradients
    torch.testing.assert_close((joined, found), (plain, gradients), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{"dropout": 0.3}, *({"lora": Lora(rank=2, on=(on,))} for on in LAYERS)]
)
def test_blocks_that_must_stay_as_they_are(options):
    assert not a_block(**options).has_plain_layers()
    assert a_block(dropout=0.3).eval().has_plain_layers()


@pytest.mark.parametrize("layer", ["ln_1", "attn", "attn.out_proj", "ln_2", "mlp.c_fc"])
def test_a_layer_with_a_hook_must_be_called(layer):
    """ZeRO 3 gathers a layer's parameters by hooks."""
    block = a_block()
    block.get_submodule(layer).register_forward_pre_hook(lambda *_: None)
    assert not block.has_plain_layers()


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_by_the_interpreter():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    line = [sys.executable, "-m", "clip_train.models.kernels", "--interpret"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("gelu_backward", "join", "norm_backward"):
        assert done.stdout.count(kernel) > 4
