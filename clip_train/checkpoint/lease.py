"""Who may write. Every writer takes the next epoch; one whose epoch is no longer the highest may not commit."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone

from clip_train.checkpoint import layout, marks
from clip_train.errors import CheckpointError
from clip_train.storage import Storage


class FencedError(CheckpointError):
    """Another process has taken over this run's checkpoints."""


def epochs(storage: Storage) -> list[int]:
    """Of all leases, ascending. OSError."""
    found = (layout.parse_lease(entry.name) for entry in storage.list("lease"))
    return sorted(epoch for epoch in found if epoch is not None)


def acquire(storage: Storage, others: Sequence[Storage] = ()) -> int:
    """Take the epoch after all that are known to `storage` and to `others`; of several racers each gets its own.

    OSError; CheckpointError for a store in which nothing can be kept.
    """
    taken = [-1]
    for each in (storage, *others):
        taken += epochs(each)
        taken += [ref.epoch for ref in marks.list_commits(each)]
    epoch = max(taken) + 1
    body = {
        "token": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    for candidate in range(epoch, epoch + 1000):
        if storage.put_bytes(layout.lease_name(candidate), layout.seal({**body, "epoch": candidate}), if_absent=True):
            return candidate
    raise CheckpointError(f"{storage.url}: no lease can be taken; {layout.lease_name(epoch)} and all after it exist")


def check(storage: Storage, epoch: int) -> None:
    """FencedError if somebody has taken a higher epoch than this; OSError."""
    higher = [each for each in epochs(storage) if each > epoch]
    if not higher and storage.exists(layout.lease_name(epoch + 1)):  # a listing may hide the newest
        higher = [epoch + 1]
    if not higher:
        return
    try:
        holder = marks.read_sealed(storage, layout.lease_name(higher[-1]))
        who = f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
    except (OSError, ValueError):
        who = "another process"
    raise FencedError(
        f"{who} writes to {storage.url} now (its epoch is {higher[-1]}, this process's is {epoch}), so this one may "
        "not commit there any more: stop one of the two, or give them different run.name and checkpoint.remote"
    )


def forget_old(storage: Storage, epoch: int, keep: int = 20) -> None:
    """Remove all but the newest leases, lest there be one for each requeue. OSError."""
    for old in [each for each in epochs(storage) if each < epoch][:-keep]:
        storage.delete(layout.lease_name(old))
