"""Files of a checkpoint as sources of bytes: on the local disk, or block by block from a remote store."""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from clip_train.checkpoint.layout import BLOCK_BYTES, FileEntry
from clip_train.checkpoint.shares import Ranges, Span, common, merged, num_blocks, without
from clip_train.errors import CheckpointError
from clip_train.storage import Storage

T = TypeVar("T")
PARALLEL_BLOCKS = 4  # fetched at a time by one rank: 64 MiB
_CHUNK = 4 << 20  # bytes hashed at a time
_TRIES = 3  # of a block whose sha256 is wrong: the bit may have flipped on the way


class ByteSource(Protocol):
    """A file of which ranges are read."""

    where: str  # for messages
    size: int  # bytes

    def read(self, start: int, end: int) -> memoryview:
        """Bytes `[start, end)`. CheckpointError where they cannot be had."""
        ...


class Spool:
    """Room on a disk for some of the bytes of a checkpoint's files. It has no name, so it goes with this process.

    One for all of them: there are as many files as there were ranks. folder: None: the system's temporary one.
    """

    def __init__(self, files: Sequence[FileEntry], folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._map = memoryview(b"")
        self.begin: list[int] = []  # where each file begins
        self._size = mmap.PAGESIZE
        for entry in files:
            self.begin.append(self._size)
            self._size += -(-entry.size // mmap.PAGESIZE) * mmap.PAGESIZE

    def open(self) -> tuple[int, memoryview]:
        """A file descriptor, and the same as memory. OSError."""
        with self._lock:
            if self._fd is None:
                if self._folder is not None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self._folder) as file:
                    file.truncate(self._size)  # takes room only where it is written to
                    self._map = memoryview(mmap.mmap(file.fileno(), self._size))
                    self._fd = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._fd)
        return self._fd, self._map


class SparseFile:
    """A file of which this rank has some ranges on its disk; what else is read comes from the store, in blocks."""

    def __init__(self, storage: Storage, name: str, entry: FileEntry, spool: Spool, begin: int) -> None:
        self.where, self.size = f"{storage.url}/{name}", entry.size
        self.storage, self.name, self.entry = storage, name, entry
        self.have: Ranges = []  # what `read` gives out at once
        self._spool, self._begin = spool, begin
        self._local: tuple[ByteSource, Ranges] | None = None

    def adopt(self, local: ByteSource, ranges: Ranges) -> None:
        """These ranges are whole in a local copy."""
        self._local = (local, ranges)
        self.have = merged([*self.have, *ranges])

    def put(self, start: int, data: bytes | memoryview) -> None:
        """Keep bytes; may be called from several threads at once, and `note` afterwards. OSError: no space."""
        write_at(self._spool.open()[0], data, self._begin + start)

    def note(self, ranges: Ranges) -> None:
        """They have been `put`."""
        self.have = merged([*self.have, *ranges])

    def sha256(self, size: int) -> str:
        """Of its first bytes, that have been `put`."""
        with open(self._spool.open()[0], "rb", closefd=False) as file:
            file.seek(self._begin)
            return sha256_of_next(file, size)

    def read(self, start: int, end: int) -> memoryview:
        asked = [(start, end)] if start < end else []
        if self._local is not None and common(asked, self._local[1]) == asked:
            return self._local[0].read(start, end)
        if without(asked, self.have):
            fetch_ranges([(self, asked)])
        for first, last in common(asked, self._local[1]) if self._local is not None else []:
            assert self._local is not None
            self.put(first, self._local[0].read(first, last))  # the range lies across
        return self._spool.open()[1][self._begin + start : self._begin + end]


def sparse_files(storage: Storage, prefix: str, files: Sequence[FileEntry], folder: Path | None) -> list[SparseFile]:
    """A checkpoint's, with none of their bytes yet."""
    spool = Spool(files, folder)
    return [
        SparseFile(storage, f"{prefix}/{entry.name}", entry, spool, begin)
        for entry, begin in zip(files, spool.begin, strict=True)
    ]


def write_at(fd: int, data: bytes | memoryview, start: int) -> None:
    """Not through a map, where a full disk would end the process. OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], start + done)


def fetch_ranges(wanted: Iterable[tuple[SparseFile, Ranges]]) -> None:
    """From the store, the blocks with what is wanted and not here; a few at a time, each verified. CheckpointError."""
    jobs = [
        (file, i)
        for file, ranges in wanted
        for i in sorted({i for a, b in without(ranges, file.have) for i in range(a // BLOCK_BYTES, num_blocks(b))})
    ]

    def bring(job: tuple[SparseFile, int]) -> None:
        file, i = job
        try:
            file.put(i * BLOCK_BYTES, fetch_block(file.storage, file.name, file.entry, i))
        except (OSError, DamagedBlockError) as e:
            raise CheckpointError(f"{file.where}: {e}") from e

    for file, i in in_parallel(bring, jobs):
        file.note([Span(0, i, i + 1).range(file.size)])


def in_parallel(action: Callable[[T], object], jobs: Sequence[T]) -> Iterator[T]:
    """Each job when it is done, in their order, PARALLEL_BLOCKS at a time; the first error ends it."""
    pool = ThreadPoolExecutor(PARALLEL_BLOCKS)
    try:
        for job, _ in zip(jobs, pool.map(action, jobs), strict=True):
            yield job
    finally:
        pool.shutdown(cancel_futures=True)


class DamagedBlockError(Exception):
    """The store holds other bytes than were written."""


def fetch_block(storage: Storage, name: str, entry: FileEntry, i: int) -> bytes:
    """Verified where the manifest has its sha256. DamagedBlockError; FileNotFoundError; OSError."""
    start, end = i * BLOCK_BYTES, min((i + 1) * BLOCK_BYTES, entry.size)
    for _ in range(_TRIES):
        data = storage.read_range(name, start, end)
        if not entry.blocks or hashlib.sha256(data).hexdigest() == entry.blocks[i]:
            return data
    raise DamagedBlockError(f"{name} does not have its sha256 in bytes {start} to {end}: one has changed since")


def wrong_size(path: Path, entry: FileEntry) -> str | None:
    """None where there is a file of the right size. OSError where that cannot be told."""
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return f"{path} is missing"
    return None if size == entry.size else f"{path} has {size} bytes instead of {entry.size}"


def first_damage(path: Path, entry: FileEntry, first: int = 0, end: int | None = None) -> str | None:
    """What is wrong with the blocks `[first, end)` of a local file; None if nothing. OSError where it cannot be told.

    A file of format 1 is read whole.
    """
    if (why := wrong_size(path, entry)) is not None:
        return why
    damaged = f"{path} does not have its sha256: a byte has changed since it was written"
    with path.open("rb") as f:
        if not entry.blocks:
            return None if sha256_of_next(f, entry.size) == entry.sha256 else damaged
        f.seek(first * BLOCK_BYTES)
        whole = all(sha256_of_next(f, BLOCK_BYTES) == told for told in entry.blocks[first:end])
        return None if whole else damaged


def sha256_of_next(file: BinaryIO, count: int) -> str:
    """Of the next `count` bytes, or of fewer at the file's end."""
    digest = hashlib.sha256()
    while count and (piece := file.read(min(count, _CHUNK))):
        digest.update(piece)
        count -= len(piece)
    return digest.hexdigest()
