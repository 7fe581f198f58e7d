"""`data.keep` and changing weights through the real command: a run equals one over the kept samples alone."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.cli.main import main
from tests.data.shards import write_shard
from tests.launcher.conftest import RECIPE, finish, kill, metrics, run, start, wait_for_step

pytestmark = pytest.mark.engine
SAME = ("step", "loss", "grad_norm", "batch_digest", "logit_scale", "samples")


def told(run_dir: Path) -> list[tuple]:
    return [tuple(line[key] for key in SAME) for line in metrics(run_dir)]


def score(number: int) -> float:
    return number * 37 % 100 / 100


def uid(number: int) -> str:
    return f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}{number:016x}"


@pytest.fixture(scope="module")
def pool(tmp_path_factory, data) -> Path:
    """The shards with a score and a uid in each .json; in `kept` those with a score above 0.4, by tarfile."""
    folder = tmp_path_factory.mktemp("pool")
    (folder / "kept").mkdir()
    number = 0
    for path in sorted(Path(data.train).parent.glob("*.tar")):
        members: list[tuple[str, bytes]] = []
        kept: list[tuple[str, bytes]] = []
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                if member.name.endswith(".json"):
                    fields: dict[str, Any] = {"clip_score": score(number), "uid": uid(number)}
                    content = json.dumps({**json.loads(content), **fields}).encode()
                members.append((member.name, content))
                if score(number) > 0.4:
                    kept.append((member.name, content))
                number += member.name.endswith(".txt")  # the last member of a sample
        write_shard(folder / path.name, members)
        write_shard(folder / "kept" / path.name, kept)
    assert main(["index", f"{folder}/*.tar", "--columns", "json.clip_score,json.uid"]) == 0
    assert main(["index", f"{folder}/kept/*.tar"]) == 0
    pairs = [(int(u[:16], 16), int(u[16:], 16)) for u in map(uid, range(number))]
    chosen = [pair for n, pair in enumerate(pairs) if score(n) > 0.4]
    array = np.array(chosen, np.dtype("u8,u8"))
    array.sort()
    np.save(folder / "keep.npy", array)
    return folder


def recipe_in(folder: Path, train: str, model: Path) -> Path:
    folder.mkdir(exist_ok=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=folder / "run", train=train, model=model))
    return recipe


@pytest.fixture(scope="module")
def alone(tmp_path_factory, pool, model) -> list[tuple]:
    """A run over the shards that hold the kept samples alone."""
    folder = tmp_path_factory.mktemp("alone")
    status, out = run(recipe_in(folder, f"{pool}/kept/*.tar", model))
    assert status == 0, out
    return told(folder / "run")


@pytest.mark.parametrize("keep", ["clip_score > 0.4", "keep.npy"])
def test_a_run_equals_one_over_the_kept_samples_alone(tmp_path, pool, model, alone, keep):
    """Killed on two ranks with workers, and resumed: the same batches; on one rank bitwise."""
    recipe = recipe_in(tmp_path, f"{pool}/*.tar", model)
    kept = f"data.keep={pool / keep if keep.endswith('.npy') else keep}"
    process = start(recipe, kept, "data.workers=1", ranks=2, fault="hold:0:20")
    wait_for_step(tmp_path / "run", 15, process)
    kill(process)
    status, out = run(recipe, kept)
    assert status == 0 and "resuming from step" in out, out
    digests = [line[3] for line in told(tmp_path / "run")]
    assert digests == [line[3] for line in alone]
    kept_samples = len(np.load(pool / "keep.npy"))
    text = "clip_score > 0.4" if keep != "keep.npy" else f"{kept_samples} uids, sha256 "
    assert f"{kept_samples:,} samples in an epoch, kept of 600 by data.keep ({text}" in out
    shutil.rmtree(tmp_path / "run")
    status, out = run(recipe, kept)
    assert status == 0 and told(tmp_path / "run") == alone, out


def test_another_keep_is_refused_and_what_is_kept_is_told(tmp_path, pool, model, capsys):
    recipe = recipe_in(tmp_path, f"{pool}/*.tar", model)
    line = ["run.steps=8", "data.keep=clip_score > 0.4"]
    assert main(["train", str(recipe), *line, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "samples in an epoch, kept of 600 by data.keep (clip_score > 0.4)" in out
    main(["doctor", str(recipe), *line])
    assert "kept of 600 by data.keep (clip_score > 0.4)" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["train", str(recipe), "data.keep=clip_scor > 0.4", "--dry-run"]) == 2
    assert "did you mean clip_score?" in capsys.readouterr().err
    # before the ranks find each other
    status, out = run(recipe, "data.keep=clip_score > 7", ranks=2)
    assert (
        status == 2 and "keeps none of the 600 samples" in out and "clip_score is from 0 to" in out
    )
    status, out = run(recipe, *line)
    assert status == 0, out
    status, out = run(recipe, "run.steps=12", "data.keep=clip_score > 0.3")
    assert status == 2, out
    assert "data.keep was clip_score > 0.4, is clip_score > 0.3. Restore it, or" in out
    changed = ("data.keep=clip_score > 0.3", "checkpoint.allow_changed_recipe=true")
    status, out = run(recipe, "run.steps=12", *changed)
    assert status == 0 and "the data starts over at step 8" in out, out


def test_weights_over_steps_are_the_same_after_a_kill(tmp_path, pool, model):
    """On two ranks with workers, and on one."""
    train = f"{pool}/00000.tar::{pool}/kept/00001.tar"
    stages = "[{until_step: 6, train_weights: [1, 0]}, {until_step: 15, train_weights: [1, 3]}]"
    weights = ("data.train_weights=[2, 1]", f"data.train_weights_schedule={stages}", "run.steps=24")
    whole = recipe_in(tmp_path / "whole", train, model)
    status, out = run(whole, *weights)
    assert status == 0, out
    recipe = recipe_in(tmp_path / "killed", train, model)
    process = start(recipe, *weights, "data.workers=2", ranks=2, fault="hold:0:16")
    wait_for_step(tmp_path / "killed" / "run", 9, process)
    kill(process)
    status, out = finish(start(recipe, *weights))
    assert status == 0 and "resuming from step" in out, out
    digests = [[line[3] for line in told(tmp_path / name / "run")] for name in ("whole", "killed")]
    assert digests[0] == digests[1] and len(digests[0]) == 24
