"""The processes that a test has started: finds them, and ends them all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path


def family(process: subprocess.Popen) -> set[int]:
    """It and all that descend from it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    found = {process.pid}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def running() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """(process, its command line, its environment at the start) of all on this machine that may be read."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line, environ = ((folder / file).read_bytes().decode(errors="replace") for file in ("cmdline", "environ"))
            variables = (entry.partition("=") for entry in environ.split("\0"))
            yield int(folder.name), line.split("\0"), {name: value for name, _, value in variables}


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL to all of it at once: torchrun's ranks are in sessions of their own and would survive its group."""
    for pid in family(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
