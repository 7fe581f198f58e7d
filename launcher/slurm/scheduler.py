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
    "source"
    "|Unexpected message",  # which `scontrol requeue` makes of a controller that is away
    re.IGNORECASE,
)


def slurm(*command: str, stdin: str = "") -> tuple[str, str]:
    """The output of one of Slurm's commands, and its error message. The output is empty if it
    failed."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            input=stdin,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return "", f"{shlex.join(command)}: {e}"
    if done.returncode:
        return "", (done.stderr or done.stdout).strip() or f"status {done.returncode}"
    return done.stdout.strip(), ""


def answer(*command: str) -> str:
    """The output of a command; empty if it failed."""
    return slurm(*command)[0]


def update(job: str, **values: str) -> str:
    """Empty if Slurm has changed these properties of the job, else its error message."""
    return slurm("scontrol", "update", f"JobId={job}", *(f"{k}={v}" for k, v in values.items()))[1]


def field(job: str, name: str) -> str:
    """One property of a job, such as ExcNodeList; empty where there is none."""
    found = re.search(
        rf"(?m)(?:^|\s){name}=(.*?)(?:\s[A-Z]\w*=|$)", answer("scontrol", "show", "job", job)
    )
    return found[1].strip() if found and found[1] != "(null)" else ""


def exclude(job: str, nodes: Sequence[str]) -> tuple[bool, str]:
    """Add `nodes` to the excluded nodes of a pending job. Returns whether this was new, and why it
    failed.

    `sbatch --test-only` checks that the job can still run, because Slurm itself would let it wait
    forever.
    """
    before = field(job, "ExcNodeList")
    known = answer("scontrol", "show", "hostnames", before).split() if before else []
    new = [node for node in nodes if node not in known]
    if not new:
        return False, ""
    excluded = ",".join([*filter(None, [before]), *new])
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
