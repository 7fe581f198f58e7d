"""Makes and checks shard indexes: each shard is read once, by one of several processes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from array import array
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import BinaryIO

from clip_train.data import index, raw
from clip_train.data.index import ShardEntry
from clip_train.data.sources import Reading, open_shard
from clip_train.data.tar import TarError, iter_samples
from clip_train.errors import DataError
from clip_train.storage import BlockFile, Checksums, StorageConfig, block_sum, open_read, write_bytes

BLOCK_BYTES = 4 << 20

Progress = Callable[[str, ShardEntry], None]  # after each shard


class HashedFile(BlockFile):
    """Passes a file on and hashes all of it, in order, on the way."""

    def __init__(self, url: str, file: BinaryIO, block_bytes: int) -> None:
        super().__init__(url, file.seek(0, 2), block_bytes)
        self._file = file
        self._sums: list[str] = []
        self._sha256 = hashlib.sha256()

    def finish(self) -> tuple[Checksums, str]:
        """Hashes what has not been read; (the blocks' sums, the whole file's sha256)."""
        blocks = -(-self.size // self.block_bytes)
        if blocks:
            self._load(blocks - 1)
        return Checksums(self.size, self.block_bytes, "".join(self._sums)), self._sha256.hexdigest()

    def _load(self, block: int) -> bytes:
        for number in range(len(self._sums), block):
            self._hash(self._read(number))
        data = self._read(block)
        if block == len(self._sums):
            self._hash(data)
        return data

    def _hash(self, data: bytes) -> None:
        self._sums.append(block_sum(data))
        self._sha256.update(data)

    def _read(self, block: int) -> bytes:
        begin, end = self.bounds(block)
        self._file.seek(begin)
        data = self._file.read(end - begin)
        if len(data) != end - begin:
            raise OSError(f"{self.url}: {len(data)} of {end - begin} bytes at {begin}; is it being written?")
        return data


def index_shard(
    url: str, caption_key: str | None = None, block_bytes: int = BLOCK_BYTES, storage: StorageConfig | None = None
) -> ShardEntry:
    """One shard's entry. A damaged archive is counted up to its damage, which the entry names.

    Raises:
        DataError: it cannot be read.
    """
    samples = unusable = 0
    marks = array("Q")
    damage = None
    try:
        with open_shard(url, Reading(storage or StorageConfig())) as file:
            hashed = HashedFile(url, file, block_bytes)
            try:
                for sample in iter_samples(hashed):  # type: ignore[arg-type]
                    usable = raw.check(sample, caption_key) is None
                    samples, unusable = samples + usable, unusable + (not usable)
                    if usable and samples % index.MARK_EVERY == 0:
                        marks.append(sample.end)
            except TarError as e:
                damage = str(e)
            checksums, sha256 = hashed.finish()
    except OSError as e:
        raise DataError(f"cannot index {url}: {type(e).__name__}: {e}") from e
    return ShardEntry(samples, unusable, caption_key, sha256, checksums, damage, marks)


def index_shards(
    urls: list[str],
    *,
    caption_key: str | None = None,
    block_bytes: int = BLOCK_BYTES,
    workers: int = 2,
    storage: StorageConfig | None = None,
    progress: Progress = lambda url, entry: None,
) -> dict[str, ShardEntry]:
    """The entries of all shards, read by `workers` processes (1: by this one). DataError where one cannot be read."""
    found: dict[str, ShardEntry] = {}
    todo = list(dict.fromkeys(urls))
    if min(workers, len(todo)) == 1:
        for url in todo:
            found[url] = index_shard(url, caption_key, block_bytes, storage)
            progress(url, found[url])
        return found
    context = multiprocessing.get_context("forkserver")  # file systems do not survive a fork
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(min(workers, len(todo)), mp_context=context) as pool:
        jobs = {pool.submit(index_shard, url, caption_key, block_bytes, storage): url for url in todo}
        try:
            for job in as_completed(jobs):
                found[jobs[job]] = job.result()
                progress(jobs[job], found[jobs[job]])
        except BrokenProcessPool as e:
            raise DataError("an indexing process died; if memory ran out (see dmesg), use fewer --workers") from e
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {url: found[url] for url in todo}


def try_folders(urls: Iterable[str], storage: StorageConfig | None = None) -> None:
    """Before hours of reading: can each folder's index be added to? It is written as it is, or empty if there is none.

    Raises:
        UserError: an index that is there is damaged.
        OSError: a folder cannot be written.
    """
    for folder in dict.fromkeys(index.split(url)[0] for url in urls):
        write_bytes(folder + index.INDEX_NAME, index.to_bytes(index.load(folder, storage or StorageConfig())))


def write_indexes(entries: Mapping[str, ShardEntry], storage: StorageConfig | None = None) -> list[str]:
    """sizes.json and our index in every folder, with what they knew of other shards. Returns the indexes' paths.

    Raises:
        UserError: an index that is there is damaged.
        OSError: a folder cannot be written.
    """
    storage = storage or StorageConfig()
    written = []
    for folder in dict.fromkeys(index.split(url)[0] for url in entries):
        own = {index.split(url)[1]: entry for url, entry in entries.items() if index.split(url)[0] == folder}
        merged = {**index.load(folder, storage), **own}
        sizes = {**_sizes(folder, storage), **{name: entry.samples for name, entry in merged.items()}}
        text = json.dumps(sizes, indent=1, sort_keys=True) + "\n"
        write_bytes(folder + index.SIZES_NAME, text.encode())
        write_bytes(folder + index.INDEX_NAME, index.to_bytes(merged))
        written.append(folder + index.INDEX_NAME)
    return written


def differences(then: ShardEntry | None, now: ShardEntry) -> str | None:
    """What of a shard is not what its index says; None where all is."""
    if then is None:
        return "is not in the index"
    if then.checksums.size != now.checksums.size:
        return f"has {now.checksums.size} bytes, the index says {then.checksums.size}"
    if then.sha256 != now.sha256:
        size = then.checksums.block_bytes
        if size != now.checksums.block_bytes:
            return "has another sha256"
        bad = [k for k in range(-(-then.checksums.size // size)) if then.checksums.of(k) != now.checksums.of(k)]
        return f"differs in {len(bad)} blocks of {size} bytes, the first at byte {bad[0] * size}" if bad else "sha256"
    if then.caption_key == now.caption_key and then.samples != now.samples:
        return f"has {now.samples} usable samples, the index says {then.samples}"
    return None


def _sizes(folder: str, storage: StorageConfig) -> dict[str, int]:
    """An older sizes.json, OpenCLIP's own perhaps; {} where there is none that can be read."""
    try:
        with open_read(folder + index.SIZES_NAME, storage) as file:
            found = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
