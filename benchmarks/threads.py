"""A step of the demo alone and beside a process that takes a whole core: as many threads as cores, and ours.

Threads of OpenMP spin while they wait for each other: where one has lost its core to another process, the rest burn
theirs. So `launcher.runtime.environment` leaves cores to the loader's workers, and the demo has one worker.

Both runs are `clip-train demo` itself on two cores, for which it is sized: endless, and stopped by SIGSTOP but for
windows of some steps, which they get in turn, alone and beside the busy process. Seconds are what the run says of its
steps; a ratio is the median over the rounds of the ratios within a round. A window in which other processes took more
than a fifth of a core is taken again, and again; after an hour whatever there is counts, and is called disturbed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common import ROOT, finish, parser

TARGETS = {
    "beside a busy process": "at most 1.5 times its step alone",
    "alone": "at most 1.05 times the step with a thread for each core",
}
BESIDE, ALONE = 1.5, 1.05
CORES = 2
STEPS = 3  # of a window
OTHERS = 0.2  # cores that other processes may take in a window
PATIENCE = 900.0  # seconds, for what is certain to come
QUIET_SECONDS = 3600.0  # to wait for a quiet machine, in all
ENDLESS = (
    "run.steps=1000000",
    "checkpoint.every_steps=1000000",
    "log.progress=false",
    "launch.hang_seconds=36000",
)
RUNS = {
    "a thread for each core": ({"OMP_NUM_THREADS": str(CORES)}, ["data.workers=0"]),
    "ours": ({}, []),
}


def cpu_seconds(groups: set[int]) -> tuple[float, float]:
    """Of all processes of this machine so far, and of those in these process groups."""
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, *interrupts = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    own = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) in groups:
            own += int(fields[11]) + int(fields[12])
    return (user + nice + system + sum(interrupts)) / tick, own / tick


class Watch:
    """How many cores processes outside `groups` have taken since it was made."""

    def __init__(self, groups: set[int]):
        self.groups, self.began, self.before = groups, time.monotonic(), cpu_seconds(groups)

    def others(self) -> float:
        everyone, own = cpu_seconds(self.groups)
        return (everyone - self.before[0] - (own - self.before[1])) / (
            time.monotonic() - self.began
        )


class Demo:
    """`clip-train demo`, stopped but for the windows in which it is measured."""

    def __init__(self, folder: Path, name: str, environ: dict[str, str], overrides: list[str]):
        self.metrics = folder / name / "metrics.jsonl"
        self.output = folder / f"{name}.log"
        clean = {
            k: v
            for k, v in os.environ.items()
            if k not in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
        }
        line = ["demo", "--dir", str(folder), f"run.dir={folder / name}", *ENDLESS, *overrides]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launcher", *line],
                env=clean | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | environ,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def stop(self) -> None:
        """With its loader workers and checkpoint writer."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def seconds(self) -> list[float]:
        """Of every step so far."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text().splitlines(keepends=True)
        return [json.loads(line)["step_seconds"] for line in lines if line.endswith("\n")]

    def wait_for(self, count: int) -> None:
        """Until it has taken that many steps."""
        end = time.monotonic() + PATIENCE
        while len(self.seconds()) < count:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(
                    f"the demo does not get to step {count}:\n{self.output.read_text()}"
                )
            time.sleep(0.01)

    def window(self) -> float:
        """Mean seconds of the next steps, without the one that the last SIGSTOP broke off and the one after it."""
        before = len(self.seconds()) + 2
        os.killpg(self.process.pid, signal.SIGCONT)
        self.wait_for(before + STEPS)
        self.stop()
        return statistics.mean(self.seconds()[before : before + STEPS])

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def busy(number: int) -> Iterator[set[int]]:
    """Beside so many processes that each take a whole core; their process groups."""
    line = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(line, start_new_session=True) for _ in range(number)]
    try:
        yield {process.pid for process in processes}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def quiet_window(demo: Demo, beside: int, end: float) -> tuple[float, bool]:
    """Seconds per step, and whether other processes have disturbed it, since `end` came first."""
    own = {os.getpgrp(), demo.process.pid}
    while True:
        idle = Watch(own)
        time.sleep(0.5)
        if idle.others() > OTHERS and time.monotonic() < end:
            continue
        with busy(beside) as groups:
            watch = Watch(own | groups)
            seconds, disturbed = demo.window(), watch.others() > OTHERS
        if not disturbed or time.monotonic() > end:
            return seconds, disturbed


def measure(rounds: int) -> tuple[dict[tuple[str, int], list[float]], int]:
    """Each run's windows (seconds per step), alone (0) and beside one busy process (1); how many were disturbed."""
    windows: dict[tuple[str, int], list[float]] = {
        (name, beside): [] for name in RUNS for beside in (0, 1)
    }
    num_disturbed = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        demos = {}
        for name, (environ, overrides) in RUNS.items():
            demos[name] = Demo(Path(folder), name.replace(" ", "-"), environ, overrides)
            opened.callback(demos[name].close)
            demos[name].wait_for(2)
            demos[name].stop()
        end = time.monotonic() + QUIET_SECONDS
        for _ in range(rounds):
            for (name, beside), taken in windows.items():
                seconds, disturbed = quiet_window(demos[name], beside, end)
                taken.append(seconds)
                num_disturbed += disturbed
                print(
                    f"{name}, beside {beside}: {seconds:.3f} s per step{' (disturbed)' * disturbed}",
                    file=sys.stderr,
                )
    return windows, num_disturbed


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves nothing behind
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    windows, num_disturbed = measure(3 if args.quick else 15)

    def times(run: tuple[str, int], other: tuple[str, int]) -> float:
        """How many times as long a step of `run` takes."""
        return statistics.median(a / b for a, b in zip(windows[run], windows[other], strict=True))

    theirs, ours = RUNS
    table = [
        {
            "threads": name,
            "alone, s per step": round(statistics.median(windows[name, 0]), 3),
            "beside a busy process": round(statistics.median(windows[name, 1]), 3),
            "x alone": round(times((name, 1), (name, 0)), 2),
            "alone, x a thread for each core": round(times((name, 0), (theirs, 0)), 3),
            "worst window": round(max(windows[name, 1]), 3),
        }
        for name in RUNS
    ]
    beside, alone = times((ours, 1), (ours, 0)), times((ours, 0), (theirs, 0))
    missed = (
        [f"beside a busy process: {beside:.2f} times its step alone, not {BESIDE}"]
        if beside > BESIDE
        else []
    )
    missed += (
        [f"alone: {alone:.3f} times the step with a thread for each core, not {ALONE}"]
        if alone > ALONE
        else []
    )
    if num_disturbed:
        print(
            f"the machine was busy: {num_disturbed} of {sum(map(len, windows.values()))} windows were disturbed"
        )
    return finish("threads", table, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
