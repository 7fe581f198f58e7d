"""The same line under the deepspeed launcher and under torchrun gives the same run; what both ask of the system."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clip_train.stop import StopRequest
from launcher.limits import OPEN_FILES
from launcher.local import run_agent
from tests.launcher.conftest import (
    ENDLESS,
    PATIENCE,
    ROOT,
    finish,
    kill,
    metrics,
    planted,
    run,
    start,
    wait_for,
    wait_for_step,
)

pytestmark = pytest.mark.engine


def free_port() -> int:
    """Below those that the kernel hands out: it is taken seconds later, and none is lost to a connection meanwhile."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", port))
            return port


def test_the_deepspeed_launcher(recipe, tmp_path):
    line = ["--num_gpus", "2", "--master_port", str(free_port()), "--module", "launcher", "train", str(recipe)]
    out = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.runner", *line, "run.steps=6", f"run.dir={tmp_path / 'ds'}"],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
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
        process = start(recipe, *ENDLESS, **line)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    try:
        wait_for_step(tmp_path / "run", 1, process)
        most = OPEN_FILES if limits[1] == resource.RLIM_INFINITY else min(limits[1], OPEN_FILES)
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (most, limits[1])
    finally:
        kill(process)


SLURM = {
    "scontrol": r'case "$*" in show\ hostnames*) echo 127.0.0.1;; esac',
    "srun": """\
trap "" USR1  # as the script's own does in a moment, in which a rank would die of it
export SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1
shift
"$@" &
echo $! > "$STEP"
wait $! || { s=$?; echo "srun: error: n1: task 0: Exited with exit code $s"; exit $s; }""",
    "scancel": 'case "$1" in --signal=USR1) kill -USR1 "$(cat "$STEP")";; esac',
}


@pytest.mark.parametrize("when", ["at once", "in training"])
def test_usr1_to_torchruns_batch_script(recipe, tmp_path, when):
    """Its own command, with stand-ins for Slurm's. USR1 comes again every 5 s, and a save takes longer than twice that;
    at once, there is only torchrun to say why it ends: its ranks make no step before."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, line in SLURM.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    environ = {
        **os.environ, "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        **planted("slow:1" if when == "in training" else "hold:0:0", tmp_path), "STEP": str(tmp_path / "step"),
        "RANKS_PER_NODE": "2",
        "SLURM_JOB_ID": str(job_of_a_free_port()), "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }  # fmt: skip
    process = subprocess.Popen(
        ["bash", ROOT / "slurm" / "torchrun.sbatch", recipe, *ENDLESS, "checkpoint.every_steps=200000"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        if when == "in training":
            wait_for_step(tmp_path / "run", 5, process)
        else:
            wait_for((tmp_path / "step").exists, "no task was started", process)
        process.send_signal(signal.SIGUSR1)
    finally:
        status, out = finish(process)
    end = json.loads((tmp_path / "run" / "attempts.jsonl").read_text().splitlines()[-1])
    assert (status, end["verdict"], end["status"], end["decision"]) == (0, "PREEMPTED", 75, "requeue"), out
    assert "SIGUSR1" in end["reason"] and end["blamed"] == []
    assert end["step"] == (metrics(tmp_path / "run")[-1]["step"] if when == "in training" else 0)


def test_a_signal_that_comes_as_the_agent_ends_does_not_change_its_status():
    """Python hands handlers back to the system when it ends, not what is ignored."""
    assert run_agent(lambda: None, StopRequest()) == 0
    assert {signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)} == {signal.SIG_IGN}


def job_of_a_free_port() -> int:
    """The script takes port 20000 + the job's number, below 40000."""
    for job in range(os.getpid() % 10000, 20000):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", 20000 + job))
            return job
    raise AssertionError("no free port")
