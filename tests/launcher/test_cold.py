"""Starts from nothing, as users make them: one process, `--ranks`, torchrun, the deepspeed launcher; and how each ends.

All other tests start warm (tests/warm.py), and a world's ranks without a launcher. Slurm's `srun` is in tests/slurm.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from PIL import Image

from launcher.runtime.rendezvous import OPEN_FILES
from launcher.runtime.verdict import read_verdict
from tests.launcher.conftest import (
    ENDLESS,
    PATIENCE,
    ROOT,
    clean_environment,
    finish,
    free_port,
    kill,
    metrics,
    run,
    start_cold,
    until,
    wait_for,
    wait_for_step,
)
from tests.processes import family, running

pytestmark = pytest.mark.engine

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "launcher")
LAUNCHERS = {
    "torchrun": (TORCHRUN, ()),
    "alone": (("launcher",), ("--ranks=2",)),
}


def ranks_of(recipe: Path) -> dict[int, int]:
    """rank -> process, of the ranks that train this recipe now."""
    words = {"launcher", "train", str(recipe)}
    return {
        int(env["RANK"]): pid
        for pid, line, env in running()
        if "RANK" in env and words <= set(line)
    }


def gone(recipe: Path) -> bool:
    return until(lambda: not ranks_of(recipe), 120)


def processes_in(folder: Path) -> list[int]:
    """Processes whose working directory it is."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if link.readlink() == folder:
                found.append(int(link.parent.name))
    return found


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_the_same_line_under_a_launcher_is_the_same_run(recipe, tmp_path, launcher):
    """The same losses, to the bit, as ranks that no launcher has started."""
    port = str(free_port())
    deepspeed = (
        "deepspeed.launcher.runner",
        "--num_gpus",
        "2",
        "--master_port",
        port,
        "--module",
        "launcher",
    )
    module = {"deepspeed": deepspeed, "torchrun": TORCHRUN}[launcher]
    under = start_cold(
        recipe,
        "run.steps=6",
        f"run.dir={tmp_path / launcher}",
        module=module,
        environ={"DS_ACCELERATOR": "cpu"},
    )
    status, out = finish(under)
    assert status == 0, out
    status, out = run(recipe, "run.steps=6", ranks=2)
    assert status == 0, out
    losses, expected = (
        [line["loss"] for line in metrics(tmp_path / place)] for place in (launcher, "run")
    )
    assert losses == expected and len(losses) == 6


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ALL_SIGNALS = [
    *((name, number) for name in LAUNCHERS for number in SIGNALS),
    ("alone", signal.SIGHUP),
]


@pytest.mark.parametrize(
    "launcher, number",
    [
        pytest.param(
            name,
            number,
            marks=() if (name, number) == ("alone", signal.SIGTERM) else pytest.mark.full,
        )
        for name, number in ALL_SIGNALS
    ],
)
def test_a_signal_to_the_launcher_is_a_commit(recipe, tmp_path, launcher, number):
    """USR1 kills a plain torchrun: its ranks notice, save all the same, and end. Loader workers outlive the signal,
    which torchrun sends to each rank's whole process group. Without a launcher the exit status is the ranks' own."""
    module, more = LAUNCHERS[launcher]
    process = start_cold(recipe, *ENDLESS, "data.workers=1", *more, module=module)
    wait_for_step(tmp_path / "run", 5, process)
    assert set(ranks_of(recipe)) == {0, 1}
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
    status, out = run(recipe, f"run.steps={why['step'] + 2}", ranks=2)  # the commit is a good one
    assert status == 0 and f"resuming from step {why['step']}" in out, out


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("wait", ["for nothing", "for ranks"])
def test_a_signal_during_the_start(recipe, tmp_path, number, wait):
    """While the launcher imports torch, and while its ranks do; they make no step before it has come."""
    process = start_cold(recipe, *ENDLESS, "--ranks=2", fault="hold:0:0")
    ready = (
        (lambda: ranks_of(recipe))
        if wait == "for ranks"
        else (lambda: listens(process.pid, number))
    )
    wait_for(ready, "it does not start", process)
    process.send_signal(number)
    status, out = finish(process)
    assert status == 75, out
    assert gone(recipe)
    assert "stopped by SIG" in out and not metrics(tmp_path / "run")


