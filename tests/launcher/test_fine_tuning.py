"""A locked tower through the real command: planned, trained, resumed under another engine."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from clip_tools.plan import make_plan
from clip_train.engines.config import EngineConfig
from clip_train.models.clip import build_model, parameter_sizes
from clip_train.models.config import load_architecture
from clip_train.models.weights import initial_weights
from clip_train.optim.config import OptimConfig
from clip_train.recipe.recipe import check_config, load_config
from clip_train.recipe.resolve import resolve
from tests import tolerances
from tests.launcher.conftest import metrics, run

LOCKED = ("model.lock_image=true", "model.lock_image_unlocked_groups=1")


def plan(engine, optim=None, **model):
    base = {
        "run": {"steps": 5000},
        "data": {"train": "a.tar"},
        "batch": {"global_size": 64, "micro_size": 8},
    }
    sections = {"engine": engine, "optim": optim or {}, "model": {"name": "tiny", **model}}
    config = check_config({**base, **sections}, "here")
    return make_plan(resolve(config, 2, read_data=False))


@pytest.mark.parametrize("kind", ["deepspeed", "fsdp"])
def test_the_plan_has_no_gradient_of_frozen_parameters(kind):
    sizes = parameter_sizes(load_architecture("tiny"))
    P, trained = (
        sum(sizes.values()),
        sum(size for name, size in sizes.items() if not name.startswith("visual.")),
    )
    engine = {"kind": kind, "zero_stage": 0, "precision": "fp32"}
    whole, locked = plan(engine)["memory_bytes"], plan(engine, lock_image=True)
    memory = locked["memory_bytes"]
    masters = 4 if kind == "fsdp" else 0  # where they are the parameters themselves
    assert memory["parameters"] == whole["parameters"]
    assert (memory["gradients"], memory["optimizer"]) == (4 * trained, masters * P + 8 * trained)
    assert memory["activations"] < 0.8 * whole["activations"]  # a graph of one tower
    assert locked["trained_parameters"] == trained < locked["parameters"] == P


def test_muon_has_one_moment_for_a_matrix_in_the_plan():
    engine = {"kind": "fsdp", "zero_stage": 2, "precision": "fp32"}
    adamw, muon = (plan(engine, {"name": name})["memory_bytes"] for name in ("adamw", "muon"))
    named = build_model(load_architecture("tiny")).named_parameters()
    matrices = [p.numel() for name, p in named if ".resblocks." in name and p.ndim == 2]
    assert adamw["optimizer"] - muon["optimizer"] == pytest.approx(4 * sum(matrices) / 2)
    assert muon["buffers"] - adamw["buffers"] == 20 * max(matrices)


@pytest.mark.parametrize(
    "kind, stage, world_size, name, said",
    [
        ("deepspeed", 1, 1, "torch.optim.Muon", "set engine.zero_stage=0, or engine.kind=fsdp"),
        (
            "deepspeed",
            2,
            2,
            "torch.optim.Muon",
            "set engine.zero_stage=0, or engine.kind=fsdp, engine.zero_stage=0",
        ),
        ("deepspeed", 0, 2, "torch.optim.Muon", ""),
        ("deepspeed", 2, 2, "muon", ""),
        (
            "fsdp",
            2,
            2,
            "torch.optim.Muon",
            "engine.zero_stage 2 shards across 2 ranks: set engine.zero_stage=0, or engine.shard",
        ),
        ("fsdp", 2, 1, "torch.optim.Muon", ""),
        ("fsdp", 3, 2, "muon", ""),
        ("fsdp", 3, 2, "torch.optim.Muon", "optim.name (torch.optim.Muon) needs whole parameters"),
        ("deepspeed", 3, 2, "torch.optim.RMSprop", ""),
    ],
)
def test_an_update_of_whole_parameters_is_refused_if_sharded(kind, stage, world_size, name, said):
    config = EngineConfig(kind=kind, zero_stage=stage, precision="fp32")
    told = config.package.mistakes(config, OptimConfig(name=name), world_size=world_size)
    assert len(told) == bool(said) and all(said in line for line in told)


@pytest.mark.engine
@pytest.mark.parametrize(
    "optim, stage, then",
    [
        (
            ("optim.name=torch.optim.RMSprop", "optim.lr=1e-4", "optim.layer_decay=0.7"),
            3,
            "engine.zero_stage=2",
        ),
        (("optim.name=muon",), 0, "engine.zero_stage=0"),
    ],
)
def test_a_locked_run_goes_on_under_another_engine(recipe, tmp_path, optim, stage, then):
    """Its image tower, but for the projection, ends as it began."""
    common = (*LOCKED, *optim, then, "schedule.name=constant", "schedule.warmup_steps=2")
    status, out = run(recipe, *common, "run.steps=8", f"run.dir={tmp_path / 'whole'}")
    assert status == 0, out
    status, out = run(
        recipe, *common, "run.steps=4", "engine.kind=fsdp", f"engine.zero_stage={stage}", ranks=2
    )
    assert status == 0, out
    status, out = run(recipe, *common, "run.steps=8")
    assert status == 0 and "resuming from step 4" in out, out
    lines = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("whole", "run")]
    name = optim[0].removeprefix("optim.name=")
    assert lines[0] == pytest.approx(lines[1], rel=tolerances.loss(8, name))
    status, out = run(tmp_path / "run" / "recipe.yaml", verb="export")
    assert status == 0, out
    after = load_file(tmp_path / "run" / "export" / "open_clip_model.safetensors")
    config = load_config(str(recipe))
    before = initial_weights(config.model, config.run.seed)
    changed = {
        name
        for name, p in after.items()
        if not torch.equal(p.flatten(), before.read(name, "param", 0, p.numel()))
    }
    assert {name for name in changed if name.startswith("visual.")} == {"visual.proj"}
    assert "text_projection" in changed


@pytest.mark.engine
def test_a_run_with_other_frozen_parameters_is_another_run(recipe):
    short, frozen = "schedule.warmup_steps=0", "model.freeze=[visual.*]"
    assert run(recipe, "run.steps=2", short)[0] == 0
    status, out = run(recipe, "run.steps=4", short, frozen)
    assert status == 2 and "model.freeze was [], is ['visual.*']" in out, out
    status, out = run(recipe, "run.steps=4", short, frozen, "checkpoint.allow_changed_recipe=true")
    assert status == 0 and "resuming from step 2" in out, out
    status, out = run(
        recipe, "run.steps=6", short, "checkpoint.allow_changed_recipe=true"
    )  # without their moments
    assert status == 0 and "resuming from step 4" in out, out


def test_json_says_how_many_are_trained(recipe):
    status, out = run(recipe, *LOCKED, "--json", verb="plan")
    found = json.loads(out)
    assert status == 0 and found["trained_parameters"] < found["parameters"]
