"""What a process logs on stderr, and how long it took from its start to the first step."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path


def log(message: str) -> None:
    """With the time, in one piece. message: begins with `error: ` or `warning: ` where it is one."""
    print(f"{time.strftime('%H:%M:%S')} clip-train: {message}", file=sys.stderr, flush=True)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log(f"{record.levelname.lower()}: {record.getMessage()}")


def show_warnings() -> None:
    """What `clip_train` says by `logging` looks like the rest."""
    logger = logging.getLogger("clip_train")
    if not any(isinstance(handler, _Lines) for handler in logger.handlers):
        logger.addHandler(_Lines(logging.WARNING))


class Startup:
    """`done("imports")` at the end of each phase; the phases follow each other."""

    def __init__(self) -> None:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # ticks since the boot
        self._started = self._before = started / os.sysconf("SC_CLK_TCK")
        self._phases: list[str] = []

    def done(self, phase: str) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._phases.append(f"{phase} {now - self._before:.1f}")
        self._before = now

    def describe(self) -> str:
        return f"first step after {self._before - self._started:.1f} s: {', '.join(self._phases)}"
