"""A process's log on stderr."""

import contextlib
import io
import logging
import os
import sys
import time
from functools import partial

from clip_train.errors import RankError
from clip_train.storage.redact import redact
from launcher.runtime.environment import detect

LOGGER = logging.getLogger("launcher")
OURS = (LOGGER, logging.getLogger("clip_train"), logging.getLogger("clip_tools"))


def log(message: str, level: int = logging.INFO) -> None:
    LOGGER.log(level, message)


warn = partial(log, level=logging.WARNING)


class Redacting(io.TextIOWrapper):
    """A stream that removes secrets of URLs."""

    def write(self, text: str) -> int:
        super().write(redact(text))
        return len(text)


class Unfailing(Redacting):
    """A stream that never fails, even if its disk is full or its terminal is closed, so it cannot
    end a run."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


class Lines(logging.Handler):
    """`2026-11-23 18:12:05 [rank 0] warning: ...`, each line in one piece, to the current stderr.
    A tool without other ranks writes `warning: ...`, and notes as they are."""

    rank = 0
    is_alone = False  # no run, and no other rank

    def emit(self, record: logging.LogRecord) -> None:
        message, level = redact(record.getMessage()), record.levelname.lower()
        line = f"{level}: {message}"
        if self.is_alone and record.levelno <= logging.INFO:
            line = message
        elif not self.is_alone:
            now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
            line = f"{now} [rank {self.rank}] {line}"
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def configure(*, quiet: bool = False, verbose: bool = False, trains: bool = True) -> None:
    """Before anything is logged: both packages write the same lines. quiet: warnings and errors
    alone. trains: this process is a rank of a run."""
    handler = Lines()
    with contextlib.suppress(RankError):  # the verb explains it later
        env = detect(os.environ)
        handler.rank, handler.is_alone = env.rank, not trains and env.world_size == 1
    for logger in OURS:
        others = [each for each in logger.handlers if not isinstance(each, Lines)]
        logger.handlers = [*others, handler]
        logger.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
