"""Before a run's first save: the right to write, what may be removed, and whether the ranks share the disk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from clip_train import dist
from clip_train.checkpoint import lease
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.layout import CommitRef
from clip_train.checkpoint.marks import readable
from clip_train.checkpoint.order import explain
from clip_train.checkpoint.retention import Policy
from clip_train.errors import CheckpointError
from clip_train.storage import LocalStorage, Storage

T = TypeVar("T")


def take_lease(main: Storage, others: list[Storage], resume: str) -> lease.Lease:
    """Collective: the next one; who had the last may write no more. resume: `checkpoint.resume`. CheckpointError."""
    return dist.on_main(lambda: _writable(main, lambda: lease.acquire(main, others, resume=resume)))


def _writable(storage: Storage, action: Callable[[], T]) -> T:
    try:
        return action()
    except OSError as e:
        raise CheckpointError(f"checkpoints cannot be written to {storage.url}: {explain(e)}") from e


def policy_of(config: CheckpointConfig, held: lease.Lease, protect: set[CommitRef], damaged: set[CommitRef]) -> Policy:
    return Policy(
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        orphan_grace_seconds=60 * config.orphan_grace_minutes,
        epoch=held.epoch,
        token=held.token,
        protect=protect,
        damaged=damaged,
    )


def all_ranks_see(storage: LocalStorage) -> bool:
    """Collective: rank 0 leaves a file; whoever does not see it has another disk. CheckpointError, on all ranks."""
    if dist.world_size() == 1:
        return True
    name = str(dist.broadcast_object(f".seen-{time.time_ns()}"))
    dist.on_main(lambda: _writable(storage, lambda: storage.put_bytes(name, b"")))
    try:
        return all(dist.gather_objects(dist.agreed(lambda: readable(storage, lambda disk: disk.exists(name)))))
    finally:
        if dist.is_main():
            with contextlib.suppress(OSError):  # of this rank alone
                storage.delete(name)
