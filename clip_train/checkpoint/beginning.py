"""Before a run's first save: the right to write, what may be removed, and whether the ranks share the disk."""

from __future__ import annotations

import time

from clip_train import dist
from clip_train.checkpoint import lease
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.layout import CommitRef
from clip_train.checkpoint.order import explain
from clip_train.checkpoint.retention import Policy
from clip_train.errors import CheckpointError
from clip_train.storage import LocalStorage, Storage


def take_lease(main: Storage, others: list[Storage], resume: str) -> lease.Lease:
    """Collective: the next one; who had the last may write no more. resume: `checkpoint.resume`. CheckpointError."""

    def take() -> lease.Lease:
        try:
            return lease.acquire(main, others, resume=resume)
        except OSError as e:
            raise CheckpointError(f"checkpoints cannot be written to {main.url}: {explain(e)}") from e

    return dist.on_main(take)


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
    """Collective: rank 0 leaves a file; whoever does not see it has another disk."""
    if dist.world_size() == 1:
        return True
    name = f".seen-{time.time_ns()}"
    token = dist.on_main(lambda: storage.put_bytes(name, b"") and name)
    seen = all(dist.gather_objects(storage.path(str(token)).exists()))
    if dist.is_main():
        storage.delete(name)
    return seen
