"""Slurm's commands, as the batch script and `submit` use them."""

import re
import shlex
import subprocess

NO_ARRAY = (
    "the tasks of a job array would all write the same run. To sweep seeds, submit one job for "
    "each: for s in 1 2 3; do clip-train submit RECIPE run.seed=$s run.name=NAME-$s; done"
)
# What Slurm's commands print if slurmctld is away or overloaded: the same request may work in a
# moment.
OUTAGE = re.compile(
    "Unable to contact|timed out|Zero Bytes|standby mode|temporarily unable|Connection "
    "(refused|reset)|Communication connection failure|Try again|Resource temporarily|configuration "
    "source"
    "|Unexpected message",  # which `scontrol requeue` makes of a controller that is away
    re.IGNORECASE,
)


def slurm(*command: str) -> tuple[str, str]:
    """The output of one of Slurm's commands, empty where it failed, and then its error message."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return "", f"{shlex.join(command)}: {e}"
    if done.returncode:
        return "", (done.stderr or done.stdout).strip() or f"status {done.returncode}"
    return done.stdout.strip(), ""


def answer(*command: str) -> str:
    """The output of a command, empty where it failed."""
    return slurm(*command)[0]