def listens(pid: int, number: signal.Signals) -> bool:
    """Whether the process catches it."""
    caught = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigCgt")
    )
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_killed_trainer_leaves_nothing_running(recipe, tmp_path):
    """Not its loader workers, their fork server, or the process that writes checkpoints."""
    process = start_cold(recipe, *ENDLESS, "data.workers=2")
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


@pytest.mark.full
def test_a_pause_of_all_is_no_hang(recipe, tmp_path):
    """Ctrl-Z and fg, a suspended job: the watchdog's clock stands still meanwhile. The limit is above a stall's."""
    process = start_cold(recipe, *ENDLESS, "launch.hang_seconds=20")
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(
        signal.SIGSTOP
    )  # Slurm's; a terminal's TSTP is dropped in a session without one
    stat = Path(f"/proc/{process.pid}/stat")
    wait_for(
        lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it does not stop", process
    )
    time.sleep(24)
    before = metrics(tmp_path / "run")[-1]["step"]
    process.send_signal(signal.SIGCONT)
    wait_for_step(tmp_path / "run", before + 20, process)
    process.send_signal(signal.SIGTERM)
    status, out = finish(process)
    assert status == 75, out


@pytest.mark.full
def test_a_rank_that_hangs_is_found_and_shows_its_stack(recipe, tmp_path):
    """The limit is above a stall's. Both ranks show where they stand, and the one that does not wait is named."""
    process = start_cold(
        recipe, *ENDLESS, "launch.hang_seconds=20", module=TORCHRUN, fault="sleep:1"
    )
    status, out = finish(process)
    assert gone(recipe)
    assert status != 0
    assert "no progress for" in out and "waiting in" in out and "Current thread" in out, out
    word, why = read_verdict(tmp_path / "run")
    assert word == "FAILED" and "in faults/sitecustomize.py" in why["reason"]


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.full), "alone"])
def test_a_rank_that_is_frozen_is_found_and_killed(recipe, tmp_path, request, launcher):
    """A stopped process ends by SIGKILL alone, which a launcher sends after a while; the reason is the last line."""
    module, more = LAUNCHERS[launcher]
    temporary = tempfile.TemporaryDirectory()  # short: a socket's path has 108 bytes at most
    request.addfinalizer(temporary.cleanup)
    environ = {"PET_SHUTDOWN_TIMEOUT": "5", "TMPDIR": temporary.name}
    process = start_cold(recipe, *ENDLESS, "data.workers=1", *more, module=module, environ=environ)
    wait_for_step(tmp_path / "run", 5, process)
    os.kill(ranks_of(recipe)[1], signal.SIGSTOP)
    status, out = finish(process, 120)
    assert gone(recipe)
    assert status != 0
    assert out.count("error: rank 1 on") == 1 and "is frozen" in out, out
    assert "resource_tracker" not in out, out


def test_a_run_leaves_nothing_in_the_temporary_folder(recipe):
    with tempfile.TemporaryDirectory() as folder:  # short: a socket's path has 108 bytes at most
        more = ["run.steps=3", "schedule.warmup_steps=1", "data.workers=1"]
        status, out = finish(start_cold(recipe, *more, environ={"TMPDIR": folder}))
        assert status == 0, out
        assert list(Path(folder).glob("pymp-*")) == []


