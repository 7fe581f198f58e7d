"""The programs of examples/, run as they stand on a CPU, small."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests import warm
from tests.documents import ROOT

EXAMPLES = ROOT / "examples"
STEPS = "run.steps=12", "schedule.warmup_steps=2", "log.progress=false", "log.tensorboard=false"


def run_example(name: str, folder: str, *overrides: str) -> str:
    """What it prints, from `python examples/NAME FOLDER ...`; it must end by itself."""
    sys.argv = [name, folder, *overrides]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.engine
def test_img2dataset_to_an_exported_model(tmp_path):
    out = warm.call(run_example, "img2dataset.py", str(tmp_path / "shards"), *STEPS)
    assert "3 shards, 600 samples" in out, out
    names = {file.name for file in (tmp_path / "shards").iterdir()}
    assert {"00002.tar", "00002_stats.json", "00002.parquet"} <= names
    assert len(metrics(tmp_path / "run")) == 12
    assert load_file(tmp_path / "run" / "export" / "open_clip_model.safetensors")["logit_scale"].shape == ()


@pytest.mark.engine
def test_lit(tmp_path):
    out = warm.call(run_example, "lit.py", str(tmp_path), *STEPS)
    assert "the image tower is what it was: True" in out and "the text tower is another one: True" in out, out


@pytest.mark.engine
def test_distillation(tmp_path):
    out = warm.call(run_example, "distillation.py", str(tmp_path), *STEPS)
    assert re.search(r"step 12: CLIP's loss \d\.\d+, the teacher's \d\.\d+", out), out
    first, *_, last = metrics(tmp_path / "student")
    assert last["loss"] < first["loss"]


@pytest.mark.engine
def test_memory_bank(tmp_path):
    out = warm.call(run_example, "memory_bank.py", str(tmp_path), *STEPS, "loss.bank_warmup_steps=4")
    assert "with 256 pairs in the bank" in out, out


def losses_of(line: list[str], folder: Path) -> list[float]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    line = [sys.executable, *line]
    done = subprocess.run(line, env=environ, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(each.rsplit(" ", 1)[1]) for each in done.stdout.splitlines() if each.startswith("step ")]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LOOPS = {
    "accelerate": ([str(EXAMPLES / "accelerate_loop.py")], [*TORCHRUN, str(EXAMPLES / "accelerate_loop.py")]),
    "lightning": ([str(EXAMPLES / "lightning_loop.py")], [str(EXAMPLES / "lightning_loop.py"), "2"]),
}


@pytest.mark.distributed
@pytest.mark.parametrize("package", LOOPS)
def test_a_loop_in_another_library(package, tmp_path):
    """It learns, and on two ranks its curve is that of one: the global batch is the same."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    one, two = (losses_of(line, tmp_path) for line in LOOPS[package])
    assert len(one) == 10 and one[-1] < 0.7 * one[0]
    assert two == pytest.approx(one, rel=2e-3)
