"""The moving average through the real command: killed, resumed under another engine, evaluated, exported, planned."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from clip_tools.plan import make_plan
from clip_train.errors import UserError
from clip_train.recipe.recipe import check_config
from clip_train.recipe.resolve import resolve
from tests.launcher.conftest import kill, metrics, run, start, wait_for_commit, wait_for_step

EMA = ("optim.ema_decay=0.8", "optim.ema_warmup=true", "run.steps=12", "schedule.warmup_steps=2")
BASE = {
    "run": {"steps": 5000},
    "data": {"train": "a.tar"},
    "batch": {"global_size": 64, "micro_size": 8},
}


def exported(run_dir, *options):
    folder = run_dir / "-".join(["x", *options])
    status, out = run(run_dir / "recipe.yaml", "--output", str(folder), *options, verb="export")
    assert status == 0, out
    return load_file(folder / "open_clip_model.safetensors")


@pytest.mark.engine
def test_a_killed_run_resumes_its_average_under_another_engine(recipe, tmp_path, data):
    status, out = run(recipe, *EMA, f"run.dir={tmp_path / 'whole'}")
    assert status == 0, out
    process = start(
        recipe, *EMA, "engine.kind=fsdp", "engine.zero_stage=3", ranks=2, fault="hold:0:9"
    )
    wait_for_step(tmp_path / "run", 8, process)
    wait_for_commit(tmp_path / "run", process)
    kill(process)
    status, out = run(
        recipe, *EMA, f"data.val={data.val}", f"evaluate.zero_shot_classes={data.classes}"
    )
    assert status == 0 and "resuming from step 7" in out, out
    lines = metrics(tmp_path / "run")
    assert all(
        0 < line["grad_norm_text"] < line["grad_norm"] > line["grad_norm_image"] > 0
        for line in lines
    )

    expected, average = (exported(tmp_path / name, "--ema") for name in ("whole", "run"))
    weights = exported(tmp_path / "run")
    assert expected.keys() == average.keys() == weights.keys()
    error, apart = (
        torch.cat([(average[name] - x[name]).flatten() for name in weights]).norm()
        for x in (expected, weights)
    )
    assert error < 1e-2 * apart

    found = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[-1])
    of_weights = {name for name in found if not name.startswith("ema_")} - {
        "step",
        "num_samples",
        "zero_shot_samples",
    }
    assert {f"ema_{name}" for name in of_weights} == {
        name for name in found if name.startswith("ema_")
    }
    status, out = run(tmp_path / "run" / "recipe.yaml", "--ema", verb="evaluate")
    assert status == 0 and f"zero_shot_top5: {found['ema_zero_shot_top5']:.6g}" in out, (out, found)


@pytest.mark.engine
def test_what_has_no_average_says_so(recipe, tmp_path):
    assert run(recipe, "run.steps=2", "schedule.warmup_steps=0")[0] == 0
    for verb, more in (("export", ()), ("evaluate", ("data.val=x.tar",))):
        status, out = run(recipe, "--ema", *more, verb=verb)
        assert status == 2 and "has no moving average, as optim.ema_decay was null" in out, out
    status, out = run(recipe, "--ema", "--weights", "there", verb="evaluate")
    assert status == 2 and "not weights (there); leave it out" in out, out


@pytest.mark.parametrize(
    "optim, said",
    [
        (
            {"ema_warmup": True},
            r"optim.ema_warmup \(true\) needs optim.ema_decay: set optim.ema_decay=0.9999",
        ),
        (
            {"ema_decay": 0.9999},
            r"optim.ema_decay \(0.9999\) is too high for 5000 steps: 61% .* set optim.ema_warmup=true",
        ),
        (
            {"ema_decay": 1.0},
            r"optim.ema_decay \(1.0\) must be less than 1",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(optim, said):
    with pytest.raises(UserError, match=said):
        check_config({**BASE, "optim": optim}, "here")
    check_config({**BASE, "optim": {"ema_decay": 0.9999, "ema_warmup": True}}, "here")
    check_config({**BASE, "model": {"init_from": "there"}, "optim": {"ema_decay": 0.9999}}, "here")


@pytest.mark.parametrize("kind", ["deepspeed", "fsdp"])
def test_it_is_planned(kind):
    recipe = {
        **BASE,
        "engine": {"kind": kind, "zero_stage": 1, "precision": "bf16"},
        "model": {"name": "tiny"},
    }
    configs = [
        check_config({**recipe, "optim": optim}, "here") for optim in ({}, {"ema_decay": 0.99})
    ]
    without, its = (make_plan(resolve(config, 2, read_data=False)) for config in configs)
    more = its["memory_bytes"]["optimizer"] - without["memory_bytes"]["optimizer"]
    assert more == 4 * its["trained_parameters"] / 2
