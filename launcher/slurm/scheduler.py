"""Slurm's commands, as the batch script uses them: of the job's nodes, its end, and which nodes it can do without."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence

ASKED = ("ReqNodeList", "ExcNodeList", "Features")  # of `scontrol show job`; without these nothing is known
UP = ("idle", "mixed", "allocated", "completing")


class NotLeftOut(Exception):
    """Why a job might wait for ever if it were to do without a node."""


def slurm(*command: str, timeout: float = 60) -> str | None:
    """Run one of Slurm's commands; None if it worked, else what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{shlex.join(command)}: {e}"
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip() or f"status {done.returncode}"


def answer(*command: str) -> str:
    """The output of one of Slurm's commands, empty where it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def node_names() -> list[str]:
    """Of this job."""
    nodelist = os.environ.get("SLURM_JOB_NODELIST", "")
    return expanded(nodelist) or [nodelist]


def expanded(nodelist: str) -> list[str]:
    """n[1-2] -> n1, n2; empty where Slurm does not answer."""
    return answer("scontrol", "show", "hostnames", nodelist).split()


def end_time(job: str) -> str:
    """Unix time of the job's time limit, empty where it has none."""
    text = answer("squeue", "-h", "-j", job, "-o", "%e").split("\n")[0]
    try:
        return str(int(time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))))
    except ValueError:
        return ""


def exclusion(job: str, bad: Sequence[str], nodes: Sequence[str], partition: str) -> str:
    """The ExcNodeList with which a waiting job does without `bad` too; empty where it does already.

    An update replaces the list, so what the user has excluded is part of it. nodes: of the last attempt; the next one
    needs as many of the same kind. NotLeftOut where there are none, or where that cannot be told: of a job that no
    node may run Slurm says nothing, it waits.
    """
    asked = asked_for(job)
    excluded = known(asked["ExcNodeList"])
    if set(bad) <= excluded:
        return ""
    by_name = known(asked["ReqNodeList"]) & set(bad)
    if by_name:  # Slurm would take it and then never start the job: BadConstraints
        raise NotLeftOut(f"the job asks for {', '.join(sorted(by_name))} by name")
    features = asked["Features"]
    if any(re.fullmatch(r"[\w.-]+", feature) is None for feature in features):
        raise NotLeftOut(f"the nodes of its constraint ({', '.join(sorted(features))}) cannot be counted")
    others = usable_nodes(partition, nodes, features) - excluded - set(bad)
    if len(others) < len(nodes):
        raise NotLeftOut(f"there are not {len(nodes)} others of the kind that the job may use")
    return ",".join([*sorted(asked["ExcNodeList"]), *sorted(set(bad) - excluded)])


def asked_for(job: str) -> dict[str, set[str]]:
    """What a job asks for in nodes, by the names of ASKED; several values for the tasks of an array."""
    told = answer("scontrol", "show", "job", job)
    found = {name: set(re.findall(rf"(?<!\S){name}=(\S+)", told)) for name in (*ASKED, "Reservation", "Contiguous")}
    if not all(found[name] for name in ASKED):
        raise NotLeftOut("scontrol does not tell what the job asks for")
    asked = {name: values - {"(null)"} for name, values in found.items()}
    if asked["Reservation"]:
        raise NotLeftOut(f"the job runs in the reservation {', '.join(sorted(asked['Reservation']))}")
    if asked["Contiguous"] - {"0"}:
        raise NotLeftOut("the job asks for contiguous nodes")
    return asked


def known(nodelists: set[str]) -> set[str]:
    """The names in them."""
    names = {nodelist: expanded(nodelist) for nodelist in nodelists}
    if not all(names.values()):
        raise NotLeftOut(f"scontrol does not tell the nodes of {', '.join(sorted(nodelists))}")
    return {name for each in names.values() for name in each}


def usable_nodes(partition: str, like: Sequence[str], features: set[str]) -> set[str]:
    """Names of a partition's nodes that are up, have these features, and the processors, memory, disk and GPUs of one
    of `like`: what runs there runs on them."""
    columns = answer("sinfo", "-h", "-N", "-p", partition, "-o", "%N %T %b %c %m %d %G").splitlines()
    rows = {row[0]: row for row in (line.split() for line in columns) if len(row) == 7}
    kinds = {tuple(rows[name][3:]) for name in like if name in rows}
    return {
        name
        for name, (_, state, active, *kind) in rows.items()
        if state in UP and tuple(kind) in kinds and features <= set(active.split(","))
    }
