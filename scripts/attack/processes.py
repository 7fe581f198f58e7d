"""Signals to each process of a run, at random moments: the curve is the same after a resume."""

from __future__ import annotations

import contextlib
import functools
import os
import pty
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launcher.runtime.verdict import read_verdict
from scripts.attack import lab
from scripts.attack.case import SAME, Case
from tests.launcher.conftest import (
    ROOT,
    clean_environment,
    finish,
    kill,
    metrics,
    start,
    start_cold,
    until,
    wait_for,
    wait_for_step,
)
from tests.processes import family
from tests.s3.server import Server, chosen

LONG = (*lab.SMALL, "run.steps=60", "data.workers=1", "log.progress=false")
GLOBAL = {1: (), 2: (), 3: ("batch.global_size=24",)}
PROMPT = ("checkpoint.grace_seconds=20", "launch.hang_seconds=20")
STORES = ("disk", "S3")
TARGETS = ("rank", "writer", "worker")


@functools.cache
def calm(ranks: int) -> list[tuple]:
    """The curve without an attack; a store changes nothing in it."""
    where = lab.folder() / f"calm{ranks}"
    status, out = lab.run(lab.recipe(where), *LONG, *GLOBAL[ranks], ranks=ranks)
    assert status == 0, out
    return lab.curve(where / "run")


@functools.cache
def server() -> Server:
    """Up until this process ends, which its standard input tells it."""
    return chosen()().start()


