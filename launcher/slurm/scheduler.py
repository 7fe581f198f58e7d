"""Slurm's commands, as the batch script and `submit` use them."""

import os
import re
import shlex
import subprocess
from collections.abc import Sequence

NO_ARRAY = (
    "the tasks of a job array would all write the same run. To sweep seeds, submit one job for "
    "each: for s in 1 2 3; do clip-train submit RECIPE run.seed=$s run.name=NAME-$s; done, "
    "and run.dir=DIR-$s if the recipe sets it"
)
# Messages of Slurm's commands if slurmctld is unreachable or overloaded: the same request may work
# a moment later.
OUTAGE = re.compile(
    "Unable to contact|timed out|Zero Bytes|standby mode|temporarily unable|Connection "
    "(refused|reset)|Communication connection failure|Try again|Resource temporarily|configuration "
    # the last one is the message of `scontrol requeue` if slurmctld is unreachable
    "source|Unexpected message",
    re.IGNORECASE,
)


def slurm(*command: str, stdin: str = "") -> tuple[str, str]:
    """The output of one of Slurm's commands, and its error message. The output is empty if it
    failed."""
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            input=stdin,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return "", f"{shlex.join(command)}: {e}"
    if process.returncode:
        message = (process.stderr or process.stdout).strip()
        return "", message or f"status {process.returncode}"
    return process.stdout.strip(), ""


def answer(*command: str) -> str:
    """The output of a command; empty if it failed."""
    return slurm(*command)[0]


def update(job: str, **values: str) -> str:
    """Change these properties of the job. Returns Slurm's error message; empty if it succeeded."""
    properties = [f"{name}={value}" for name, value in values.items()]
    _, error = slurm("scontrol", "update", f"JobId={job}", *properties)
    return error


def field(job: str, name: str) -> str:
    """One property of a job, such as ExcNodeList; empty if the job does not have it."""
    text = answer("scontrol", "show", "job", job)
    match = re.search(rf"(?m)(?:^|\s){name}=(.*?)(?:\s[A-Z]\w*=|$)", text)
    return match[1].strip() if match and match[1] != "(null)" else ""


def exclude(job: str, nodes: Sequence[str]) -> tuple[bool, str]:
    """Add `nodes` to the excluded nodes of a pending job. Returns whether a node was added, and the
    error if it failed.

    `sbatch --test-only` checks that the job can still run, because Slurm itself would let it wait
    forever.
    """
    excluded = field(job, "ExcNodeList")
    known = answer("scontrol", "show", "hostnames", excluded).split() if excluded else []
    new = ",".join(node for node in nodes if node not in known)
    if not new:
        return False, ""
    excluded = f"{excluded},{new}" if excluded else new
    options = {
        "partition": os.environ.get("SLURM_JOB_PARTITION"),
        "account": os.environ.get("SLURM_JOB_ACCOUNT"),
        "qos": os.environ.get("SLURM_JOB_QOS"),
        "nodes": os.environ.get("SLURM_JOB_NUM_NODES"),
        "gpus-per-node": os.environ.get("SLURM_GPUS_PER_NODE"),
        "constraint": field(job, "Features"),
        "nodelist": field(job, "ReqNodeList"),
        "exclude": excluded,
    }
    line = [f"--{name}={value}" for name, value in options.items() if value]
    refused = slurm("sbatch", "--test-only", *line, "--wrap=true")[1]
    refused = refused or update(job, ExcNodeList=excluded)
    return not refused, " ".join(refused.split())
