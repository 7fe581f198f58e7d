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

from clip_train.models import blocks, one_pass
from clip_train.models.blocks import Block
from clip_train.models.clip import build_model
from clip_train.models.config import VisionConfig
from clip_train.models.lora import Lora
from tests.models.small import inputs, small_architecture


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


def features_and_gradients(monkeypatch, joined, **options):
    """Of a small model in float64 whose blocks are computed as in compiled code on a GPU, or not."""
    used = []
    join_passes = Block._with_joined_passes
    monkeypatch.setattr(blocks, "compiles_to_kernels", lambda x: joined)
    monkeypatch.setattr(
        Block, "_with_joined_passes", lambda *args: used.append(1) or join_passes(*args)
    )
    lora, quick_gelu = options.pop("lora", None), options.pop("quick_gelu", False)
    architecture = small_architecture(quick_gelu=quick_gelu).model_copy(update={"lora": lora})
    torch.manual_seed(2)
    model = build_model(architecture, **options).double().train()
    for module in model.modules():
        module.own_kernels = True
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    images, texts, seeds = inputs(5)
    image, text, *_ = model(images, texts, seeds)
    weights = draw(*image.shape)
    ((image + 2 * text) * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    monkeypatch.undo()
    return len(used), (image, text, gradients)


@pytest.mark.parametrize("options", [{}, {"quick_gelu": True}, {"activation_checkpointing": True}])
def test_a_model_of_joined_passes(monkeypatch, options):
    _, plain = features_and_gradients(monkeypatch, False, **options)
    used, joined = features_and_gradients(monkeypatch, True, **options)
    assert used  # all blocks but the last of each tower
    torch.testing.assert_close(joined, plain, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.3},
        *({"lora": Lora(rank=2, on=(on,))} for on in ("c_fc", "c_proj", "out_proj")),
    ],
)
def test_blocks_that_cannot_be_joined_stay_as_they_are(monkeypatch, options):
    _, plain = features_and_gradients(monkeypatch, False, **options)
    used, joined = features_and_gradients(monkeypatch, True, **options)
    assert not used
    torch.testing.assert_close(joined, plain, rtol=1e-10, atol=1e-13)


def test_a_layer_with_a_hook_is_called(monkeypatch):
    """ZeRO 3 gathers a layer's parameters by hooks."""
    monkeypatch.setattr(blocks, "compiles_to_kernels", lambda x: True)
    cfg = VisionConfig(image_size=16, patch_size=8, width=32, head_width=16, layers=2)
    block = Block(cfg, quick_gelu=False, dropout=0.0, dropout_id=0)
    assert not block._can_join_passes(torch.zeros(2, 5, 32))
    block.own_kernels = True
    assert block._can_join_passes(torch.zeros(2, 5, 32))
    block.mlp.c_fc.register_forward_pre_hook(lambda *_: None)
    assert not block._can_join_passes(torch.zeros(2, 5, 32))


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_by_the_interpreter():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    line = [sys.executable, "-m", "clip_train.models.kernels", "--interpret"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("gelu_backward", "join", "norm_backward"):
        assert done.stdout.count(kernel) > 4
