"""What a process logs on stderr, and how long it took from its start to the first step."""

import contextlib
import io
import logging
import os
import sys
import time
from pathlib import Path

from clip_train.errors import RankError
from clip_train.storage.redact import redact
from launcher.runtime.environment import detect

OURS = [logging.getLogger(name) for name in ("clip_train", "launcher", "clip_tools")]


def log(message: str, level: int = logging.INFO) -> None:
    OURS[1].log(level, message)


def warn(message: str) -> None:
    log(message, logging.WARNING)


class Redacting(io.TextIOWrapper):
    """A stream that no secret of a URL goes through."""

    def write(self, text: str) -> int:
        super().write(redact(text))
        return len(text)


class Unfailing(Redacting):
    """A stream that takes everything, also when its disk is full or its terminal has gone: no run
    is to end by it."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


class Lines(logging.Handler):
    """`2026-11-23 18:12:05 [rank 0] warning: ...`, each line in one piece, to what is stderr at the
    moment."""

    rank = 0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        sys.stderr.write(
            f"{now} [rank {self.rank}] {record.levelname.lower()}: {redact(record.getMessage())}\n"
        )
        sys.stderr.flush()


def configure(*, quiet: bool = False, verbose: bool = False) -> None:
    """Before anything is logged: both packages write the same lines. quiet: warnings and errors
    alone."""
    handler = Lines()
    with contextlib.suppress(RankError):  # is explained later, by the verb
        handler.rank = detect(os.environ).rank
    for logger in OURS:
        others = [each for each in logger.handlers if not isinstance(each, Lines)]
        logger.handlers = [*others, handler]
        logger.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)


def is_quiet() -> bool:
    return not OURS[1].isEnabledFor(logging.INFO)


class Startup:
    """`done("imports")` at the end of each phase; the phases follow each other."""

    def __init__(self) -> None:
        started = int(
            Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        )  # ticks since the boot
        self._started = self._before = started / os.sysconf("SC_CLK_TCK")
        self._phases: list[str] = []

    def done(self, phase: str) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._phases.append(f"{phase} {now - self._before:.1f}")
        self._before = now

    def describe(self) -> str:
        return f"first step after {self._before - self._started:.1f} s: {', '.join(self._phases)}"
