"""Signals and deaths under torchrun and under `clip-train train --ranks 2`: saved, told apart, nothing left running."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from launcher.verdict import read_verdict
from tests.launcher.conftest import finish, metrics, run, start, wait_for_step

pytestmark = pytest.mark.engine


def ranks_of(recipe: Path) -> dict[int, int]:
    """rank -> process, of the ranks that train this recipe now."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().split(b"\0")
            environ = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = next((e.partition(b"=")[2] for e in environ if e.startswith(b"RANK=")), None)
        if rank is not None and {b"launcher", b"train", str(recipe).encode()} <= set(line):
            found[int(rank)] = int(folder.name)
    return found


def gone(recipe: Path, timeout: float = 30) -> bool:
    end = time.monotonic() + timeout
    while ranks_of(recipe) and time.monotonic() < end:
        time.sleep(0.1)
    return not ranks_of(recipe)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("launcher", ["torchrun", "alone"])
def test_a_signal_to_the_launcher_is_a_commit(recipe, tmp_path, launcher, number):
    """USR1 kills a plain torchrun: its ranks notice, save all the same, and end."""
    process = start(
        recipe, "run.steps=400", *(["--ranks=2"] if launcher == "alone" else []), ranks=1 + (launcher == "torchrun")
    )
    wait_for_step(tmp_path / "run", 5, process)
    pids = ranks_of(recipe)
    assert set(pids) == {0, 1}
    process.send_signal(number)
    process.wait(timeout=60)
    assert gone(recipe)
    status, out = finish(process)
    word, why = read_verdict(tmp_path / "run")
    assert word == "PREEMPTED", out
    assert status == 75 if launcher == "alone" else status != 0
    assert why["step"] == metrics(tmp_path / "run")[-1]["step"] < 400
    if number == signal.SIGUSR1:  # the commit is a good one
        status, out = run(recipe, f"run.steps={why['step'] + 2}", ranks=2)
        assert status == 0 and f"resuming from step {why['step']}" in out, out


def test_kill_of_one_rank_ends_the_other(recipe, tmp_path):
    process = start(recipe, "run.steps=2000", ranks=2)
    wait_for_step(tmp_path / "run", 5, process)
    os.kill(ranks_of(recipe)[0], signal.SIGKILL)
    process.wait(timeout=30)
    assert gone(recipe, 1)
    status, out = finish(process)
    assert status != 0
    assert "lost contact with another rank" in out or "SIGTERM" in out, out


def test_a_rank_that_hangs_is_found_and_shows_its_stack(recipe, tmp_path):
    process = start(recipe, "run.steps=2000", "launch.hang_step_seconds=3", ranks=2)
    wait_for_step(tmp_path / "run", 5, process)
    os.kill(ranks_of(recipe)[1], signal.SIGSTOP)
    process.wait(timeout=90)  # torchrun waits 30 s for a stopped process before it kills it
    status, out = finish(process)
    assert gone(recipe, 5)
    assert status != 0
    assert "no progress for" in out and "waiting in" in out and "Current thread" in out, out
    assert "the last collectives: gloo:" in out


def test_one_rank_with_another_recipe_is_refused_on_all(recipe, tmp_path):
    """Two processes of one world, started by hand, that were not given the same line."""
    import subprocess
    import sys

    from tests.launcher.conftest import ROOT
    from tests.launcher.test_launchers import free_port

    port = str(free_port())
    processes = []
    for rank in range(2):
        environ = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        line = [sys.executable, "-m", "launcher", "train", str(recipe), f"optim.lr={rank + 1}e-3"]
        processes.append(
            subprocess.Popen(
                line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        )
    ended = [finish(process) for process in processes]
    assert [status for status, _ in ended] == [2, 2], ended
    assert "optim.lr: 0.001 against 0.002" in ended[0][1]
    assert not (tmp_path / "run").exists()
