"""Long runs: memory, descriptors, threads and shared memory stay flat, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from scripts.attack import lab
from scripts.attack.case import SAME, VERDICT, Case
from tests.launcher.conftest import finish, kill, metrics, start, start_cold, wait_for_step
from tests.processes import family

STEPS = 5_000
LINE = (
    "batch.global_size=4", "batch.micro_size=4", "data.workers=1", "checkpoint.every_steps=100",
    "evaluate.every_steps=250", "log.progress=false", "log.batch_digest=false", "checkpoint.keep_last=2",
)  # fmt: skip
SOAK_SECONDS = 720
MEBIBYTES = 64  # that all processes together may grow by, in the second half of the run


def held(pids: set[int]) -> dict[str, int]:
    """Of these processes together: resident MiB, open files, threads; and what all have in /dev/shm."""
    sums = {"MiB": 0, "files": 0, "threads": 0, "processes": len(pids)}
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            )
            sums["MiB"] += int(lines["RssAnon"].split()[0]) >> 10
            sums["threads"] += int(lines["Threads"])
            sums["files"] += len(os.listdir(f"/proc/{pid}/fd"))
    return sums


def soak(folder: Path) -> str:
    """5,000 steps with saves, evaluations, a worker and a store."""
    store = f"checkpoint.remote={folder / 'store'}"
    line = (*LINE, f"run.steps={STEPS}", f"data.val={lab.data().val}", store)
    run = start(lab.recipe(folder), *line)
    seen = []
    for step in (STEPS // 4, STEPS // 2, 3 * STEPS // 4, STEPS - 100):
        wait_for_step(folder / "run", step, run, 550)
        seen.append(held(family(run)))
    status, out = finish(run)
    assert status == 0 and len(metrics(folder / "run")) == STEPS, out
    first, last = seen[1], seen[-1]
    assert last["MiB"] <= first["MiB"] + MEBIBYTES, seen
    # a save or an evaluation under way holds a few more
    assert all(last[name] <= first[name] + 3 for name in ("files", "threads", "processes")), seen
    return SAME


def killed_at_random(folder: Path) -> str:
    """As many steps as fit, killed and resumed again and again, beside a run that nobody kills."""
    draw, end, kills = random.Random(29), time.monotonic() + SOAK_SECONDS, 0
    line = (*LINE, "run.steps=1000000", "log.batch_digest=true", "--quiet")
    calm = start(lab.recipe(folder, name="calm"), *line, f"data.val={lab.data().val}")
    while time.monotonic() < end:
        run = start(lab.recipe(folder), *line, f"data.val={lab.data().val}")
        time.sleep(draw.uniform(2, 40))
        assert run.poll() is None, finish(run)
        kill(run)
        kills += 1
    kill(calm)
    both = list(zip(lab.curve(folder / "run"), lab.curve(folder / "calm"), strict=False))
    assert both and all(ours == theirs for ours, theirs in both), both[-1:]
    return f"{SAME}: {len(both)} steps, {kills} kills"


def litter(end: Callable) -> Callable[[Path], str]:
    """What a run that ended so leaves in `/dev/shm` and in the temporary folder."""

    def attack(folder: Path) -> str:
        temporary, before = folder / "tmp", set(os.listdir("/dev/shm"))
        temporary.mkdir()
        limits = ("launch.hang_seconds=15", "checkpoint.grace_seconds=10", "run.steps=100000")
        environ = {"TMPDIR": str(temporary)}
        fault = FAULTS.get(end, "")  # cold: a warm process shares the one that clears up
        run = start_cold(lab.recipe(folder), *LINE, *limits, environ=environ, fault=fault)
        if end not in FAULTS:
            wait_for_step(folder / "run", 8, run, 50)
            end(run)
        finish(run, timeout=50)

        def left() -> list[str]:
            """The names that are new, without torch's cache of compiled code: its import makes it,
            for all runs."""
            names = [*(set(os.listdir("/dev/shm")) - before), *os.listdir(temporary)]
            return [name for name in names if not name.startswith("torchinductor_")]

        limit = time.monotonic() + 15
        while time.monotonic() < limit and left():
            time.sleep(0.2)
        assert not left(), left()
        return VERDICT

    return attack


def by_signal(number: int) -> Callable:
    return lambda run: os.kill(run.pid, number)


def of_all(run) -> None:
    kill(run)


def of_a_worker(run) -> None:
    """The youngest process of the family: a loader worker."""
    os.kill(max(family(run) - {run.pid}), signal.SIGKILL)


def by_error(run) -> None:
    """A step that fails."""


def by_a_save(run) -> None:
    """A save that fails."""


FAULTS = {by_error: "raise:0", by_a_save: "snapshot:0"}
ENDS = {
    "the end of a run by SIGTERM": by_signal(signal.SIGTERM),
    "the end of a run by SIGINT": by_signal(signal.SIGINT),
    "the end of a run by SIGKILL": by_signal(signal.SIGKILL),
    "the end of a run by SIGABRT": by_signal(signal.SIGABRT),
    "the end of a run by SIGSEGV": by_signal(signal.SIGSEGV),
    "the end of a run by SIGHUP": by_signal(signal.SIGHUP),
    "the end of a run by a kill of all": of_all,
    "the end of a run by a kill of a child": of_a_worker,
    "the end of a run by an error": by_error,
    "the end of a run by a failed save": by_a_save,
}
CASES = [
    *(Case(name, litter(end)) for name, end in ENDS.items()),
    Case("12 minutes of kills at random", killed_at_random, waits="run.steps"),
    Case("5,000 steps", soak, waits="run.steps"),
]
