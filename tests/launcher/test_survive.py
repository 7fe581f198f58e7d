"""Signals and deaths under torchrun and under `clip-train train --ranks 2`: saved, told apart, nothing left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.verdict import read_verdict
from tests.launcher.conftest import (
    ENDLESS,
    PATIENCE,
    finish,
    metrics,
    planted,
    run,
    start,
    until,
    wait_for,
    wait_for_step,
)
from tests.launcher.test_launchers import free_port
from tests.processes import running

pytestmark = pytest.mark.engine


def ranks_of(recipe: Path) -> dict[int, int]:
    """rank -> process, of the ranks that train this recipe now."""
    words = {"launcher", "train", str(recipe)}
    return {int(env["RANK"]): pid for pid, line, env in running() if "RANK" in env and words <= set(line)}


def gone(recipe: Path) -> bool:
    return until(lambda: not ranks_of(recipe), 120)


SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
LINES = {
    "torchrun": {"ranks": 2},
    "launcher.torchrun": {"ranks": 2, "torchrun": "launcher.torchrun"},
    "alone": {},
}


@pytest.mark.parametrize(
    "launcher, number",
    [*((launcher, number) for launcher in LINES for number in SIGNALS), ("alone", signal.SIGHUP)],
)
def test_a_signal_to_the_launcher_is_a_commit(recipe, tmp_path, launcher, number):
    """USR1 kills a plain torchrun: its ranks notice, save all the same, and end. Loader workers outlive the signal,
    which torchrun sends to each rank's whole process group."""
    alone = ["--ranks=2"] if launcher == "alone" else []
    process = start(recipe, *ENDLESS, "data.workers=1", *alone, **LINES[launcher])
    wait_for_step(tmp_path / "run", 5, process)
    pids = ranks_of(recipe)
    assert set(pids) == {0, 1}
    process.send_signal(number)
    time.sleep(0.2)
    if launcher != "torchrun" and number != signal.SIGINT:  # a second INT is Ctrl-C in earnest
        process.send_signal(number)
    status, out = finish(process)
    assert gone(recipe)
    word, why = read_verdict(tmp_path / "run")
    assert word == "PREEMPTED", out
    assert status == 75 if launcher != "torchrun" else status != 0
    assert why["step"] == metrics(tmp_path / "run")[-1]["step"]
    if number == signal.SIGUSR1:  # the commit is a good one
        status, out = run(recipe, f"run.steps={why['step'] + 2}", ranks=2)
        assert status == 0 and f"resuming from step {why['step']}" in out, out


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("wait", ["for nothing", "for ranks"])
def test_a_signal_during_the_start(recipe, tmp_path, number, wait):
    """While the launcher imports torch, and while its ranks do; they make no step before it has come."""
    process = start(recipe, *ENDLESS, "--ranks=2", fault="hold:0:0")
    ready = (lambda: ranks_of(recipe)) if wait == "for ranks" else (lambda: listens(process.pid, number))
    wait_for(ready, "it does not start", process)
    process.send_signal(number)
    status, out = finish(process)
    assert status == 75, out
    assert gone(recipe)
    assert "stopped by SIG" in out and not metrics(tmp_path / "run")


def listens(pid: int, number: signal.Signals) -> bool:
    """Whether the process catches it."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_kill_of_one_rank_ends_the_other(recipe, tmp_path, rank):
    process = start(recipe, *ENDLESS, ranks=2)
    wait_for_step(tmp_path / "run", 5, process)
    os.kill(ranks_of(recipe)[rank], signal.SIGKILL)
    status, out = finish(process)
    assert gone(recipe)
    assert status != 0
    assert "no progress for" not in out  # it has learnt of the death, and not waited for the watchdog
    assert out.count(f"error: rank {rank} on") == 1 and "died without a word" in out, out
    assert "lost contact" not in out
    word, why = read_verdict(tmp_path / "run")
    assert word == "FAILED" and f"rank {rank} on" in why["reason"]


def test_a_killed_trainer_leaves_nothing_running(recipe, tmp_path):
    """Not its loader workers, their fork server, or the process that writes checkpoints."""
    process = start(recipe, *ENDLESS, "data.workers=2")
    wait_for_step(tmp_path / "run", 5, process)
    assert len(processes_in(recipe.parent)) > 3
    process.kill()
    process.wait()
    until(lambda: not processes_in(recipe.parent), 120)
    left = processes_in(recipe.parent)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.stdout.close()
    assert not left


def processes_in(folder: Path) -> list[int]:
    """Processes whose working directory it is."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if link.readlink() == folder:
                found.append(int(link.parent.name))
    return found


