"""The stacks of a process that may be stuck in C, for another process of the same machine.

`answer` prepares this process: a signal makes Python's faulthandler write the stacks of all threads
without taking the GIL. They go to a file in memory, whose name says which process this is, so nothing
is left on a disk, and `processes` finds it without a list of processes. Linux only.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clip_train.processes import state_of

# By default this signal is ignored, so it ends no process. Nothing here uses urgent data of sockets.
SIGNAL = signal.SIGURG
NAME = "clip-train-stacks"
LINK = re.compile(rf"/memfd:{NAME} (\d+) (.*?)( \(deleted\))?")
PROC = Path("/proc")
LOOK_SECONDS = 0.1  # between looks at the file, which is complete once it does not grow

_descriptors: list[int] = []  # of the file of this process, which stays open


@dataclass(frozen=True)
class Answering:
    """A process that has called `answer`."""

    pid: int
    who: str  # as given to `answer`
    file: Path

    def is_stopped(self) -> bool:
        """Whether it is frozen, by SIGSTOP or a debugger, so that it cannot answer."""
        return state_of(self.pid) in ("T", "t")


def answer(who: str) -> None:
    """From now on this process answers `ask`, unless a sandbox does not allow it. who: describes it
    to `processes`, in at most 200 bytes."""
    if not hasattr(os, "memfd_create"):
        return
    with contextlib.suppress(OSError):
        descriptor = os.memfd_create(f"{NAME} {os.getpid()} {who}")
        faulthandler.register(SIGNAL, file=descriptor, all_threads=True)
        for earlier in _descriptors:
            os.close(earlier)
        _descriptors[:] = [descriptor]


def processes() -> Iterator[Answering]:
    """The processes of this machine that answer, as far as this user may look at them."""
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for file in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found = LINK.fullmatch(os.readlink(file))
                    # a child that was forked has its parent's file, and the parent's number
                    if found and found[1] == folder.name:
                        yield Answering(int(folder.name), found[2], file)


def ask(process: Answering, seconds: float = 2.0) -> str:
    """The stacks of all its threads, the innermost frame first; empty if it does not answer."""
    end = time.monotonic() + seconds
    text = ""
    with contextlib.suppress(OSError):
        before = process.file.stat().st_size
        os.kill(process.pid, SIGNAL)
        while time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            now = process.file.read_bytes()[before:].decode(errors="replace")
            if now and now == text:
                break
            text = now
    return text
