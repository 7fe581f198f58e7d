"""Slurm's commands, as the batch script and `submit` use them."""

from __future__ import annotations

import os
import shlex
import subprocess
import time


def slurm(*command: str) -> str | None:
    """Run one of Slurm's commands; None if it worked, else its error message."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{shlex.join(command)}: {e}"
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip() or f"status {done.returncode}"


def answer(*command: str) -> str:
    """The output of a command, empty where it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def node_names() -> list[str]:
    """Of this job."""
    nodelist = os.environ.get("SLURM_JOB_NODELIST", "")
    return answer("scontrol", "show", "hostnames", nodelist).split() or [nodelist]


def end_time(job: str) -> str:
    """Unix time of the job's time limit, empty where it has none."""
    text = answer("squeue", "-h", "-j", job, "-o", "%e").split("\n")[0]
    try:
        return str(int(time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))))
    except ValueError:
        return ""
