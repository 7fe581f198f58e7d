"""Slurm's commands, as the batch script and `submit` use them."""

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

NO_ARRAY = (
    "the tasks of a job array would all write the same run. To sweep seeds, submit one job for "
    "each: for s in 1 2 3; do clip-train submit RECIPE run.seed=$s run.name=NAME-$s; done, "
    "and run.dir=DIR-$s if the recipe sets it"
)
# Messages of Slurm's commands if slurmctld is unreachable or overloaded: the same request may work
# a moment later.
OUTAGE_MESSAGES = (
    "Unable to contact",
    "timed out",
    "Zero Bytes",
    "standby mode",
    "temporarily unable",
    "Connection (refused|reset)",
    "Communication connection failure",
    "Try again",
    "Resource temporarily",
    "configuration source",
    # of `scontrol requeue` if slurmctld is unreachable
    "Unexpected message",
)
OUTAGE = re.compile("|".join(OUTAGE_MESSAGES), re.IGNORECASE)


class CommandResult(NamedTuple):
    """What a command printed."""

    output: str  # without surrounding blanks; empty if the command failed
    error: str  # its error message; empty if it succeeded


class Exclusion(NamedTuple):
    """The result of `exclude`."""

    added: bool  # whether a node was added to the excluded ones
    error: str  # why none could be added; empty if there was no error


def run_command(*command: str, stdin: str = "") -> CommandResult:
    """Run a command, usually one of Slurm's, for at most a minute."""
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
        return CommandResult("", f"{shlex.join(command)}: {e}")
    if process.returncode:
        message = (process.stderr or process.stdout).strip()
        return CommandResult("", message or f"status {process.returncode}")
    return CommandResult(process.stdout.strip(), "")


def update(job: str, **values: str) -> str:
    """Change these properties of the job. Returns Slurm's error message; empty if it succeeded."""
    properties = [f"{name}={value}" for name, value in values.items()]
    return run_command("scontrol", "update", f"JobId={job}", *properties).error


def field(job: str, name: str) -> str:
    """One property of a job, such as ExcNodeList; empty if the job does not have it."""
    properties = run_command("scontrol", "show", "job", job).output
    # a value ends before the next property or at the end of its line
    match = re.search(rf"(?m)(?:^|\s){name}=(.*?)(?:\s[A-Z]\w*=|$)", properties)
    if match is None or match[1] == "(null)":
        return ""
    return match[1].strip()


def exclude(job: str, nodes: Sequence[str]) -> Exclusion:
    """Add `nodes` to the excluded nodes of a pending job.

    `sbatch --test-only` checks that the job can still run, because Slurm itself would let it wait
    forever.
    """
    excluded = field(job, "ExcNodeList")
    known: list[str] = []
    if excluded:
        # "node[1-3]" becomes a name on each line
        known = run_command("scontrol", "show", "hostnames", excluded).output.split()
    new = ",".join(node for node in nodes if node not in known)
    if not new:
        return Exclusion(added=False, error="")
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
    error = run_command("sbatch", "--test-only", *line, "--wrap=true").error
    if not error:
        error = update(job, ExcNodeList=excluded)
    return Exclusion(added=not error, error=" ".join(error.split()))
