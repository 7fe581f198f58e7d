"""Runs of the real command, in processes of their own, on a small real data set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clip_train.data.synthetic import SyntheticData, shapes
from tests.processes import kill_tree

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).parent / "faults"

RECIPE = """\
run: {{name: small, dir: {run_dir}, steps: 40, seed: 3}}
model: {{name: {model}, dropout: 0.1, patch_dropout: 0.25}}
data: {{train: "{train}", workers: 0, lanes: 4, shuffle_block: 64}}
batch: {{global_size: 32, micro_size: 12}}
optim: {{lr: 1e-3}}
schedule: {{warmup_steps: 5}}
checkpoint: {{every_steps: 7}}
log: {{batch_digest: true, tensorboard: false}}
"""
MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
PATIENCE = 900.0  # seconds; for what is certain to come, on a machine that is slow and stalls at times
ENDLESS = ("run.steps=100000", "log.progress=false")  # not done before it is disturbed, nor held up by an unread pipe


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> SyntheticData:
    return shapes(tmp_path_factory.mktemp("data") / "shapes", 600, per_shard=150)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("model") / "small.json"
    file.write_text(json.dumps(MODEL))
    return file


@pytest.fixture
def recipe(tmp_path, data, model) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(run_dir=tmp_path / "run", train=data.train, model=model))
    return file


def start(
    recipe: Path,
    *overrides: str,
    ranks: int = 1,
    verb: str = "train",
    torchrun: str = "torch.distributed.run",
    fault: str = "",
    cwd: Path | None = None,
    environ: dict[str, str] | None = None,
) -> subprocess.Popen:
    """`clip-train VERB recipe overrides`, under torchrun where there is more than one rank. fault: see faults/.

    environ: more of it; RANK and its like, of one rank of several that are started one by one.
    """
    line = ["-m", "launcher", verb, str(recipe), *overrides]
    if ranks > 1:
        line = ["-m", torchrun, "--standalone", "--nproc-per-node", str(ranks), *line]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return subprocess.Popen(
        [sys.executable, *line],
        env=clean | {"OMP_NUM_THREADS": "1", **SLOW_SAVES, **planted(fault, recipe.parent)} | (environ or {}),
        cwd=cwd or recipe.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


SLOW_SAVES = {"PET_SHUTDOWN_TIMEOUT": "300"}  # torchrun kills ranks that save after a signal; 30 s may be one stall


def planted(fault: str, folder: Path) -> dict[str, str]:
    """The environment of ranks with a fault: `folder`/fault is there once it sleeps."""
    path = f"{ROOT}:{FAULTS}" if fault else str(ROOT)
    return {"PYTHONPATH": path, "FAULT": fault, "FAULT_FILE": str(folder / "fault")}


def finish(process: subprocess.Popen, timeout: float = PATIENCE) -> tuple[int, str]:
    """Its exit status and output; nothing of it is left running, however it ends."""
    try:
        out, _ = process.communicate(timeout=timeout)
        return process.returncode, out
    finally:
        kill(process)


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to every rank, the launcher, loader workers."""
    kill_tree(process)
    if process.stdout is not None:
        process.stdout.close()


def run(recipe: Path, *overrides: str, ranks: int = 1, verb: str = "train") -> tuple[int, str]:
    return finish(start(recipe, *overrides, ranks=ranks, verb=verb))


def until(condition: Callable[[], object], timeout: float = PATIENCE) -> bool:
    """Whether it comes true: it holds now, or has held in the moment in which it was looked at last."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def wait_for(condition: Callable[[], object], what: str, process: subprocess.Popen, timeout: float = PATIENCE) -> None:
    """Until it comes true, which the process is to see to: with its end there is nothing to wait for."""
    ended = False

    def come_or_ended() -> bool:
        nonlocal ended
        ended = process.poll() is not None  # before the look: what it did last counts
        return bool(condition()) or ended

    if not until(come_or_ended, timeout) or (ended and not condition()):
        kill_tree(process)
        raise AssertionError(f"{what}: {finish(process)[1]}")


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen, timeout: float = PATIENCE) -> None:
    """Until metrics.jsonl has that step."""
    reached = lambda: any(line["step"] >= step for line in metrics(run_dir))  # noqa: E731
    wait_for(reached, f"step {step} was not reached", process, timeout)


def wait_for_commit(run_dir: Path, process: subprocess.Popen, timeout: float = PATIENCE) -> None:
    """Until there is a checkpoint to resume from: it is written in the background."""
    commits = run_dir / "checkpoints" / "commit"
    wait_for(lambda: list(commits.glob("*.json")), "nothing was committed", process, timeout)


def metrics(run_dir: Path) -> list[dict]:
    """Whole lines of metrics.jsonl."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]
