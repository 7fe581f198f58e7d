"""Whether the process of a run still runs, from what it wrote about itself in attempts.jsonl.

Only the machine that it ran on can tell. A process number alone is not enough: it is used again
after a while, and containers have numbers of their own.
"""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """This process, for `is_running`."""
    return {"pid": os.getpid(), "started": _stat(os.getpid())[1], **_machine()}


def is_running(process: Mapping[str, Any]) -> bool | None:
    """None if this machine cannot tell: the process ran elsewhere, or belongs to another user.

    process: of `this_process`.
    """
    machine = _machine()
    here = all(value and process.get(name) == value for name, value in machine.items())
    pid = process.get("pid")
    if not here or not isinstance(pid, int):
        return None
    try:
        state, started = _stat(pid)
    except OSError:
        # it is gone, or /proc shows only a user's own processes
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return None
        return None
    # a zombie has ended, but nobody has asked for its exit status yet
    return started == process.get("started") and state not in "ZX"


def _machine() -> dict[str, str]:
    """The host, its boot and the container, within which a process number has one meaning. Empty
    texts where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = namespace = ""
    return {"host": platform.node(), "boot": boot, "namespace": namespace}


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process, one letter, and its start in clock ticks since the boot. OSError."""
    if not Path("/proc/self/stat").exists():
        return "", ""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # the second field is the program's name in brackets, and may contain anything
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
