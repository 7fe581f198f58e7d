"""What the cases share: a small data set, a small model, its recipe, its curve without any attack."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

from clip_tools.demo import SyntheticData, shapes
from scripts.attack.case import SAME
from tests.launcher.conftest import MODEL, RECIPE, finish, metrics, start

STEPS = 20
SMALL = ("run.steps=20", "batch.global_size=16", "batch.micro_size=8", "schedule.warmup_steps=2")


@functools.cache
def folder() -> Path:
    made = Path(tempfile.mkdtemp(prefix="attack-shared-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@functools.cache
def data() -> SyntheticData:
    return shapes(folder() / "shapes", 400, per_shard=100)


def recipe(where: Path, train: str = "", name: str = "run") -> Path:
    """A recipe in `where`, whose run goes to `where`/`name`."""
    where.mkdir(parents=True, exist_ok=True)
    model = where / "small.json"
    model.write_text(json.dumps(MODEL))
    file = where / f"{name}.yaml"
    file.write_text(RECIPE.format(run_dir=where / name, train=train or data().train, model=model))
    return file


def run(
    file: Path, *overrides: str, ranks: int = 1, verb: str = "train", **more
) -> tuple[int, str]:
    """The real command to its end: its status and output."""
    return finish(start(file, *overrides, ranks=ranks, verb=verb, **more), timeout=600)


def curve(run_dir: Path) -> list[tuple]:
    """What must not change: the steps, what was in their batches, and the loss to the bit. None
    where a byte of the line was flipped."""
    keys = ("step", "batch_digest", "loss")
    return [tuple(line.get(key) for key in keys) for line in metrics(run_dir)]


@functools.cache
def reference() -> list[tuple]:
    """The curve of the run that nobody attacks."""
    status, out = run(recipe(folder(), name="calm"), *SMALL)
    assert status == 0, out
    return curve(folder() / "calm")


def same(run_dir: Path) -> str:
    """The curve of `run_dir` is that of the run that nobody attacks."""
    assert curve(run_dir) == reference(), (len(curve(run_dir)), curve(run_dir)[-1:])
    return SAME
