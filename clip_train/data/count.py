"""Counts the samples of shards that no index knows, before the first step: all ranks together."""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from clip_train import dist
from clip_train.data.index import ShardIndex
from clip_train.data.reader import read_shard
from clip_train.data.shards import Reading
from clip_train.storage.config import StorageConfig
from clip_train.storage.redact import redact
from clip_train.storage.urls import is_remote, local_path, write_bytes

COUNT_BUFFER_BYTES = 1 << 12  # only headers are read: those of one sample
COUNT_THREADS = 8  # of a rank; they wait for the disk or the network
ROUND_SECONDS = 10.0  # then ranks exchange their counts


def count_missing(
    index: ShardIndex,
    storage: StorageConfig,
    *,
    keep: Path | None = None,
    together: bool = True,
    log: Callable[[str], None] = lambda line: None,
) -> ShardIndex:
    """The index with the counts of the shards that nobody has counted. DataError if one cannot be
    read.

    Args:
        keep: a file for the counts of each round: a run that is killed and started again continues
            from there. None: nothing is written.
        together: all ranks call this, each counts some of the shards. Else this process counts all
            of them.
        log: called by rank 0 with a line about every round of `ROUND_SECONDS` but the first.
    """
    ranks, rank = (dist.world_size(), dist.rank()) if together else (1, 0)
    counts: dict[str, int] = {}
    if rank == 0 and keep is not None:
        counts = _read_kept(keep, index.uncounted)
    if together:
        counts = dist.broadcast_object(counts)
    while True:
        todo = [url for url in index.uncounted if url not in counts]
        if not todo:
            return index.with_sizes(counts)
        if rank == 0 and counts:
            done = f"{len(counts)} of {len(counts) + len(todo)} shards are done"
            log(f"counting samples: {done}; `clip-train index` keeps the counts")
        count = partial(_count_some, todo[rank::ranks], storage)
        for some in dist.gather_objects(dist.agreed(count)) if together else [count()]:
            counts |= some
        if rank == 0 and keep is not None:
            rows = {redact(url): [_local_bytes(url), samples] for url, samples in counts.items()}
            with contextlib.suppress(OSError):  # without it the next start only takes longer
                write_bytes(keep, json.dumps(rows).encode())


def _count_some(urls: list[str], storage: StorageConfig) -> dict[str, int]:
    """Samples by path or URL, until the round is over. Damage counts as one; only headers are read.
    DataError."""

    def count(url: str) -> int:
        reading = Reading(storage)
        return sum(1 for _ in read_shard(url, reading, 0, math.inf, COUNT_BUFFER_BYTES))

    end = time.monotonic() + ROUND_SECONDS
    counts: dict[str, int] = {}
    with ThreadPoolExecutor(COUNT_THREADS) as pool:
        for start in range(0, len(urls), COUNT_THREADS):
            group = urls[start : start + COUNT_THREADS]
            counts |= zip(group, pool.map(count, group), strict=True)
            if time.monotonic() > end:
                break
    return counts


def _read_kept(keep: Path, wanted: list[str]) -> dict[str, int]:
    """What earlier starts have counted of these shards, if they are as long as they were."""
    try:
        rows = json.loads(keep.read_bytes())
    except (OSError, ValueError):
        return {}
    kept = {url: rows.get(redact(url), [-1, 0]) for url in wanted}
    return {url: samples for url, (size, samples) in kept.items() if size == _local_bytes(url)}


def _local_bytes(url: str) -> int | None:
    """None for a remote shard, or one that does not exist."""
    try:
        return None if is_remote(url) else os.stat(local_path(url)).st_size
    except OSError:
        return None
