"""How long it takes from the start of the process to the first step, by phase."""

from __future__ import annotations

import os
import time
from pathlib import Path

PARENT = os.getppid()  # as it was when this process began, or nearly so: the imports take seconds


def is_orphan() -> bool:
    """torchrun was gone before this rank could know it by its number: nothing that starts ranks is its parent."""
    if PARENT != 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:
        line = Path("/proc/1/cmdline").read_bytes()
    except OSError:
        return False
    return not any(name in line for name in (b"torch", b"python", b"clip-train"))  # the first process of a container


def process_age() -> float:
    """Seconds since the kernel started this process; 0 where there is no /proc."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class Startup:
    """`done("imports")` at the end of each phase; the phases follow each other."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float]] = []  # name, seconds
        self._before = 0.0  # age of the process when the last phase ended

    def done(self, phase: str) -> None:
        age = process_age()
        self.phases.append((phase, age - self._before))
        self._before = age

    def describe(self) -> str:
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.phases)
        return f"first step after {self._before:.1f} s: {told}"
