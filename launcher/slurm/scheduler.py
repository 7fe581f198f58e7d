"""Slurm's commands, as the batch script and `submit` use them."""

from __future__ import annotations

import contextlib
import datetime
import os
import shlex
import subprocess


def slurm(*command: str) -> tuple[str, str]:
    """The output of one of Slurm's commands, empty where it failed, and then its error message."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return "", f"{shlex.join(command)}: {e}"
    if done.returncode:
        return "", (done.stderr or done.stdout).strip() or f"status {done.returncode}"
    return done.stdout.strip(), ""


def answer(*command: str) -> str:
    """The output of a command, empty where it failed."""
    return slurm(*command)[0]


def node_names() -> list[str]:
    """Of this job."""
    nodelist = os.environ.get("SLURM_JOB_NODELIST", "")
    return answer("scontrol", "show", "hostnames", nodelist).split() or [nodelist]


def end_time(job: str) -> str:
    """Unix time of the job's time limit, empty where it has none."""
    with contextlib.suppress(ValueError):
        shown = answer("squeue", "-h", "-j", job, "-o", "%e").split("\n")[0]
        return str(int(datetime.datetime.fromisoformat(shown).timestamp()))
    return ""
