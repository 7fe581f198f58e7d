"""Counts the samples of shards that no index knows, before the first step: all ranks together."""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from clip_train import dist
from clip_train.data.index import ShardIndex
from clip_train.data.reader import read_shard
from clip_train.data.shards import Reading
from clip_train.storage.config import StorageConfig

COUNT_BUFFER_BYTES = 1 << 12  # only headers are read: those of one sample
COUNT_THREADS = 8  # of a rank; they wait for the disk or the network
ROUND_SECONDS = 10.0  # then ranks exchange their counts


def count_missing(
    index: ShardIndex,
    storage: StorageConfig,
    *,
    together: bool = True,
    log: Callable[[str], None] = lambda line: None,
) -> ShardIndex:
    """The index with the counts of the shards that nobody has counted. DataError if one cannot be
    read.

    Args:
        together: all ranks call this, each counts some of the shards. Else this process counts all
            of them.
        log: called by rank 0 with a line about every round of `ROUND_SECONDS` but the first.
    """
    ranks, rank = (dist.world_size(), dist.rank()) if together else (1, 0)
    counts: dict[str, int] = {}
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
