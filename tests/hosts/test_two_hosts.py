"""`deepspeed --hostfile` over ssh on two hosts of two ranks each: it trains, and a cut link ends it everywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.runtime.verdict import read_verdict
from tests.hosts.conftest import SETUP
from tests.lab import call
from tests.launcher.conftest import ENDLESS, ROOT, finish, kill, metrics, until, wait_for_step

pytestmark = pytest.mark.hosts


def deepspeed(hosts: Path, recipe: Path, *overrides: str) -> subprocess.Popen:
    """On h1. What the other host has to know beside PYTHON* goes through .deepspeed_env, as docs/slurm.md says."""
    (recipe.parent / ".deepspeed_env").write_text(
        "OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\nGLOO_SOCKET_IFNAME=eth0\n"
    )
    bin = Path(sys.executable).parent
    environ = {
        "PATH": f"{bin}:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PDSH_SSH_ARGS_APPEND": "-o ServerAliveInterval=3 -o ServerAliveCountMax=2",
    }
    line = [
        "--hostfile",
        str(hosts / "hostfile"),
        "--launcher",
        "pdsh",
        "--master_addr",
        "h1",
        "--master_port",
        "29507",
    ]
    return subprocess.Popen(
        [
            SETUP, "exec", hosts, "h1", "bash", "-c", 'cd "$0"; exec "$@"', recipe.parent,
            bin / "deepspeed", *line, "--module", "launcher", "train", recipe, *overrides,
        ],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )  # fmt: skip


def left_on(hosts: Path, host: str) -> list[str]:
    """Ranks and launchers that run on a host."""
    return [
        line
        for line in call(SETUP, "ps", hosts, host).splitlines()
        if "launcher" in line and "train" in line
    ]


def test_it_trains_and_a_cut_link_ends_it_everywhere(hosts, recipe, tmp_path):
    process = deepspeed(
        hosts, recipe, *ENDLESS, "launch.hang_seconds=30", "checkpoint.every_steps=3"
    )
    try:
        wait_for_step(tmp_path / "run", 5, process)
        assert left_on(hosts, "h1") and left_on(hosts, "h2")
        call(SETUP, "net", hosts, "h2", "down")
    except BaseException:
        kill(process)
        raise
    try:
        status, out = finish(process)
        assert status != 0, out
        assert any(
            told in out for told in ("has died or is frozen", "no progress for", "lost contact")
        ), out
        until(lambda: not left_on(hosts, "h1") and not left_on(hosts, "h2"), 180)
        assert left_on(hosts, "h1") == [] and left_on(hosts, "h2") == []
    finally:
        call(SETUP, "net", hosts, "h2", "up")
    last = metrics(tmp_path / "run")[-1]["step"]
    status, out = finish(deepspeed(hosts, recipe, f"run.steps={last + 2}"))
    assert status == 0, out
    assert "resuming from step" in out and "rank 0 of 4" in out
    assert read_verdict(tmp_path / "run")[0] == "DONE"
