"""One rank's snapshots on their way: to the disk, hashed once; to the remote store, one at a time, tried until it
succeeds or a newer save waits. No torch.
"""

from __future__ import annotations

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
from clip_train.storage import LocalStorage, Storage

_LONGEST_PAUSE = 60.0  # seconds between tries of an upload
_CHUNK = 1 << 20  # bytes hashed and then written while they are in the CPU's cache
_HASHING_THREADS = 4


@dataclass(frozen=True)
class Settings:
    """What a checkpoint writer is told at its start."""

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
    """The beginning of `memory_fd` as a file of the attempt, hashed on the way. CheckpointError, OSError."""
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

    A block is mapped for as long as it is copied: a mapping's pages count as this process's memory.
    """
    with open(path, "wb") as file:
        file.truncate(size)
        digests: dict[int, str] = {}

        def copy(start: int) -> None:
            length = min(BLOCK_BYTES, size - start)
            digest = hashlib.sha256()
            with mmap.mmap(memory_fd, length, prot=mmap.PROT_READ, offset=start) as block:
                view = memoryview(block)
                for at in range(0, length, _CHUNK):
                    with view[at : at + _CHUNK] as piece:
                        digest.update(piece)
                        done = 0
                        while done < len(piece):
                            done += os.pwrite(file.fileno(), piece[done:], start + at + done)
                view.release()
            digests[start] = digest.hexdigest()

        starts = range(0, size, BLOCK_BYTES)
        for _ in in_parallel(copy, starts, min(_HASHING_THREADS, os.cpu_count() or 1)):
            pass
    return [digests[start] for start in starts]


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
