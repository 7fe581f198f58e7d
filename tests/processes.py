"""Ends what a test has started, all of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
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


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL to all of it at once: torchrun's ranks are in sessions of their own and would survive its group."""
    for pid in family(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
