"""Files of a checkpoint as sources of bytes: on the local disk, or block by block from a remote store."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from clip_train.checkpoint.layout import BLOCK_BYTES, FileEntry
from clip_train.errors import CheckpointError
from clip_train.storage import Storage

PARALLEL_BLOCKS = 4  # fetched at a time by one rank: 64 MiB
_TRIES = 3  # of a block whose sha256 is wrong: the bit may have flipped on the way


class ByteSource(Protocol):
    """A file of which ranges are read."""

    where: str  # for messages
    size: int  # bytes

    def read(self, start: int, end: int) -> memoryview:
        """Bytes `[start, end)`. CheckpointError where they cannot be had."""
        ...


class LocalFile:
    """Mapped for as long as it is used, so retention may remove the file under it."""

    def __init__(self, path: Path) -> None:
        """CheckpointError where it cannot be read."""
        self.where = str(path)
        try:
            with path.open("rb") as f:
                self.size = os.fstat(f.fileno()).st_size
                # private: torch wants memory that it could write to
                self._map = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else b"")
        except OSError as e:
            raise CheckpointError(f"{path}: {type(e).__name__}: {e}") from e

    def read(self, start: int, end: int) -> memoryview:
        return self._map[start:end]


class RemoteFile:
    """Only the blocks that are asked for are fetched, each verified against the manifest."""

    def __init__(self, storage: Storage, name: str, entry: FileEntry) -> None:
        self.where, self.size = f"{storage.url}/{name}", entry.size
        self._storage, self._name, self._entry = storage, name, entry
        self._have: set[int] = set()
        with tempfile.TemporaryFile() as f:  # gone with this process
            f.truncate(max(entry.size, 1))
            self._map = memoryview(mmap.mmap(f.fileno(), max(entry.size, 1)))

    def read(self, start: int, end: int) -> memoryview:
        if start < end:
            wanted = set(range(start // BLOCK_BYTES, math.ceil(end / BLOCK_BYTES))) - self._have
            with ThreadPoolExecutor(PARALLEL_BLOCKS) as pool:
                for i, data in zip(sorted(wanted), pool.map(self._fetch, sorted(wanted)), strict=True):
                    self._map[i * BLOCK_BYTES : i * BLOCK_BYTES + len(data)] = data
            self._have |= wanted
        return self._map[start:end]

    def _fetch(self, i: int) -> bytes:
        try:
            return fetch_block(self._storage, self._name, self._entry, i)
        except (OSError, DamagedBlockError) as e:
            raise CheckpointError(f"{self.where}: {e}") from e


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


def first_damage(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with a local file; None if nothing. OSError where that cannot be told."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as f:
            if os.fstat(f.fileno()).st_size != entry.size:
                return f"{path} has {os.fstat(f.fileno()).st_size} bytes instead of {entry.size}"
            while chunk := f.read(4 << 20):
                digest.update(chunk)
                size += len(chunk)
    except FileNotFoundError:
        return f"{path} is missing"
    if digest.hexdigest() != entry.sha256:
        return f"{path} does not have its sha256: a byte has changed since it was written"
    return None


def download(storage: Storage, name: str, entry: FileEntry, target: Path) -> None:
    """The whole file, in parallel verified ranges, under another name until it is whole.

    DamagedBlockError; FileNotFoundError; OSError (the store's, or no space).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("wb") as f, ThreadPoolExecutor(PARALLEL_BLOCKS) as pool:

            def bring(i: int) -> None:
                data = fetch_block(storage, name, entry, i)
                os.pwrite(f.fileno(), data, i * BLOCK_BYTES)

            for _ in pool.map(bring, range(math.ceil(entry.size / BLOCK_BYTES))):
                pass
            f.flush()
            os.fsync(f.fileno())
        if not entry.blocks and (why := first_damage(part, entry)):
            raise DamagedBlockError(why)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
