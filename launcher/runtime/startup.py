"""How long it takes from the start of the process to the first step, by phase."""

from __future__ import annotations

import os
import time
from pathlib import Path


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
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.phases)
        return f"first step after {self._before:.1f} s: {phases}"
