"""Gradient norms by tower: those of plain torch, under every engine, on any number of ranks."""

from __future__ import annotations

import pytest
import torch

from clip_train import dist
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.config import ModelConfig
from clip_train.models.freeze import freeze
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step
from tests import tolerances
from tests.engine.layouts import ALL, engine_at
from tests.ranks import run_ranks
from tests.toy import ToyCLIP, oracle_loss, share, toy_batch

pytestmark = pytest.mark.engine
N, LR = 24, 0.3


def toy(frozen) -> ToyCLIP:
    torch.manual_seed(5)
    model = ToyCLIP()
    freeze(model, ModelConfig(freeze=[*frozen]))
    return model


def oracle(frozen, clip) -> list[dict[str, float]]:
    model, out = toy(frozen).double(), []
    for s in range(3):
        batch = toy_batch(N, seed=s)
        model.zero_grad()
        oracle_loss(*model(batch.images, batch.texts)[:3]).backward()
        out.append({})
        for key, tower in (("grad_norm_image", model.visual), ("grad_norm_text", model.text)):
            gradients = [p.grad.flatten() for p in tower.parameters() if p.grad is not None]
            if gradients:
                out[-1][key] = torch.cat(gradients).norm().item()
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.nn.utils.clip_grad_norm_(trained, clip)
        with torch.no_grad():
            for p in trained:
                p.sub_(LR * p.grad)
    return out


class WithTable(ToyCLIP):
    """A parameter of 2^25 elements, whose gradient is dense and uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(2**12, 2**13))

    def forward(self, images, texts, sample_seeds=None):
        image, text, scale, bias = super().forward(images, texts, sample_seeds)
        if text is not None:
            weights = torch.linspace(0, 1, 2**25, device=text.device).view(2**12, 2**13).square()
            text = text * (1 + (self.table * weights.to(text.dtype)).sum())
        return image, text, scale, bias


def with_table() -> WithTable:
    torch.manual_seed(5)
    return WithTable()


def norm_of_a_large_tensor(layout: str) -> float:
    optim = OptimConfig(name="sgd", lr=LR, weight_decay=0.0, momentum=0.0)
    engine = engine_at(layout, with_table, optim)
    batch = share(toy_batch(8), dist.rank(), dist.world_size())
    result = train_step(engine, batch, InfoNCE(), micro_size=8, kept_graphs=1, lr=0.0)
    engine.close()
    return result.grad_norm


FEW = [("plain 0", 1), ("fsdp 2", 2), ("zero 1", 2)]


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        case if case in FEW else pytest.param(*case, marks=pytest.mark.full)
        # FSDP 3 refuses a tower of one large parameter
        for case in [(layout, w) for layout in ALL for w in (1, 2, 8) if layout != "fsdp 3"]
    ],
)
def test_norm_of_a_large_tensor_does_not_depend_on_its_shards(layout, world_size):
    """A sum of 2^25 squares in fp32 would be 1e-3 off, and by how much depends on the shards."""
    model, batch = with_table().double(), toy_batch(8)
    oracle_loss(*model(batch.images, batch.texts)[:3]).backward()
    exact = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    for norm in run_ranks(norm_of_a_large_tensor, world_size, layout):
        assert norm == pytest.approx(exact, rel=1e-6)


def case(layout, frozen, clip, precision, more):
    optim = OptimConfig(name="sgd", lr=LR, weight_decay=0.0)
    engine = engine_at(layout, lambda: toy(frozen), optim, clip=clip, precision=precision, **more)
    out = []
    for s in range(3):
        batch = share(toy_batch(N, seed=s), dist.rank(), dist.world_size())
        result = train_step(engine, batch, InfoNCE(), micro_size=5, kept_graphs=1, lr=LR)
        out.append({k: v for k, v in result.metrics.items() if k.startswith("grad_norm_")})
    engine.close()
    return out


@pytest.mark.parametrize("world_size, frozen, clip", [(1, (), None), (2, ("visual.into.*",), 0.05)])
@pytest.mark.parametrize("layout", ALL)
def test_norms_by_tower_are_those_of_plain_torch(layout, world_size, frozen, clip):
    expected = oracle(frozen, clip or 1e9)
    for told in run_ranks(case, world_size, layout, frozen, clip, "fp32", {}):
        assert told == [pytest.approx(each, rel=tolerances.norm(3, "sgd")) for each in expected]


@pytest.mark.parametrize(
    "layout, more", [("zero 2", {"offload": "optimizer"}), ("fsdp 2", {"shard_ranks": 1})]
)
def test_of_a_locked_tower_there_is_none(layout, more):
    expected = oracle(("text.*",), 1e9)
    assert set(expected[0]) == {"grad_norm_image"}
    for told in run_ranks(case, 2, layout, ("text.*",), None, "fp32", more):
        assert told == [pytest.approx(each, rel=tolerances.norm(3, "sgd")) for each in expected]


@pytest.mark.parametrize(
    "layout, precision", [("zero 1", "fp16"), ("zero 2", "bf16"), ("fsdp 3", "bf16")]
)
def test_rounded_gradients_have_nearly_the_same(layout, precision, tmp_path):
    (tmp_path / "scale.json").write_text(
        '{"fp16": {"initial_scale_power": 8}}'
    )  # the default one overflows
    more = {"ds_config": str(tmp_path / "scale.json")} if precision == "fp16" else {}
    expected = oracle((), 0.5)
    for told in run_ranks(case, 2, layout, (), 0.5, precision, more):
        assert told == [pytest.approx(each, rel=3e-2) for each in expected]
