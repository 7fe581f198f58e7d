"""Who may write. Every writer takes the next epoch; one whose epoch is no longer the highest may not commit."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import FencedError, list_commits, read_checked
from clip_train.errors import CheckpointError, UserError
from clip_train.storage.base import Storage
from clip_train.storage.redact import redact


def epochs(storage: Storage) -> list[int]:
    """Of all leases, ascending. OSError."""
    found = (manifest.LEASE_NAME.fullmatch(entry.name) for entry in storage.list("lease"))
    return sorted(int(match[1]) for match in found if match)


ENDING_SECONDS = 10.0  # that the process of the last run on this machine may take to be gone


def slurm_job() -> str | None:
    """This Slurm job and how often it was requeued: `4711.2`."""
    job = os.environ.get("SLURM_JOB_ID")
    return job and f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"


class Lease(NamedTuple):
    """The right to write."""

    epoch: int
    token: str  # nobody else's


def acquire(storage: Storage, others: Sequence[Storage] = (), *, resume: str = "") -> Lease:
    """Take the epoch after all that are known to `storage` and to `others`; of several racers each gets its own.

    It is noted in `others` too, where they can be written to: who is cut off from `storage` sees it there.
    resume: the `checkpoint.resume` of this process, for `resume_of`.
    OSError; CheckpointError for a store in which nothing can be kept.
    """
    taken = [-1]
    for each in (storage, *others):
        taken += epochs(each)
        taken += [ref.epoch for ref in list_commits(each)]
    epoch = max(taken) + 1
    token = uuid.uuid4().hex
    body = {
        "token": token,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": started(os.getpid()),
        "job": slurm_job(),
        "resume": redact(resume),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    for candidate in range(epoch, epoch + 1000):
        name, data = (
            manifest.lease_name(candidate),
            manifest.add_checksum({**body, "epoch": candidate}),
        )
        if storage.put_bytes(name, data, if_absent=True):
            for each in others:
                with contextlib.suppress(OSError):
                    each.put_bytes(name, data)
            return Lease(candidate, token)
    raise CheckpointError(
        f"{storage.url}: no lease can be taken; {manifest.lease_name(epoch)} and all after it exist"
    )


def started(pid: int) -> str | None:
    """When a process of this machine began, in the kernel's ticks: another one may get its number later."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def living_holder(storage: Storage) -> dict[str, Any] | None:
    """Who holds the newest lease, where that is another process of this machine which still runs, and not one of this
    Slurm job's earlier attempts. OSError."""
    found = epochs(storage)
    try:
        holder = read_checked(storage, manifest.lease_name(found[-1])) if found else {}
    except (FileNotFoundError, ValueError, manifest.FormatError):
        return None
    if holder.get("host") != socket.gethostname() or holder.get("pid") in (None, os.getpid()):
        return None
    job = slurm_job()
    if (
        job is not None
        and holder.get("job") not in (None, job)
        and holder["job"].split(".")[0] == job.split(".")[0]
    ):
        return None
    return holder if holder.get("started") and started(holder["pid"]) == holder["started"] else None


def refuse_second_writer(storages: Sequence[Storage]) -> None:
    """UserError where another process of this machine writes there; one that is about to end may. OSError."""
    end = time.monotonic() + ENDING_SECONDS
    for storage in storages:
        while (holder := living_holder(storage)) is not None:
            if time.monotonic() > end:
                raise UserError(
                    f"process {holder['pid']} on this machine has been writing to {storage.url} since "
                    f"{holder['since']}: wait for its end, stop it (kill {holder['pid']}), give this run another "
                    "run.dir and checkpoint.remote, or take over from its last checkpoint with checkpoint.takeover=true"
                )
            time.sleep(0.2)


def resume_of(storage: Storage, epoch: int) -> str | None:
    """The `checkpoint.resume` of the process that took this epoch; None where nobody knows. OSError."""
    try:
        return read_checked(storage, manifest.lease_name(epoch)).get("resume")
    except (FileNotFoundError, ValueError, manifest.FormatError):
        return None


def check(storage: Storage, held: Lease) -> None:
    """FencedError if somebody has taken a higher epoch, or, where a server ignores If-None-Match, the same; OSError."""
    epoch = max([held.epoch, *epochs(storage)])
    who, token = "another process", held.token
    try:
        holder = read_checked(storage, manifest.lease_name(epoch))
        who, token = (
            f"process {holder['pid']} on {holder.get('host')} since {holder.get('since')}",
            holder["token"],
        )
    except (FileNotFoundError, ValueError, KeyError):
        pass
    except manifest.FormatError:
        who, token = "another process, of a newer clip-train,", ""
    except OSError:
        if epoch == held.epoch:
            raise
    if epoch > held.epoch or token != held.token:
        raise FencedError(
            f"{who} writes to {storage.url} now (its epoch is {epoch}, this process's is {held.epoch}), so this one "
            "may not commit there any more: stop one of the two, or give them different run.name and checkpoint.remote"
        )
