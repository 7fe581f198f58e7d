"""A lab of hosts on this one machine, for the tiers `slurm` and `hosts`: up for the session, or skipped loudly."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

LOUD = "NO {} HERE, its tests do not run: "


def lacking() -> str | None:
    """What this machine lacks for hosts of its own, or None."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("apt-get") is None and (
        shutil.which("ip") is None or shutil.which("slurmctld") is None
    ):
        return "no iproute2 or Slurm, and no apt-get to install it"
    if subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], check=False).returncode:
        return "no namespaces allowed"
    return None


def call(setup: Path, *arguments: str | Path, timeout: float = 600, **environ: str) -> str:
    """One action of scripts/setup_*.sh; its output."""
    done = subprocess.run(
        [setup, *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(what: str, setup: Path) -> None:
    """What the tier's tests need, or they are skipped loudly. what: as the skip names it."""
    lack = lacking()
    if lack is None:
        with open("/run/lock/clip-train-lab", "w") as one_at_a_time:  # apt refuses a second one
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            installed = subprocess.run(
                [setup, "install"], capture_output=True, text=True, check=False, timeout=600
            )
        if installed.returncode:
            lack = f"apt-get failed: {installed.stderr[-300:]}"
    if lack is not None:
        pytest.skip(LOUD.format(what) + lack)


@contextlib.contextmanager
def lab(what: str, setup: Path, folder: Path, nodes: int, **environ: str) -> Iterator[Path]:
    """`folder` with the hosts up; all of it is gone afterwards. what: as the skip names it."""
    install(what, setup)
    try:
        call(setup, "up", folder, str(nodes), **environ)
        yield folder
    finally:
        call(setup, "down", folder)
