"""Whether the process of a run is still running, by what it wrote about itself in attempts.jsonl.

Only the machine on which it ran can tell. A process id alone is not enough: ids are used again, and
each container has its own ids.
"""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """This process, for `is_running`."""
    _, started = _stat(os.getpid())
    return {"pid": os.getpid(), "started": started, **_machine()}


def is_running(process: Mapping[str, Any]) -> bool | None:
    """None if this machine cannot tell: the process ran elsewhere, or belongs to another user.

    process: as `this_process` returned it.
    """
    machine = _machine()
    ran_here = all(value and process.get(name) == value for name, value in machine.items())
    pid = process.get("pid")
    if not ran_here or not isinstance(pid, int):
        return None
    try:
        state, started = _stat(pid)
    except OSError:
        # the process has ended, or /proc shows only a user's own processes
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return None
        return None
    # Z and X: the process has ended, and its parent has not read its exit status
    return started == process.get("started") and state not in "ZX"


def _machine() -> dict[str, str]:
    """The host, its boot and its namespace of process ids (a container's), within which an id is
    unique. Empty texts if the system does not tell them."""
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
