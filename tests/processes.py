"""The processes that a test has started: finds them, and ends them all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.warm import Command, World

Process = subprocess.Popen | Command | World


def family(process: subprocess.Popen | Command) -> set[int]:
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
    """(process, its command line, its environment at the start) of all on this machine that may be read.

    Without forks that are not yet the program which they are to become: they still look like their parents.
    """
    told, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(folder.name)
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            told[pid] = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
    for pid, (line, environ) in told.items():
        if told.get(parents[pid]) == (line, environ):
            continue
        variables = (entry.partition("=") for entry in environ.decode(errors="replace").split("\0"))
        yield (
            pid,
            line.decode(errors="replace").split("\0"),
            {name: value for name, _, value in variables},
        )


def kill_tree(process: subprocess.Popen | Command) -> None:
    """SIGKILL to all of it at once: torchrun's ranks are in sessions of their own and would survive its group."""
    if process.poll() is not None:  # its number may be another's by now
        return
    for pid in family(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