def stored(folder: Path, store: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The overrides and the environment of a run with this store."""
    if store == "disk":
        return (*LONG, *PROMPT), {}
    name = folder.name.lower().replace("_", "x")
    server().put(name)
    line = (*LONG, *PROMPT, f"checkpoint.remote=s3://{name}/run")
    return line, server().environment(server().url)


def parents() -> dict[int, int]:
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return found


def is_writer(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"clip_train.checkpoint.writer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def found(rank, target: str) -> int | None:
    """The rank itself, its checkpoint writer, or a loader worker, which its fork server has made."""
    if target == "rank":
        return rank.pid
    own = family(rank) - {rank.pid}
    if target == "writer":
        return next(filter(is_writer, own), None)
    known = parents()
    servers = {pid for pid in own if known.get(pid) == rank.pid and not is_writer(pid)}
    return next((pid for pid in own if known.get(pid) in servers), None)


def ended(process, seconds: float = 50) -> tuple[int, str]:
    """Its end by itself, in time."""
    try:
        process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it continues after {seconds} s: {finish_now(process)}") from None
    return finish(process)


def finish_now(process) -> str:
    kill(process)
    return finish(process)[1][-1500:]


def gone_on(folder: Path, line: tuple[str, ...], environ: dict[str, str], ranks: int) -> str:
    """The same line again, to the end, has the curve that it would have had."""
    status, out = lab.run(lab.recipe(folder), *line, ranks=ranks, environ=environ)
    assert status == 0 and "Traceback" not in out, out
    assert lab.curve(folder / "run") == calm(ranks), out
    return SAME


def hit(target: str, way: str, ranks: int, store: str) -> Callable[[Path], str]:
    """A signal to one process of the run, once it has trained for a random time."""

    def attack(folder: Path) -> str:
        draw = random.Random(f"{target} {way} {ranks} {store}")
        line, environ = stored(folder, store)
        process = start(lab.recipe(folder), *line, ranks=ranks, environ=environ)
        step = draw.randrange(1, 30)
        wait_for_step(folder / "run", step, process, 50)
        victim = (process.ranks if ranks > 1 else [process])[draw.randrange(ranks)]
        pid = found(victim, target)
        if pid is not None:  # else it has ended in this moment
            WAYS[way](pid)
        if way == "stopped for good" and target == "rank" and ranks == 1:
            kill(process)  # the run itself sleeps: nobody is there to say so
        elif way == "stopped for good" and target == "rank":
            (other,) = {each.pid for each in process.ranks} - {victim.pid}
            rank = next(each for each in process.ranks if each.pid == other)
            ended(rank)
            assert read_verdict(folder / "run") is not None
            kill(process)
        else:
            _, out = ended(process)
            said = out.replace("broken on purpose", "")
            assert "Traceback" not in said or "DataLoader worker" in said, out
        return gone_on(folder, line, environ, ranks)

    return attack


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def paused(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(20)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def terminated_twice(pid: int) -> None:
    twice(pid, signal.SIGTERM)


def twice(pid: int, number: int) -> None:
    for _ in range(2):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        time.sleep(0.3)


WAYS: dict[str, Callable[[int], None]] = {
    "killed": killed,
    "stopped for good": stopped,
    "stopped for 20 s": paused,
    "terminated twice": terminated_twice,
}

# -- the launcher of `--ranks`


def lives(pid: int) -> bool:
    """It runs: a zombie only waits for its parent."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def stopped_and_killed(pid: int) -> None:
    stopped(pid)
    killed(pid)


AT_LAUNCHER: dict[str, tuple[Callable[[int], None], int]] = {
    "killed": (killed, -signal.SIGKILL),
    "stopped for good": (stopped, 0),  # its ranks do without it
    "stopped, then killed": (stopped_and_killed, -signal.SIGKILL),
    "stopped for 20 s": (paused, 0),
    "terminated": (lambda pid: os.kill(pid, signal.SIGTERM), 75),
    "terminated twice": (terminated_twice, 75),
    "interrupted": (lambda pid: os.kill(pid, signal.SIGINT), 75),
    "interrupted twice": (lambda pid: twice(pid, signal.SIGINT), 130),
}


def hit_launcher(way: str, ranks: int) -> Callable[[Path], str]:
    """A signal to the launcher alone: no rank outlives it, and the same line continues the run."""

    def attack(folder: Path) -> str:
        line = (*LONG, *PROMPT, *GLOBAL[ranks])
        process = start_cold(lab.recipe(folder), *line, f"--ranks={ranks}")
        wait_for_step(folder / "run", random.Random(f"{way} {ranks}").randrange(1, 30), process, 90)
        ours = family(process) - {process.pid}
        do, expected = AT_LAUNCHER[way]
        do(process.pid)
        gone = until(lambda: not any(map(lives, ours)), 50)
        process.send_signal(signal.SIGCONT)
        status, out = ended(process)
        assert gone, f"a rank outlives its launcher: {out}"
        assert status in (expected, 75), (status, out)  # 75: all was committed between two signals
        assert "Traceback" not in out, out
        return gone_on(folder, line, {}, ranks)

    return attack


# -- starts and ends


def again_and_again(folder: Path) -> str:
    """Five kills in a row, in the start, the resume and the steps."""
    draw = random.Random(7)
    for _ in range(5):
        process = start(lab.recipe(folder), *LONG)
        time.sleep(draw.uniform(0.2, 3.0))
        kill(process)
    return gone_on(folder, LONG, {}, 1)


def same_second(folder: Path) -> str:
    """The same line twice in the same second: one of them trains, the other ends in words."""
    both = [start(lab.recipe(folder), *LONG, *PROMPT) for _ in range(2)]
    outs = [ended(process)[1] for process in both]
    assert all("Traceback" not in out for out in outs), outs
    return gone_on(folder, LONG, {}, 1)


def without_a_parent(folder: Path) -> str:
    """The shell that started `--ranks 2` is killed with its launcher: no rank is left."""
    process = start_cold(lab.recipe(folder), *LONG, "run.steps=100000", "--ranks=2")
    wait_for(lambda: metrics(folder / "run"), "it does not train", process, 55)
    ranks = family(process) - {process.pid}
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    end = time.monotonic() + 40
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < end:
        time.sleep(0.2)
    left = [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "ranks outlive their launcher"
    return SAME


def written_to(ending: str) -> Callable[[Path], str]:
    """Nobody reads what it writes; `ending` is a shell's."""

    def attack(folder: Path) -> str:
        line = [sys.executable, "-m", "launcher", "train", str(lab.recipe(folder)), *LONG]
        subprocess.run(
            ["sh", "-c", f'"$@" {ending}', "sh", *line],
            env=clean_environment() | {"PYTHONPATH": str(ROOT)},
            cwd=folder, check=False, capture_output=True, timeout=55,
        )  # fmt: skip
        assert read_verdict(folder / "run")[0] == "DONE", read_verdict(folder / "run")
        return gone_on(folder, LONG, {}, 1)

    return attack


def closed_terminal(folder: Path) -> str:
    """The terminal in which it runs is closed: a commit, and the end."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", "train", str(lab.recipe(folder)), *LONG],
        env=clean_environment() | {"PYTHONPATH": str(ROOT)},
        cwd=folder, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(slave), os.O_RDWR)),  # noqa: PLW1509
    )  # fmt: skip
    os.close(slave)
    wait_for(lambda: metrics(folder / "run"), "it does not train", _Quiet(process, master), 50)
    os.close(master)
    process.wait(timeout=40)
    return gone_on(folder, LONG, {}, 1)


class _Quiet:
    """A process whose terminal somebody must read, or it would stand still."""

    def __init__(self, process: subprocess.Popen, master: int) -> None:
        self.process, self.master = process, master
        os.set_blocking(master, False)

    def poll(self) -> int | None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.read(self.master, 1 << 16)
        return self.process.poll()


def ready(ranks: int, store: str) -> None:
    """What is compared with, and the server, before a clock runs."""
    calm(ranks)
    if store == "S3":
        server()


SEVERAL = {
    "five kills in a row": again_and_again,
    "the same line twice in one second": same_second,
    "a parent that vanishes": without_a_parent,
    "a terminal that closes": closed_terminal,
    "no standard output": written_to(">&-"),
    "neither input nor outputs": written_to("<&- >&- 2>&-"),
    "an output whose reader leaves": written_to("2>&1 | head -1"),
    "a full disk for its output": written_to("> /dev/full 2>&1"),
}
CASES = [
    *(
        Case(
            f"{target} {way}, {ranks} rank{'s' * (ranks > 1)}, {store}",
            hit(target, way, ranks, store),
            waits="launch.hang_seconds" if "stopped" in way else "a second start",
            prepare=functools.partial(ready, ranks, store),
        )
        for target in TARGETS
        for way in WAYS
        for ranks in (1, 2)
        for store in STORES
    ),
    *(
        Case(
            f"launcher {way}, {ranks} ranks",
            hit_launcher(way, ranks),
            waits="a second start",
            prepare=functools.partial(calm, ranks),
        )
        for way in AT_LAUNCHER
        for ranks in (2, 3)
    ),
    *(
        Case(name, attack, waits="several starts", prepare=functools.partial(calm, 1))
        for name, attack in SEVERAL.items()
    ),
]
