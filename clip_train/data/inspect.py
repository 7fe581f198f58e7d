"""Reading whole shards before a run: making their index, and counting their samples.

Each shard is read once: by one of several processes of `clip-train index`, or by one of the ranks that count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from clip_train import dist
from clip_train.data import decode, index
from clip_train.data.index import ShardEntry, ShardIndex
from clip_train.data.reader import read_shard
from clip_train.data.shards import Reading, open_shard, split_name
from clip_train.data.tar import TarError, iter_samples
from clip_train.errors import DataError
from clip_train.storage.blocks import BlockFile, Checksums, block_sum
from clip_train.storage.config import StorageConfig
from clip_train.storage.redact import redact
from clip_train.storage.urls import is_remote, local_path, open_read, write_bytes

BLOCK_BYTES = 4 << 20
OUT_OF_ORDER = "members out of order"
COUNT_BUFFER_BYTES = 1 << 12  # only headers are read: those of one sample
COUNT_THREADS = 8  # of a rank; they wait for the disk or the network
ROUND_SECONDS = 10.0  # then ranks exchange what they have counted


@dataclass(frozen=True)
class Indexed:
    """The result of reading one shard."""

    entry: ShardEntry
    invalid: Counter[str]  # reason -> samples that cannot be used, as far as seen without decoding
    names: tuple[str, ...]  # of the first sample's members, and `json.x` for the keys of its .json


class HashedFile(BlockFile):
    """Passes a file on and hashes all of it, in order, on the way."""

    def __init__(self, url: str, file: BinaryIO, block_bytes: int) -> None:
        super().__init__(url, file.seek(0, 2), block_bytes)
        self._file = file
        self._sums: list[str] = []
        self._sha256 = hashlib.sha256()

    def finish(self) -> tuple[Checksums, str]:
        """Hashes what has not been read; (the blocks' sums, the whole file's sha256)."""
        if self.size:
            self._load(-(-self.size // self.block_bytes) - 1)
        return Checksums(self.size, self.block_bytes, "".join(self._sums)), self._sha256.hexdigest()

    def _load(self, block: int) -> bytes:
        data = b""
        for number in range(min(block, len(self._sums)), block + 1):  # skipped blocks too
            begin, end = self.bounds(number)
            self._file.seek(begin)
            data = self._file.read(end - begin)
            if len(data) != end - begin:
                raise OSError(
                    f"{self.url}: {len(data)} of {end - begin} bytes at {begin}; is it being written?"
                )
            if number == len(self._sums):
                self._sums.append(block_sum(data))
                self._sha256.update(data)
        return data


def index_shard(
    url: str, caption_key: decode.CaptionKey = None, block_bytes: int = BLOCK_BYTES
) -> Indexed:
    """One shard's entry. A damaged archive is counted up to its damage, which the entry names.

    caption_key: as `data.caption_key`; only decides which samples are invalid.

    Raises:
        DataError: it cannot be read.
    """
    samples, offsets, damage = 0, array("Q"), None
    invalid: Counter[str] = Counter()
    seen: set[str] = set()
    names: list[str] = []
    try:
        with open_shard(url) as file:
            hashed = HashedFile(url, file, block_bytes)
            try:
                for sample in iter_samples(hashed):  # type: ignore[arg-type]
                    reason = decode.why_invalid(sample, caption_key)
                    if reason is not None:
                        invalid[OUT_OF_ORDER if sample.key in seen else reason] += 1
                    seen.add(sample.key)
                    if not samples:
                        keys = decode.metadata(sample.members)
                        names = [*sample.members, *(f"json.{key}" for key in keys)]
                    samples += 1
                    if samples % index.OFFSET_EVERY == 0:
                        offsets.append(sample.end)
            except TarError as e:
                damage = str(e)
            checksums, sha256 = hashed.finish()
    except OSError as e:
        raise DataError(f"cannot index {url}: {type(e).__name__}: {e}") from e
    entry = ShardEntry(samples, sha256, checksums, damage, offsets)
    return Indexed(entry, invalid, tuple(names))


def index_shards(
    urls: list[str],
    *,
    caption_key: decode.CaptionKey = None,
    block_bytes: int = BLOCK_BYTES,
    workers: int = 2,
    progress: Callable[[str], None] = lambda url: None,
) -> dict[str, Indexed]:
    """The contents of all shards, read by `workers` processes (1: by this one). DataError if one cannot be read.

    progress: called with each shard as it is done.
    """
    read = partial(index_shard, caption_key=caption_key, block_bytes=block_bytes)
    todo = list(dict.fromkeys(urls))
    workers = min(workers, len(todo))
    indexed: dict[str, Indexed] = {}
    with contextlib.ExitStack() as stack:
        results: Iterable[Indexed] = map(read, todo)
        if workers > 1:
            context = multiprocessing.get_context(
                "forkserver"
            )  # file systems do not survive a fork
            context.set_forkserver_preload([__name__])
            pool = ProcessPoolExecutor(workers, mp_context=context)
            stack.callback(pool.shutdown, cancel_futures=True)
            results = pool.map(read, todo)
        try:
            for url, result in zip(todo, results, strict=True):
                indexed[url] = result
                progress(url)
        except BrokenProcessPool as e:
            raise DataError(
                "an indexing process died; if memory ran out (see dmesg), use fewer --workers"
            ) from e
    return indexed


def try_folders(urls: Iterable[str]) -> None:
    """Before hours of reading: can each folder's index be added to? It is written as it is, or empty if there is none.

    Raises:
        UserError: an index that is there is damaged.
        OSError: a folder cannot be written.
    """
    for folder in dict.fromkeys(split_name(url)[0] for url in urls):
        write_bytes(folder + index.INDEX_NAME, index.to_bytes(index.load(folder, StorageConfig())))


def write_indexes(
    found: Mapping[str, Indexed], *, overwrite_sizes: bool = False
) -> tuple[list[str], list[str]]:
    """Our index in every folder, with what it knew of other shards, and its counts as sizes.json.

    overwrite_sizes: into a sizes.json too that says anything else than the index that was there.

    Returns:
        The indexes' paths; and those of sizes.json that were left as another tool has written them.

    Raises:
        UserError: an index that is there is damaged.
        OSError: a folder cannot be written.
    """
    storage = StorageConfig()
    written, left = [], []
    for folder, names in index.by_folder(list(found)).items():
        then = index.load(folder, storage)
        merged = then | {name: found[url].entry for name, url in names.items()}
        sizes = folder + index.SIZES_NAME
        counts = _counts(merged)
        if _content(sizes) in (None, _as_json(_counts(then)), _as_json(counts)):
            write_bytes(sizes, _as_json(counts))
        elif overwrite_sizes:
            write_bytes(sizes, _as_json(index.load_counts(sizes, storage) | counts))
        else:
            left.append(sizes)
        write_bytes(folder + index.INDEX_NAME, index.to_bytes(merged))
        written.append(folder + index.INDEX_NAME)
    return written, left


def _counts(entries: Mapping[str, ShardEntry]) -> dict[str, int]:
    return {name: entry.count for name, entry in entries.items()}


def _as_json(counts: Mapping[str, int]) -> bytes:
    return (json.dumps(counts, indent=1, sort_keys=True) + "\n").encode()


def _content(url: str) -> bytes | None:
    try:
        with open_read(url) as file:
            return file.read()
    except FileNotFoundError:
        return None


def differences(then: ShardEntry | None, now: ShardEntry) -> str | None:
    """How a shard differs from its index; None if it does not."""
    if then is None:
        return "is not in the index"
    if then.checksums.size != now.checksums.size:
        return f"has {now.checksums.size} bytes, the index says {then.checksums.size}"
    if then.sha256 == now.sha256:
        return None
    size = then.checksums.block_bytes
    blocks = range(-(-then.checksums.size // size))
    other = [k for k in blocks if then.checksums.of(k) != now.checksums.of(k)]
    return f"differs in {len(other)} blocks of {size} bytes, the first at byte {other[0] * size}"


def count_missing(
    index: ShardIndex,
    storage: StorageConfig,
    *,
    keep: Path | None = None,
    together: bool = True,
    log: Callable[[str], None] = lambda line: None,
) -> ShardIndex:
    """The index with the counts of the shards that nobody has counted. DataError if one cannot be read.

    Args:
        keep: a file for the counts of each round: a run that is killed and started again continues from there.
            None: nothing is written.
        together: all ranks call this, each counts some of the shards. Else this process counts all of them.
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
    """Samples by path or URL, until the round is over. Damage counts as one; only headers are read. DataError."""

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
