"""A real Open MPI starts the ranks, of the default engine: DeepSpeed compares Open MPI's variables with its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launcher.runtime.verdict import read_verdict
from tests.hosts.conftest import SETUP
from tests.lab import install
from tests.launcher.conftest import clean_environment, finish, metrics, planted

pytestmark = pytest.mark.hosts
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2")


def test_mpirun_trains_with_deepspeed(recipe, tmp_path):
    install("HOSTS", SETUP)
    line = [sys.executable, "-m", "launcher", "train", str(recipe), "run.steps=3"]
    process = subprocess.Popen(
        [*MPIRUN, *line, "engine.kind=deepspeed", "schedule.warmup_steps=0"],
        env=clean_environment() | planted("", tmp_path),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    status, out = finish(process)
    assert status == 0, out
    assert "rank 0 of 2 (local 0), from Open MPI" in out, out
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
    assert read_verdict(tmp_path / "run")[0] == "DONE"
