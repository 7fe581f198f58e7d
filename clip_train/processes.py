"""Processes: the cores that they may use, `multiprocessing`'s fork server, the name of the node."""

import multiprocessing
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from multiprocessing.context import ForkServerContext
from pathlib import Path

from clip_train.errors import RankError

# A socket's path has at most 107 bytes; `multiprocessing` adds /pymp-XXXXXXXX/listener-XXXXXXXX.
LONGEST_FOLDER = 107 - 32
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", f"/run/user/{os.getuid()}")


def fork_server() -> ForkServerContext:
    """The context for processes that must not be forked from this one: libraries' threads, clients
    of stores and CUDA do not survive it.

    Its sockets are in TMPDIR, or in a short folder if TMPDIR's path is too long for a socket.
    RankError if there is none.
    """
    config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    # the folder exists already if something else of `multiprocessing` needed one
    parent = os.path.dirname(config.get("tempdir") or "") or tempfile.gettempdir()
    if len(os.fsencode(parent)) > LONGEST_FOLDER:
        config["tempdir"] = folder = _short_folder()
        util.Finalize(None, shutil.rmtree, args=[folder, True], exitpriority=-100)
    return multiprocessing.get_context("forkserver")


def _short_folder() -> str:
    for place in SHORT_FOLDERS:
        try:
            return tempfile.mkdtemp(prefix="pymp-", dir=place)
        except OSError:
            continue
    there = tempfile.gettempdir()
    raise RankError(
        f"TMPDIR ({there}) has {len(os.fsencode(there))} bytes, and a socket's path allows "
        f"{LONGEST_FOLDER}; no file can be written to {', '.join(SHORT_FOLDERS)} either: set TMPDIR "
        "to a shorter path"
    )


def state_of(pid: int) -> str:
    """The state of a process, as `ps` shows it: T is stopped by a signal, t by a debugger. Empty if
    it has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[0]


def usable_cores(root: Path = Path("/")) -> int:
    """CPU cores that this process may use: its affinity, and a container's limit on CPU time
    (`docker --cpus`, Kubernetes' limits), which is a quota of its control group. At least 1.

    root: where /proc and /sys are.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _control_groups(root):
        cores = min(cores, _quota(folder))
    return max(1, int(cores))


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups that may limit the CPU, and of all above."""
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:  # "0::/path" of version 2, "4:cpu,cpuacct:/path" of version 1
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = mounted / controllers
        if controllers and not top.exists():
            top = mounted / "cpu"
        folder = top / path.lstrip("/")
        # in a container the path may be the host's, and the group itself is at the top
        while folder != top:
            yield folder
            folder = folder.parent
        yield top


def _quota(folder: Path) -> float:
    """Cores that the control group may use; infinite without a limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if quota not in ("max", "-1") else float("inf")
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")


def node_name() -> str:
    """As Slurm calls it inside a step; mpirun would copy the variable of the first node to all
    others."""
    in_step = "SLURM_STEP_NUM_TASKS" in os.environ
    return (os.environ.get("SLURMD_NODENAME") if in_step else None) or socket.gethostname()
