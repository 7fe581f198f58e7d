"""A case of the campaign, the endings that are allowed, and the runner with its clock."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.processes import family, running
from tests.warm import call, start_server

SECONDS = 60.0  # of a case, and nothing of it runs on
MEMORY = 3 << 30  # bytes that one process may have resident
DATA = 6 << 30  # bytes that the kernel gives one process
SECRET = "hunter2planted"  # what no output and no file may hold
SAME, REFUSED, VERDICT = "same metrics", "refused in words", "verdict and exit"
SKIPPED = "left out by name, and trained on"  # a refusal of one sample or shard


@dataclass(frozen=True)
class Case:
    """attack: does it in an empty folder, and returns how it ended; AssertionError where it is none
    of the three endings. waits: the key on which it waits on purpose, longer than a minute."""

    name: str
    attack: Callable[[Path], str]
    cheap: bool = False
    waits: str = ""
    prepare: Callable[[], object] | None = None  # once, before the clock starts


@dataclass
class Result:
    case: Case
    ending: str = ""
    wrong: str = ""
    seconds: float = 0.0
    peak: int = 0  # bytes


class TooLateError(Exception):
    """The clock of a case has run out."""


def said(status: int, out: str, *words: str) -> str:
    """The refusal of a command: an exit of 1 or 2, no traceback, and all of `words`, which are
    field, value and remedy."""
    assert status in (1, 2), (status, out)
    assert "Traceback" not in out and "error: " in out and SECRET not in out, out
    missing = [word for word in words if word not in out]
    assert not missing, (missing, out)
    return REFUSED


@contextlib.contextmanager
def clock(seconds: float) -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise TooLateError(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Myself:
    """This process, as `family` wants it."""

    pid = os.getpid()


def peaks(ended: threading.Event, keep: set[int], most: list[int]) -> None:
    """The largest resident size of the case's processes, until it has ended."""
    while not ended.wait(0.3):
        for pid in family(Myself()) - keep:
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                held = next(line for line in lines if line.startswith("VmHWM"))
                most[0] = max(most[0], int(held.split()[1]) << 10)


def left_over(keep: set[int], folder: Path) -> list[int]:
    """Processes of the case that still run: ours, and those that have named its folder."""
    named = {
        pid
        for pid, line, environ in running()
        if str(folder) in f"{line}{environ.get('FAULT_FILE')}"
    }
    return sorted((family(Myself()) - keep) | (named - keep - {os.getpid()}))


def run_case(case: Case, keep: set[int]) -> Result:
    """It, in a folder of its own, that is removed with all processes that it has left."""
    result, began, ended, most = Result(case), time.monotonic(), threading.Event(), [0]
    watcher = threading.Thread(target=peaks, args=(ended, keep, most), daemon=True)
    watcher.start()
    with tempfile.TemporaryDirectory(prefix="attack-", ignore_cleanup_errors=True) as name:
        try:
            with clock(SECONDS if not case.waits else 15 * SECONDS):
                result.ending = case.attack(Path(name))
        except TooLateError as e:
            result.wrong = str(e)
        except Exception as e:
            result.wrong = (
                str(e)[-3000:] if isinstance(e, AssertionError) else traceback.format_exc()
            )
        for pid in left_over(keep, Path(name)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    result.seconds = time.monotonic() - began
    ended.set()
    watcher.join()
    result.peak = most[0]
    if result.peak > MEMORY and not result.wrong:
        result.wrong = f"one process held {result.peak >> 20} MiB"
    return result


def campaign(cases: Sequence[tuple[str, Case]]) -> Iterator[tuple[str, Result]]:
    """Each result with its class, one after the other. Memory is bounded by the kernel, which every
    process that is started here inherits."""
    resource.setrlimit(resource.RLIMIT_DATA, (DATA, DATA))
    start_server()
    call(os.getpid)  # its imports are done then
    for name, case in cases:
        if case.prepare is not None:
            case.prepare()
        keep = family(Myself())
        yield name, run_case(case, keep)
