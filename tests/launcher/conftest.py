"""Runs of the real command, in processes of their own, on a small real data set."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from clip_tools.demo import SyntheticData, shapes
from tests import jitter, processor
from tests.processes import Process, kill_tree
from tests.warm import Command, World

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
PATIENCE = (
    900.0  # seconds; for what is certain to come, on a machine that is slow and stalls at times
)
ENDLESS = (
    "run.steps=100000",
    "log.progress=false",
)  # not done before it is disturbed, nor held up by an unread pipe


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
    fault: str = "",
    cwd: Path | None = None,
    environ: dict[str, str] | None = None,
) -> Command | World:
    """`clip-train VERB recipe overrides`, started warm, as ranks of one world where there are several.

    fault: see faults/. environ: more of it; RANK and its like, of one rank of several that are started one by one.
    """
    line = [verb, str(recipe), *overrides]
    where = cwd or recipe.parent
    env = clean_environment() | planted(fault, recipe.parent) | (environ or {})
    if ranks == 1:
        return Command(line, env=env, cwd=where)
    world = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return World(
        [
            Command(line, env=env | world | {"RANK": str(r), "LOCAL_RANK": str(r)}, cwd=where)
            for r in range(ranks)
        ]
    )


def start_cold(
    recipe: Path,
    *overrides: str,
    module: Sequence[str] = ("launcher",),
    fault: str = "",
    environ: dict[str, str] | None = None,
) -> subprocess.Popen:
    """`python -m MODULE... train recipe overrides` from nothing, as a shell or a launcher starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", *module, "train", str(recipe), *overrides],
        env=clean_environment() | {**SLOW_SAVES, **planted(fault, recipe.parent)} | (environ or {}),
        cwd=recipe.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def clean_environment() -> dict[str, str]:
    """As many threads as the tests have, one; nothing of a launcher that may have started the tests."""
    launchers = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in launchers} | {
        "OMP_NUM_THREADS": str(processor.THREADS)
    }


def free_port() -> int:
    """Below those that the kernel gives out: it is taken some time later, and no connection may take it until then."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", port))
            return port


SLOW_SAVES = {
    "PET_SHUTDOWN_TIMEOUT": "300"
}  # torchrun kills ranks that save after a signal; 30 s may be one stall


def planted(fault: str, folder: Path) -> dict[str, str]:
    """The environment of ranks with a fault: `folder`/fault is there once it sleeps."""
    path = f"{ROOT}:{FAULTS}" if fault or jitter.VARIABLE in os.environ else str(ROOT)
    return {"PYTHONPATH": path, "FAULT": fault, "FAULT_FILE": str(folder / "fault")}


def finish(process: Process, timeout: float = PATIENCE) -> tuple[int, str]:
    """Its exit status and output; nothing of it is left running, however it ends."""
    try:
        out, _ = process.communicate(timeout=timeout)
        return process.wait(0), out
    finally:
        kill(process)


def kill(process: Process) -> None:
    """SIGKILL to every rank, the launcher, loader workers."""
    for each in process.ranks if isinstance(process, World) else [process]:
        kill_tree(each)
    if isinstance(process, subprocess.Popen) and process.stdout is not None:
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


def wait_for(
    condition: Callable[[], object], what: str, process: Process, timeout: float = PATIENCE
) -> None:
    """Until it comes true, which the process is to see to: with its end there is nothing to wait for."""
    ended = False

    def come_or_ended() -> bool:
        nonlocal ended
        ended = process.poll() is not None  # before the look: what it did last counts
        return bool(condition()) or ended

    if not until(come_or_ended, timeout) or (ended and not condition()):
        kill(process)
        raise AssertionError(f"{what}: {finish(process)[1]}")


def wait_for_step(run_dir: Path, step: int, process: Process, timeout: float = PATIENCE) -> None:
    """Until metrics.jsonl has that step."""
    reached = lambda: any(line["step"] >= step for line in metrics(run_dir))  # noqa: E731
    wait_for(reached, f"step {step} was not reached", process, timeout)


def wait_for_commit(run_dir: Path, process: Process, timeout: float = PATIENCE) -> None:
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


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> Path:
    """A file of random weights of the model `tiny`."""
    import torch
    from safetensors.torch import save_file

    from clip_train.models.clip import build_model
    from clip_train.models.config import load_architecture

    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    model = build_model(load_architecture("tiny"))
    save_file({name: x.detach().clone() for name, x in model.state_dict().items()}, file)
    return file
