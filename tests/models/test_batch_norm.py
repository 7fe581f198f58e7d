"""Batch norm over ranks against torch's own over the whole batch, and what running statistics see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from clip_train import dist
from clip_train.engines.base import PlainEngine
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.batch_norm import BatchNorm2d, collect_updates
from clip_train.models.clip import CLIP
from clip_train.models.config import ModelConfig
from clip_train.models.freeze import freeze
from clip_train.step import two_pass
from clip_train.task import Context, MicroBatch
from tests.models.convolutional import convolutional_clip
from tests.models.small import inputs
from tests.ranks import run_ranks
from tests.toy import columns_of


def small_convolutional(*options: Any) -> CLIP:
    torch.manual_seed(0)
    return convolutional_clip(*options)


SIZES = (3, 5)  # samples of each rank: the statistics weigh each value alike


def normalised(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """On rank r samples of SIZES[r]: output, gradients of input, weight and bias, running mean and variance."""
    torch.manual_seed(0)
    x = (10 + 3 * torch.randn(sum(SIZES), 4, 6, 5, dtype=torch.float64)).to(dtype)  # far from zero
    cotangent = torch.randn_like(x)
    ours: nn.Module = BatchNorm2d(4) if dist.world_size() > 1 else nn.BatchNorm2d(4)
    ours.to(dtype)
    nn.init.uniform_(ours.weight), nn.init.uniform_(ours.bias)
    if dist.world_size() > 1:
        x, cotangent = (each.split(SIZES)[dist.rank()] for each in (x, cotangent))
    x = x.clone().requires_grad_()
    with collect_updates() as updates:
        out = ours(x)
    (out * cotangent).sum().backward()
    for update in updates:
        update()
    gradients = [dist.all_reduce_sum(p.grad) for p in (ours.weight, ours.bias)]
    return out.detach(), x.grad, *gradients, ours.running_mean, ours.running_var


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_batch_norm_over_ranks_is_torchs_over_all_samples(dtype: torch.dtype):
    expected = normalised(dtype)
    parts = run_ranks(normalised, 2, dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for i, whole in enumerate(expected):
        got = torch.cat([part[i] for part in parts]) if i < 2 else parts[0][i]
        torch.testing.assert_close(got, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_agrees_with_torchs_batch_norm(dtype: torch.dtype):
    ours, plain = (small_convolutional().to(dtype) for _ in range(2))
    for name, each in [*plain.named_modules()]:
        if isinstance(each, BatchNorm2d):
            peer = nn.BatchNorm2d(each.num_features)
            peer.load_state_dict(each.state_dict())
            parent, _, last = name.rpartition(".")
            setattr(plain.get_submodule(parent), last, peer)
    images, texts, _ = inputs(6)
    with collect_updates() as updates:
        seen = ours(images)[0]
    assert len(updates) == 3
    for update in updates:
        update()
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(seen, plain(images)[0], rtol=0, atol=tolerance)
    buffers = dict(plain.named_buffers())
    assert buffers.keys() == dict(ours.named_buffers()).keys()
    for name, buffer in ours.named_buffers():
        assert buffer.dtype != torch.bfloat16
        torch.testing.assert_close(buffer, buffers[name], rtol=tolerance, atol=tolerance, msg=name)
    ours.eval(), plain.eval()
    torch.testing.assert_close(ours(images)[0], plain(images)[0], rtol=0, atol=tolerance)


def step(kept: int, checkpointing: bool, norm: str = "batch", micro_size: int = 4) -> Any:
    model = small_convolutional(norm, checkpointing).double().train()
    batches = [
        MicroBatch(columns_of(*part))
        for part in zip(*(each.split(micro_size) for each in inputs(12)), strict=True)
    ]
    output = two_pass(PlainEngine(model), batches, InfoNCE(), Context(12), kept_graphs=kept)
    return (
        output.loss,
        {name: p.grad for name, p in model.named_parameters()},
        dict(model.named_buffers()),
    )


@pytest.mark.parametrize("kept, checkpointing", [(3, False), (1, True), (2, True)])
def test_replays_update_running_statistics_once_a_step(kept: int, checkpointing: bool):
    loss, gradients, buffers = step(1, False)
    assert {int(b) for name, b in buffers.items() if name.endswith("tracked")} == {
        3
    }  # a micro-batch each
    assert all(b.any() for b in buffers.values())
    again = step(kept, checkpointing)
    torch.testing.assert_close(again, (loss, gradients, buffers), rtol=1e-10, atol=1e-14)


def test_failed_steps_and_other_forwards_keep_running_statistics():
    model = small_convolutional().train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    parts = inputs(4)
    model(*parts)

    @contextmanager
    def fails(phase: str) -> Iterator[None]:
        if phase == "backward pass":
            raise MemoryError
        yield

    with pytest.raises(MemoryError):
        two_pass(
            PlainEngine(model), [MicroBatch(columns_of(*parts))], InfoNCE(), Context(4), guard=fails
        )
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


def test_statistics_of_a_locked_tower_can_be_frozen():
    """As OpenCLIP's FrozenBatchNorm2d: a step leaves them alone, and goes by them."""
    model = small_convolutional().train()
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.fill_(0.3)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    parts = inputs(6)
    moving = model(*parts)[0]
    freeze(model, ModelConfig(lock_image=True, lock_image_freeze_bn_stats=True))
    two_pass(PlainEngine(model), [MicroBatch(columns_of(*parts))], InfoNCE(), Context(6))
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)
    training = model(*parts)[0]
    torch.testing.assert_close(training, model.eval()(*parts)[0], rtol=0, atol=0)
    assert (training - moving).abs().max() > 0.01
    with pytest.raises(
        ValueError,
        match=r"freeze_bn_stats \(true\) has no effect without a lock; set model.lock_image=true",
    ):
        ModelConfig(lock_image_freeze_bn_stats=True)


def test_group_norm_does_not_depend_on_the_micro_batch():
    loss, gradients, buffers = step(1, False, "group", 12)
    assert not buffers
    torch.testing.assert_close(
        step(1, True, "group", 4)[:2], (loss, gradients), rtol=1e-9, atol=1e-13
    )
