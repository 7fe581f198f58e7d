"""`clip-train train --hostfile` on two hosts of two ranks each: a stop, a lost host, a resume after each; a host that
cannot be reached, and one that lacks the folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.runtime.verdict import read_verdict
from tests.hosts.conftest import SETUP
from tests.lab import call
from tests.launcher.conftest import ENDLESS, ROOT, finish, kill, metrics, until, wait_for_step
from tests.processes import running

pytestmark = pytest.mark.hosts


def train(
    hosts: Path, recipe: Path, *overrides: str, hostfile: Path | None = None
) -> subprocess.Popen:
    """On h1, in the recipe's folder."""
    environ = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "HF_TOKEN": "a secret",
    }  # fmt: skip
    line = [
        sys.executable,
        "-m",
        "launcher",
        "train",
        recipe,
        "--hostfile",
        hostfile or hosts / "hostfile",
    ]
    return subprocess.Popen(
        [SETUP, "exec", hosts, "h1", "bash", "-c", 'cd "$0"; exec "$@"', recipe.parent, *line, *overrides],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )  # fmt: skip


def left_on(hosts: Path, host: str) -> list[str]:
    """Our processes on a host."""
    return [line for line in call(SETUP, "ps", hosts, host).splitlines() if "-m launcher" in line]


def starter(recipe: Path) -> int:
    """The process that was typed: no rank, and not what ssh has started."""
    (found,) = (
        pid
        for pid, line, environ in running()
        if line[1:4] == ["-m", "launcher", "train"]
        and str(recipe) in line
        and "RANK" not in environ
        and "--node-rank=1" not in line
    )
    return found


def test_a_stop_and_a_lost_host_end_it_everywhere(hosts, recipe, tmp_path):
    run = tmp_path / "run"
    process = train(hosts, recipe, *ENDLESS, "checkpoint.every_steps=3")
    try:
        wait_for_step(run, 5, process)
        assert left_on(hosts, "h1") and left_on(hosts, "h2")
        assert "a secret" not in call(SETUP, "ps", hosts, "h2")
        os.kill(starter(recipe), signal.SIGUSR1)
        status, out = finish(process)
        assert status == 75, out
        assert "rank 0 of 4" in out and read_verdict(run)[0] == "PREEMPTED"
        until(lambda: not left_on(hosts, "h1") and not left_on(hosts, "h2"), 60)
        stopped = metrics(run)[-1]["step"]

        process = train(hosts, recipe, *ENDLESS, "checkpoint.every_steps=3")
        wait_for_step(run, stopped + 4, process)
        call(SETUP, "crash", hosts, "h2")
        status, out = finish(process)
        assert status == 1, out
        assert f"resuming from step {stopped}" in out and "on h2" in out, out
        until(lambda: not left_on(hosts, "h1"), 60)
    finally:
        kill(process)
        call(SETUP, "up", hosts, "2")
    last = metrics(run)[-1]["step"]
    status, out = finish(train(hosts, recipe, f"run.steps={last + 2}"))
    assert status == 0, out
    assert read_verdict(run)[0] == "DONE"
    assert [line["step"] for line in metrics(run)] == [*range(1, last + 3)]


def test_a_host_that_cannot_be_reached_ends_the_start(hosts, recipe, tmp_path):
    """The ranks of h1 would wait for it until `launch.rendezvous_seconds`."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("h1 slots=1\nh9 slots=1\n")
    status, out = finish(train(hosts, recipe, hostfile=hostfile))
    assert status == 1, out
    assert "ssh could not log in" in out, out
    until(lambda: not left_on(hosts, "h1"), 60)


def test_a_host_without_the_folder_is_named(hosts, recipe, tmp_path):
    """Its name needs quotes in a shell."""
    here = tmp_path / "it's $HOME"
    here.mkdir()
    (here / "recipe.yaml").write_text(recipe.read_text())
    call(SETUP, "exec", hosts, "h2", "mount", "-t", "tmpfs", "disk", tmp_path)
    try:
        status, out = finish(train(hosts, here / "recipe.yaml"))
    finally:
        call(SETUP, "exec", hosts, "h2", "umount", tmp_path)
    assert status == 1, out
    assert f"its ranks were not started (its message is above); that host needs {here}" in out, out
    status, out = finish(
        train(hosts, here / "recipe.yaml", "run.steps=2", "schedule.warmup_steps=0")
    )
    assert status == 0, out
