"""One rank's snapshots on their way: to the disk, hashed once; to the remote store, one at a time, tried until it
succeeds or a newer save waits. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import (
    FencedError,
    RefusedError,
    SaveRequest,
    explain,
    in_parallel,
    put_rank_manifest,
)
from clip_train.checkpoint.manifest import BLOCK_BYTES, FileEntry
from clip_train.checkpoint.retention import Policy, check_space, free_bytes
from clip_train.errors import CheckpointError
from clip_train.storage.base import Storage
from clip_train.storage.local import LocalStorage

_LONGEST_PAUSE = 60.0  # seconds between tries of an upload
_CHUNK = 4 << 20  # bytes written at a time
_HASHING_THREADS = 4


@dataclass(frozen=True)
class Settings:
    """The first message to a checkpoint writer."""

    folder: str
    remote: str | None
    local_commits: bool  # all ranks see `folder`
    timeout_seconds: float
    policy: Policy

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "policy": self.policy.to_json()}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Settings:
        return cls(**{**body, "policy": Policy.from_json(body["policy"])})


def write_snapshot(storage: LocalStorage, memory_fd: int, request: SaveRequest) -> FileEntry:
    """The first bytes of `memory_fd` as a file of the attempt, hashed on the way. CheckpointError, OSError."""
    check_space(storage.root, request.size, free_bytes(storage.root))
    name = manifest.rank_file(request.rank)
    staged = storage.path(manifest.staged_name(request.prefix, name))
    staged.parent.mkdir(parents=True, exist_ok=True)
    try:
        blocks = copy_hashed(memory_fd, staged, request.size)
        storage.put_file(staged, f"{request.prefix}/{name}", move=True)  # which fsyncs it
    finally:
        staged.unlink(missing_ok=True)
    return FileEntry(name, request.size, blocks, request.rank)


def copy_hashed(memory_fd: int, path: os.PathLike[str], size: int) -> list[str]:
    """The first `size` bytes into a new file; the sha256 of each block, a few blocks at a time. OSError.

    A block is mapped for as long as it is copied: a mapping's pages count as this process's memory. Where the disk
    takes it so, it is written past the page cache, which costs less and leaves the cache to the training data. One
    thread writes at a time: the kernel lets others spin for the file, on cores that training needs.
    """
    digests: dict[int, str] = {}
    writing = threading.Lock()
    with open(path, "wb", buffering=0) as file:

        def copy(start: int) -> None:
            length = min(BLOCK_BYTES, size - start)
            pages = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE  # the memory has whole ones, and so takes the disk
            with mmap.mmap(memory_fd, pages, prot=mmap.PROT_READ, offset=start) as block, memoryview(block) as view:
                with writing:
                    _write(file.fileno(), view, start)
                with view[:length] as content:
                    digests[start] = hashlib.sha256(content).hexdigest()

        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        starts = range(0, size, BLOCK_BYTES)
        for _ in in_parallel(copy, starts, min(_HASHING_THREADS, os.cpu_count() or 1)):
            pass
        file.truncate(size)
    return [digests[start] for start in starts]


def _write(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done : done + _CHUNK], at + done)
        except OSError as e:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if e.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # it has other rules for what is aligned


class Uploads:
    """The queue of the remote store, in which at most one save waits behind the one under way."""

    def __init__(self) -> None:
        self._requests: list[SaveRequest] = []  # the one under way, and the newest that waits
        self._woken = self._finishing = False
        self._changed = threading.Condition()

    def put(self, request: SaveRequest) -> SaveRequest | None:
        """Returns the one whose place it takes."""
        with self._changed:
            superseded = self._requests.pop() if len(self._requests) > 1 else None
            self._requests.append(request)
            self._changed.notify_all()
        return superseded

    def wake(self, finish: bool = False) -> None:
        with self._changed:
            self._woken, self._finishing = True, self._finishing or finish
            self._changed.notify_all()

    def next(self) -> SaveRequest | None:
        """Waits for one, which is under way until `remove`d; None after `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: self._requests or self._woken)
            self._woken = False
            return self._requests[0] if self._requests else None

    def remove(self, request: SaveRequest) -> None:
        with self._changed:
            self._requests.remove(request)

    def newer(self, timeout: float) -> SaveRequest | None:
        """The save that waits; waits up to `timeout` seconds for one."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._requests) > 1, timeout)
            return self._requests[1] if len(self._requests) > 1 else None

    def finished(self) -> bool:
        with self._changed:
            return self._finishing and not self._requests


def upload(
    request: SaveRequest,
    local: LocalStorage,
    remote: Storage,
    commit: Callable[[Storage, SaveRequest], None],
    *,
    newer: Callable[[float], SaveRequest | None],
    note: Callable[[str], None],
    timeout_seconds: float,
) -> None:
    """File and rank manifest, on rank 0 the commit too. FencedError, RefusedError.

    newer: waits up to so many seconds for a save that is newer. note: takes what a user should read.
    """
    assert request.entry is not None
    uploaded, tries = False, 0
    while True:
        tries += 1
        try:
            if not uploaded:
                name = f"{request.prefix}/{request.entry.name}"
                remote.put_file(local.path(name), name)
                put_rank_manifest(remote, request)
                uploaded = True
            if request.rank == 0:
                commit(remote, request)
            return
        except (FencedError, RefusedError):
            raise
        except (OSError, CheckpointError) as e:
            why = explain(e)
        pause = min(2.0**tries, _LONGEST_PAUSE)
        if time.monotonic() + pause > request.since + timeout_seconds:
            raise RefusedError(f"{why}; given up after {tries} tries")
        next_one = newer(0.0)
        if next_one is None:
            note(f"checkpoint of step {request.step}: {why}; trying again in {pause:.0f} s")
            next_one = newer(pause)
        if next_one is not None:
            raise RefusedError(f"{why}; superseded by step {next_one.step}")
