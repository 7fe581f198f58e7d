"""A cooldown that branches off a run's checkpoint, and the mean of checkpoints, through the real command."""

from __future__ import annotations

import hashlib
import shlex
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from clip_train.checkpoint.reader import averaged
from clip_train.errors import UserError
from clip_train.models.config import ModelConfig
from clip_train.models.weights import initial_weights, save_weights
from clip_train.recipe.recipe import load_config
from launcher.cli.main import main
from tests.launcher.conftest import kill, metrics, run, start, wait_for_commit
from tests.launcher.saved import save_run
from tests.models.small import small_architecture

CONSTANT = (
    "schedule.name=constant",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
)
SAME = ("step", "loss", "grad_norm", "batch_digest", "lr", "logit_scale", "samples")


def told(lines: list[dict]) -> list[tuple]:
    return [tuple(line[key] for key in SAME) for line in lines]


def contents(folder: Path) -> dict[str, str]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.engine
def test_a_branch_goes_on_where_its_source_was_and_cools_down(recipe, tmp_path, capsys):
    source = tmp_path / "run"
    # one save before the end: a slow one cannot take the place of the next
    status, out = run(recipe, *CONSTANT, "run.steps=12", "checkpoint.every_steps=8")
    assert status == 0, out
    before = contents(source)
    for name in ("small-8", "again"):
        changes = [f"run.name={name}", "checkpoint.every_steps=2"]
        line = ["branch", str(source), *changes, "--at", "8", "--cooldown", "6"]
        assert main(line) == 0
        assert shlex.split(capsys.readouterr().out)[:2] == ["clip-train", "train"]
    assert run(tmp_path / "small-8" / "branch.yaml")[0] == 0
    lines = metrics(tmp_path / "small-8")
    assert [line["step"] for line in lines] == [9, 10, 11, 12, 13, 14]
    assert [line["lr"] for line in lines] == pytest.approx([1e-3 * (6 - i) / 6 for i in range(6)])
    theirs = metrics(source)[8:]
    assert told(lines[:1]) == told(theirs[:1])  # the rate has not fallen yet
    assert lines[2]["loss"] != theirs[2]["loss"]
    digests = [line["batch_digest"] for line in lines]
    assert digests[:4] == [line["batch_digest"] for line in theirs]

    process = start(tmp_path / "again" / "branch.yaml", fault="hold:0:12")
    wait_for_commit(tmp_path / "again", process)
    kill(process)
    status, out = run(tmp_path / "again" / "branch.yaml")
    assert status == 0 and "resuming from step 1" in out, out
    assert told(metrics(tmp_path / "again")) == told(lines)
    assert contents(source) == before


def saved_run(tmp_path: Path, model: Path, **schedule: object) -> tuple[Path, dict]:
    """A run of which nothing was trained, with checkpoints of steps 8, 9 and 10 of 20."""
    saved = save_run(tmp_path / "run", small_architecture(), steps=(8, 9, 10))
    recipe = {
        "run": {"name": "run", "dir": str(tmp_path / "run"), "steps": 20},
        "model": {"name": str(model)},
        "data": {"train": "shards/*.tar"},
        "batch": {"global_size": 8},
        "schedule": {"name": "constant", "warmup_steps": 8, **schedule},
        "checkpoint": {"remote": str(tmp_path / "store" / "run")},
    }
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path / "run", saved


def test_a_branch_has_its_own_folder_and_changes_the_cooldown(tmp_path, model):
    source, _ = saved_run(tmp_path, model)
    assert main(["branch", str(source), "schedule.cooldown_power=2"]) == 0  # the newest; a fifth
    then = load_config(str(source / "recipe.yaml")).model_dump()
    written = tmp_path / "run-10" / "branch.yaml"
    assert written.stat().st_mode & 0o777 == 0o600  # it keeps secrets of URLs
    now = load_config(str(written)).model_dump()
    changed = {
        f"{section}.{key}": value
        for section in then
        for key, value in now[section].items()
        if value != then[section][key]
    }
    (place,) = (source / "checkpoints" / "ckpt" / "s0000000010").iterdir()
    assert changed == {
        "run.name": "run-10",
        "run.dir": str(tmp_path / "run-10"),
        "run.steps": 12,
        "schedule.name": "constant-with-cooldown",
        "schedule.cooldown_steps": 2,
        "schedule.cooldown_power": 2.0,
        "checkpoint.resume": str(place),
        "checkpoint.remote": str(tmp_path / "store" / "run-10"),
    }