@pytest.mark.full
def test_who_may_hold_a_socket_for_each_rank_raises_its_limit(recipe, tmp_path):
    """Started, as Slurm does, with the soft limit of another shell."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        process = start_cold(recipe, *ENDLESS, "--ranks=2")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    try:
        wait_for_step(tmp_path / "run", 1, process)
        most = OPEN_FILES if limits[1] == resource.RLIM_INFINITY else min(limits[1], OPEN_FILES)
        holder = ranks_of(recipe)[0]
        assert resource.prlimit(holder, resource.RLIMIT_NOFILE) == (most, limits[1])
    finally:
        kill(process)


def test_an_installed_package_trains_from_any_folder(recipe, tmp_path):
    """The console script, with no path to the source but what is installed."""
    script = Path(sys.executable).parent / "clip-train"
    environ = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [script, "train", recipe, "run.steps=2", "schedule.warmup_steps=0"],
        env=environ, cwd="/", capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_verdict(tmp_path / "run")[0] == "DONE"


def test_a_log_that_cannot_be_written_ends_no_run(recipe, tmp_path):
    """A full disk under it, or a terminal that has gone: each line is an error. A mistake keeps its status."""
    for line, status in (
        (["train", recipe, "run.steps=8"], 0),
        (["train", recipe, "run.stepz=8"], 2),
    ):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                [sys.executable, "-m", "launcher", *line],
                env=clean_environment(), cwd=tmp_path, stdout=full, stderr=full, check=False, timeout=PATIENCE,
            )  # fmt: skip
        assert done.returncode == status
    assert read_verdict(tmp_path / "run")[0] == "DONE" and len(metrics(tmp_path / "run")) == 8


def test_a_run_alone_has_no_door(recipe, tmp_path):
    """No port but on loopback, no name of a socket that another user could take."""
    process = start_cold(recipe, *ENDLESS)
    try:
        wait_for_step(tmp_path / "run", 8, process)  # one is saved
        links = [link for pid in family(process) for link in Path(f"/proc/{pid}/fd").iterdir()]
        held = {
            os.readlink(link).partition("[")[2].rstrip("]") for link in links if link.is_symlink()
        }
        sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        assert [line for line in sockets if line[6] in held and len(line) > 7] == []
        for table, loopback in (("tcp", "0100007F"), ("tcp6", "0" * 24 + "01000000")):
            lines = [
                line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
            ]
            listening = [line[1] for line in lines if line[3] == "0A" and line[9] in held]
            assert [address for address in listening if not address.startswith(loopback)] == []
    finally:
        kill(process)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_imported_from_the_working_directory(recipe, tmp_path, ranks):
    """Neither by one rank nor by several, nor by their loaders: a user's files there have the names of Python's
    modules and of ours, and wandb's own folder is no package."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("random", "signal", "socket", "tempfile", "queue", "yaml", "numpy"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported from the folder')\n")
    for name in ("launcher", "clip_train", "wandb"):
        (folder / name).mkdir()
        (folder / name / "notes.txt").touch()
    script = Path(sys.executable).parent / "clip-train"
    line = [script, "train", recipe, "run.steps=2", "schedule.warmup_steps=0", "data.workers=1"]
    environ = clean_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*line, f"--ranks={ranks}"],
        env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_verdict(tmp_path / "run")[0] == "DONE"


def test_a_folder_does_not_pass_for_wandb(recipe, tmp_path):
    (tmp_path / "wandb").mkdir()
    process = start_cold(recipe, "log.wandb=true", environ={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    status, out = finish(process)
    assert status == 2 and "wandb is not installed" in out, out


def test_a_temporary_folder_with_a_long_path(recipe, tmp_path):
    """A socket's path has at most 107 bytes, and a cluster's job may have a longer TMPDIR than that."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    table = tmp_path / "table.jsonl"
    table.write_text('{"image": "a.png", "text": "a"}\n' * 4)
    for line in (
        ["train", recipe, "run.steps=2", "schedule.warmup_steps=0", "data.workers=1"],
        ["shards", table, tmp_path / "shards", "--workers=2", "--per-shard=2"],
        ["index", tmp_path / "shards/*.tar", "--workers=2"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "launcher", *map(str, line)],
            env=clean_environment() | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)},
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.glob("pymp-*")) == []
