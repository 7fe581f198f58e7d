"""Who may write.

Every writer takes the next epoch; one whose epoch is no longer the highest may not commit.
"""

import contextlib
import os
import socket
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import NamedTuple

from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import (
    DamagedError,
    FencedError,
    list_commits,
    read_small,
    writable,
)
from clip_train.storage.base import Storage


class Lease(NamedTuple):
    """The right to write."""

    epoch: int
    token: str  # unique to the process that took it


NO_LEASE = Lease(0, "")


def epochs(storage: Storage) -> list[int]:
    """The epochs of all leases, ascending. OSError."""
    matches = [manifest.LEASE_NAME.fullmatch(entry.name) for entry in storage.list("lease")]
    return sorted(int(match[1]) for match in matches if match)


def acquire(storage: Storage, others: Sequence[Storage] = ()) -> Lease:
    """Take the epoch after all that `storage` and `others` know; each of several racers gets its
    own.

    The lease is also written to `others`, where a process that is cut off from `storage` sees it.
    CheckpointError for a store that cannot be written to.
    """
    taken = [-1]
    with writable(storage):
        for each in (storage, *others):
            taken += [*epochs(each), *(ref.epoch for ref in list_commits(each))]
    epoch = max(taken) + 1
    body = {
        "token": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    while True:
        name, data = manifest.lease_name(epoch), manifest.add_checksum({**body, "epoch": epoch})
        with writable(storage):
            got = storage.put_bytes(name, data, if_absent=True)
        if got:
            for each in others:
                with contextlib.suppress(OSError):
                    each.put_bytes(name, data)
            return Lease(epoch, str(body["token"]))
        epoch += 1


def check(storage: Storage, held: Lease) -> None:
    """FencedError if another process has taken a higher epoch; OSError.

    On a server that ignores If-None-Match another process may have taken the same epoch: the token
    tells.
    """
    epoch = max([held.epoch, *epochs(storage)])
    who, token = "another process", held.token
    try:
        holder = read_small(storage, manifest.lease_name(epoch), manifest.parse_checked)
        token = holder["token"]
        who = f"process {holder['pid']} on {holder.get('host')} since {holder.get('since')}"
    except (DamagedError, KeyError):
        pass
    except manifest.FormatError:
        who, token = "another process, of a newer clip-train,", ""
    except OSError:
        if epoch == held.epoch:
            raise
    if epoch > held.epoch or token != held.token:
        raise FencedError(
            f"{who} writes to {storage.url} now (its epoch is {epoch}, this process's is "
            f"{held.epoch}), so this one may not commit there any more: stop one of the two, or "
            "give them different run.name and checkpoint.remote"
        )
