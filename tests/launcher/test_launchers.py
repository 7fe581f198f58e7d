"""The same line under the deepspeed launcher and under torchrun gives the same run; what both ask of the system."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys

import pytest

from launcher.meeting import OPEN_FILES
from tests.launcher.conftest import ROOT, kill, metrics, run, start, wait_for_step

pytestmark = pytest.mark.engine


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_the_deepspeed_launcher(recipe, tmp_path):
    line = ["--num_gpus", "2", "--master_port", str(free_port()), "--module", "launcher", "train", str(recipe)]
    out = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.runner", *line, "run.steps=6", f"run.dir={tmp_path / 'ds'}"],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert out.returncode == 0, out.stdout + out.stderr
    status, told = run(recipe, "run.steps=6", ranks=2)
    assert status == 0, told
    under_deepspeed, under_torchrun = metrics(tmp_path / "ds"), metrics(tmp_path / "run")
    assert [line["loss"] for line in under_deepspeed] == [line["loss"] for line in under_torchrun]
    assert len(under_deepspeed) == 6


@pytest.mark.parametrize("line", [{}, {"ranks": 2, "torchrun": "launcher.torchrun"}], ids=["a rank", "an agent"])
def test_who_may_hold_a_socket_for_each_rank_raises_its_limit(recipe, tmp_path, line):
    """Started, as Slurm does, with the soft limit of another shell."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        process = start(recipe, "run.steps=400", **line)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    try:
        wait_for_step(tmp_path / "run", 1, process)
        most = OPEN_FILES if limits[1] == resource.RLIM_INFINITY else min(limits[1], OPEN_FILES)
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (most, limits[1])
    finally:
        kill(process)