@pytest.mark.parametrize(
    ("schedule", "words", "why"),
    [
        ({}, ["--at", "7"], "has no checkpoint of step 7; it has [8, 9, 10]"),
        ({}, ["run.name=run"], "cannot be made: File exists; choose another run.name"),
        ({}, ["checkpoint.remote=run/checkpoints"], "holds checkpoints already"),
        ({"name": "cosine"}, ["--at", "9"], "cannot cool down from there"),
        ({"name": "my_package.half"}, [], "schedule.name (my_package.half): at step 10"),
        ({"warmup_steps": 12}, [], "at step 10 of 20 the rate is not at its peak"),
        (
            {"name": "constant-with-cooldown", "cooldown_steps": 11},
            ["--at", "10"],
            "before its own cooldown",
        ),
    ],
)
def test_what_cannot_be_branched_is_refused(
    tmp_path, model, capsys, monkeypatch, schedule, words, why
):
    monkeypatch.chdir(tmp_path)
    source, _ = saved_run(tmp_path, model, **schedule)
    assert main(["branch", str(source), *words]) == 2
    assert why in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_average_is_the_mean_and_a_run_begins_with_it(tmp_path, model):
    source, saved = saved_run(tmp_path, model)
    line = f"{source}@8,{source},{source / 'checkpoints'}@9,{source}"
    assert main(["average", line, "--output", str(tmp_path / "mean")]) == 0
    found = load_file(tmp_path / "mean" / "open_clip_model.safetensors")
    assert set(found) == set(saved[8])
    for name, tensor in found.items():
        parts = [saved[step][name].double() for step in (8, 10, 9)]
        want = (parts[0] + 2 * parts[1] + parts[2]) / 4
        assert torch.allclose(tensor.double(), want.reshape(tensor.shape), rtol=1e-6, atol=1e-7)
    config = ModelConfig(name=str(tmp_path / "mean"), init_from=str(tmp_path / "mean"))
    begun = initial_weights(config, seed=0).read("text_projection", "param", 0, 8)
    assert torch.equal(begun, found["text_projection"].flatten()[:8])


class Reader:
    """Of three tensors. It refuses to read one while another that was read is held."""

    path = "ckpt/x"
    shapes = dict.fromkeys("abc", (7, 3))

    def __init__(self, held: list[weakref.ref]) -> None:
        self.held = held

    def open_weights(
        self, ema: bool
    ) -> tuple[dict[str, torch.Tensor], Callable[[str], torch.Tensor]]:
        def read(name: str) -> torch.Tensor:
            array = np.full((7, 3), ord(name) / 3, np.float32)
            self.held.append(weakref.ref(array))  # which lives as long as a tensor over it
            assert sum(each() is not None for each in self.held) == 1
            return torch.from_numpy(array)

        return {name: torch.empty(7, 3, device="meta") for name in self.shapes}, read

    def release(self) -> None:
        """It maps nothing."""


def test_an_average_holds_one_tensor_and_leaves_what_is_the_same(tmp_path):
    held: list[weakref.ref] = []
    readers: list[Any] = [Reader(held) for _ in range(3)]
    like, read = averaged(readers)
    save_weights(like, tmp_path, "x.safetensors", read)
    assert len(held) == 9
    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        assert torch.equal(tensor, torch.full((7, 3), ord(name) / 3))
    readers[1].shapes = {"a": (7, 3), "b": (7, 4)}
    with pytest.raises(UserError, match=r"hold different models \(b\): average checkpoints of one"):
        averaged(readers)