def test_the_error_of_one_rank_is_told_once_and_ends_the_other(recipe, tmp_path):
    process = start(recipe, *ENDLESS, "--ranks=2", fault="raise:1")
    status, out = finish(process)
    assert gone(recipe)
    assert status == 1
    assert out.count("RuntimeError: broken on purpose") == 1 and "clip-train: error" not in out, out
    assert read_verdict(tmp_path / "run") == ("FAILED", {"step": 5, "reason": "broken on purpose"})


def by_hand(recipe: Path, *lines: list[str], fault: str = "") -> list[subprocess.Popen]:
    """Ranks of one world without a launcher, which would end them."""
    port, processes = str(free_port()), []
    for rank, line in enumerate(lines):
        environ = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(lines)), "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **planted(fault, recipe.parent),
        }  # fmt: skip
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "launcher", "train", str(recipe), *line],
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    return processes


def test_a_rank_outside_of_any_collective_learns_of_a_death(recipe, tmp_path):
    """Nothing tells it but the line to the other rank: no launcher, and it waits for no message."""
    processes = by_hand(recipe, [*ENDLESS], [*ENDLESS], fault="sleep:1")
    try:
        wait_for((recipe.parent / "fault").exists, "rank 1 does not come to its fifth step", processes[1])
        processes[0].kill()
        assert processes[1].wait(timeout=PATIENCE) == 1
    finally:
        told = [finish(process)[1] for process in processes]
    assert told[1].count("error: rank 0 on") == 1, told
    assert read_verdict(tmp_path / "run")[0] == "FAILED"


def test_a_hang_in_a_save_is_found(recipe, tmp_path):
    """Its own watchdog finds it; the other rank stands elsewhere, and has a longer limit."""
    process = start(recipe, *ENDLESS, "launch.hang_save_seconds=4", "--ranks=2", fault="save:1")
    status, out = finish(process)
    assert gone(recipe)
    assert status == 1
    assert "in phase save" in out and "in faults/sitecustomize.py" in out, out
    assert read_verdict(tmp_path / "run")[0] == "FAILED"


def test_a_pause_of_all_is_no_hang(recipe, tmp_path):
    """Ctrl-Z and fg, a suspended job: the watchdog's clock stands still meanwhile. The limit is above a stall's."""
    process = start(recipe, *ENDLESS, "launch.hang_step_seconds=20")
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(signal.SIGTSTP)
    stat = Path(f"/proc/{process.pid}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it does not stop", process)
    time.sleep(24)
    before = metrics(tmp_path / "run")[-1]["step"]
    process.send_signal(signal.SIGCONT)
    wait_for_step(tmp_path / "run", before + 20, process)
    process.send_signal(signal.SIGTERM)
    status, out = finish(process)
    assert status == 75, out


def test_a_rank_that_hangs_is_found_and_shows_its_stack(recipe, tmp_path):
    """The limit is above a stall's. For a stopped process torchrun waits in vain before it kills it."""
    process = start(recipe, *ENDLESS, "launch.hang_step_seconds=20", ranks=2, environ={"PET_SHUTDOWN_TIMEOUT": "5"})
    wait_for_step(tmp_path / "run", 5, process)
    os.kill(ranks_of(recipe)[1], signal.SIGSTOP)
    status, out = finish(process)
    assert gone(recipe)
    assert status != 0
    assert "no progress for" in out and "waiting in" in out and "Current thread" in out, out
    assert "the last collectives: gloo:" in out


@pytest.mark.parametrize(
    "lines, told",
    [
        ((["optim.lr=1e-3"], ["optim.lr=2e-3"]), "optim.lr: 0.001 against 0.002"),
        ((["run.steps=10"], ["run.stepz=10"]), "run.stepz (10): there is no such key"),
        ((["run.steps=10"], ["batch.global_size=1"]), "batch.global_size (1) must be at least the number of ranks (2)"),
        ((["data.train=/nowhere/*.tar"], ["run.steps=10"]), "matches no shard"),
    ],
)
def test_a_mistake_of_one_rank_is_told_once_and_ends_all(recipe, tmp_path, lines, told):
    """Two processes of one world, started by hand, that were not given the same line."""
    ended = [finish(process) for process in by_hand(recipe, *lines)]
    assert [status for status, _ in ended] == [2, 2], ended
    out = "".join(out for _, out in ended)
    assert out.count(told) == 1 and out.count("clip-train: error") == 1, out
    assert not (tmp_path / "run").exists()
