"""Batch norms under the two passes, on two real ranks: running statistics and gradients of the rule in docs/step.md.

The oracle knows that rule alone: micro-batch j is the j-th of all ranks together; it is normalised by its own mean and
variance, through which the gradient goes; running statistics move once for each micro-batch, in order. Plain autograd
in float64, in one process.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train import dist
from clip_train.engines.base import PlainEngine
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.models.openclip.config import IMAGE_MEAN, IMAGE_STD
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import StepDiscarded, train_step
from clip_train.task import Batch, Flags
from tests.engine.layouts import engine_at
from tests.engine.test_buffers import merged
from tests.models.convolutional import convolutional_clip
from tests.models.small import inputs
from tests.models.test_variants import blocks
from tests.ranks import run_ranks
from tests.toy import columns_of, oracle_loss, share

pytestmark = pytest.mark.engine
N = 15
SIZES = {
    1: ([8], [7]),
    4: ([2, 2, 2, 2], [2, 2, 2, 1]),
}  # k -> of the micro-batches of rank 0 and of rank 1


def make_model(checkpointing: bool = False) -> CLIP:
    torch.manual_seed(5)
    model = convolutional_clip(checkpointing=checkpointing)
    for name, p in model.named_parameters():
        if ".bn." in name:  # gains begin as 1, biases as 0
            p.data.uniform_(0.3, 0.8)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    return model


def batch() -> Batch:
    return Batch(columns_of(*inputs(N), [str(i) for i in range(N)]))


# -- the rule


def normalised(p: dict[str, Tensor], running: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    count = x.numel() // x.shape[1]
    mean = x.sum((0, 2, 3)) / count
    centred = x - mean[:, None, None]
    variance = (centred**2).sum((0, 2, 3)) / count
    for kind, seen in (("mean", mean), ("var", variance * count / (count - 1))):
        running[f"{name}.running_{kind}"] = (
            0.9 * running[f"{name}.running_{kind}"] + 0.1 * seen.detach()
        )
    running[f"{name}.num_batches_tracked"] = running[f"{name}.num_batches_tracked"] + 1
    gain, bias = (p[f"{name}.{kind}"][:, None, None] for kind in ("weight", "bias"))
    return centred / (variance[:, None, None] + 1e-5).sqrt() * gain + bias


def image_features(p: dict[str, Tensor], running: dict[str, Tensor], images: Tensor) -> Tensor:
    mean, std = (
        torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (IMAGE_MEAN, IMAGE_STD)
    )
    x = (images.double() / 255 - mean) / std
    for i, stride in enumerate((2, 1, 2)):
        name = f"visual.blocks.{i}"
        x = F.conv2d(x, p[f"{name}.conv.weight"], stride=stride, padding=1)
        x = normalised(p, running, f"{name}.bn", x).relu()
    return F.linear(x.mean((2, 3)), p["visual.proj.weight"], p["visual.proj.bias"])


def text_features(p: dict[str, Tensor], texts: Tensor) -> Tensor:
    mask = torch.full((8, 8), -torch.inf, dtype=torch.float64).triu(1)
    t = blocks(
        p, "transformer.", p["token_embedding.weight"][texts] + p["positional_embedding"], 2, mask
    )
    t = torch.stack([row[ids.index(99)] for row, ids in zip(t, texts.tolist(), strict=True)])
    return F.layer_norm(t, (20,), p["ln_final.weight"], p["ln_final.bias"]) @ p["text_projection"]


def oracle(k: int) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients, and all buffers after the step."""
    model = make_model().double()
    p = {name: each.detach().requires_grad_() for name, each in model.named_parameters()}
    running = dict(model.named_buffers())
    whole = batch()
    image: list[Any] = [None] * N
    starts = [
        [*itertools.accumulate(sizes, initial=first)]
        for sizes, first in zip(SIZES[k], (0, 8), strict=True)
    ]
    for j in range(k):
        own = [i for start in starts for i in range(start[j], start[j + 1])]
        for i, feature in zip(own, image_features(p, running, whole.images[own]), strict=True):
            image[i] = feature
    features = (
        F.normalize(torch.stack(image), dim=1),
        F.normalize(text_features(p, whole.texts), dim=1),
    )
    loss = oracle_loss(*features, p["logit_scale"].exp())
    loss.backward()
    return loss.item(), {name: each.grad.flatten() for name, each in p.items()}, running


# -- what trains


def step(layout: str, k: int, kept: int, checkpointing: bool) -> Any:
    """A step of SGD with a rate of 1 on this rank: its loss, and all that it saves."""
    optim = OptimConfig(name="sgd", lr=1.0, weight_decay=0.0)
    if layout == "plain":
        model = make_model(checkpointing).double()
        engine: Any = PlainEngine(model, build_optimizer(optim, model.named_parameters()))
    else:
        engine = engine_at(layout, lambda: make_model(checkpointing), optim)
    own = share(batch(), dist.rank(), dist.world_size())
    loss = train_step(engine, own, InfoNCE(), micro_size=8 // k, kept_graphs=kept, lr=1.0).loss
    saved = {(f.name, f.start): f.tensors["param"].clone() for f in engine.state_fragments()}
    engine.close()
    return loss, saved


@pytest.mark.parametrize(
    "layout, k, kept, checkpointing",
    [
        ("plain", 1, 1, False), ("plain", 4, 1, False), ("plain", 4, 4, False), ("plain", 4, 2, True),
        ("zero 1", 1, 1, False), ("zero 1", 4, 1, False), ("zero 1", 4, 4, False),
        ("zero 3", 4, 1, True), ("zero 3", 4, 4, False),
        ("fsdp 3", 1, 1, True), ("fsdp 3", 4, 1, False), ("fsdp 3", 4, 4, False),
    ],
)  # fmt: skip
def test_running_statistics_and_gradients_are_those_of_the_rule(layout, k, kept, checkpointing):
    loss, gradients, running = oracle(k)
    parts = run_ranks(step, 2, layout, k, kept, checkpointing)
    exact = layout == "plain"  # in float64
    assert all(told == pytest.approx(loss, rel=1e-12 if exact else 1e-5) for told, _ in parts)
    after, before = merged(parts), make_model().double().state_dict()
    for name, expected in running.items():
        allowed = 1e-10 if exact else 1e-4
        torch.testing.assert_close(
            after[name].double(),
            expected.double().flatten(),
            rtol=allowed,
            atol=allowed,
            msg=lambda m, n=name: n + m,
        )
    whole = torch.cat([*gradients.values()]).norm()
    for name, expected in gradients.items():
        error = (before[name].flatten() - after[name].double() - expected).norm()
        assert error <= (1e-10 if exact else 1e-4) * whole, (name, error / whole)


def test_a_discarded_step_leaves_the_running_statistics():
    """It is computed again, and then the statistics would see its samples twice."""
    model = make_model().double()
    optim = OptimConfig(name="sgd", lr=1.0, weight_decay=0.0)
    engine = PlainEngine(model, build_optimizer(optim, model.named_parameters()))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    options = {"micro_size": 4, "kept_graphs": 1, "lr": 1.0}
    with pytest.raises(StepDiscarded):
        train_step(engine, batch(), InfoNCE(), flags=lambda: Flags(again=True), **options)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    engine.discard_gradients()
    train_step(engine, batch(), InfoNCE(), **options)
    assert any(not torch.equal(x, before[name]) for name, x in model.named_buffers())
