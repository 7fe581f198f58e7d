"""Towers of OpenCLIP, timm and Hugging Face on the engines: units, steps of a float64 model, and no graph given up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train import dist
from clip_train.engines.compile import units
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import build_model, parameter_sizes
from clip_train.models.config import AnyArchitecture
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step
from tests.engine.graphs import BLOCKS, batch_for, count, openclip
from tests.engine.layouts import engine_at
from tests.ranks import run_ranks
from tests.toy import oracle_loss, share

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
pytest.importorskip(
    "open_clip", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
N, LR, STEPS = 6, 0.05, 2


def model_of(architecture: AnyArchitecture) -> Any:
    torch.manual_seed(2)
    return build_model(architecture)


def train(layout: str, architecture: AnyArchitecture) -> tuple[list[float], list[Any], int]:
    optim = OptimConfig(name="sgd", lr=LR, weight_decay=0.0)
    parameter_sizes(architecture)  # as `resolve` does: the first model must be outside zero.Init
    engine = engine_at(layout, lambda: model_of(architecture), optim)
    told = []
    for step in range(STEPS):
        own = share(batch_for(architecture, N, 8 + step), dist.rank(), dist.world_size())
        result = train_step(engine, own, InfoNCE(), micro_size=2, kept_graphs=1, lr=LR)
        told += [result.loss, result.grad_norm]
    fragments = [(f.name, f.start, f.tensors["param"].clone()) for f in engine.state_fragments()]
    sharded = sum(isinstance(module, FSDPModule) for module in engine.module.modules())
    engine.close()
    return told, fragments, sharded


LAYOUTS = [f"{engine} {stage}" for engine in ("fsdp", "zero") for stage in (1, 2, 3)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_engine_takes_the_steps_of_one_float64_model(name: str, layout: str, tmp_path: Path):
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed", reason="PEER MISSING: scripts/setup_peers.sh")
    architecture = openclip(name, tmp_path)
    model, expected = model_of(architecture).double(), []
    assert len(units(model)) == BLOCKS[name]
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for step in range(STEPS):
        whole = batch_for(architecture, N, 8 + step)
        loss = oracle_loss(*model(whole.images, whole.texts)[:3])
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        expected += [loss.item(), torch.stack(gradients).norm().item()]
        optimizer.step()
    weights = {each: p.detach().flatten() for each, p in model.named_parameters()}
    for told, fragments, sharded in run_ranks(train, 2, layout, architecture):
        assert told == pytest.approx(expected, rel=1e-5)
        for each, start, value in fragments:
            if each in weights:
                of = weights[each][start : start + len(value)]
                assert (value - of).norm() <= 1e-5 * of.norm() + 1e-6, each
        assert sharded == (BLOCKS[name] + 1 if "fsdp" in layout else 0)


@pytest.mark.parametrize("name", BLOCKS)
def test_no_variation_of_a_run_gives_a_graph_up(name: str, tmp_path: Path):
    counts = count(model_of(openclip(name, tmp_path)))
    assert counts["fallbacks"] == counts["breaks"] == 0
    assert counts["a step"] == counts["text lengths"] == counts["last micro-batch"] > 0
