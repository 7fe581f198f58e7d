"""A rank's snapshot on its way from memory to the disk, hashed once. No torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import threading

from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import SaveRequest, in_parallel
from clip_train.checkpoint.manifest import BLOCK_BYTES, FileEntry
from clip_train.checkpoint.retention import check_space, free_bytes
from clip_train.storage.local import LocalStorage, open_own

_CHUNK = 4 << 20  # bytes written at a time
_HASHING_THREADS = 4


def write_snapshot(storage: LocalStorage, memory_fd: int, request: SaveRequest) -> FileEntry:
    """The first bytes of `memory_fd` as a file of the attempt, hashed on the way. CheckpointError, OSError."""
    check_space(
        storage.root, request.size, free_bytes(storage.root)
    )  # others may write to the same disk
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
    with open_own(path, "wb") as file:

        def copy(start: int) -> None:
            length = min(BLOCK_BYTES, size - start)
            pages = (
                -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
            )  # the memory has whole ones, and so takes the disk
            with (
                mmap.mmap(memory_fd, pages, prot=mmap.PROT_READ, offset=start) as block,
                memoryview(block) as view,
            ):
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
            fcntl.fcntl(
                fd, fcntl.F_SETFL, flags & ~os.O_DIRECT
            )  # it has other rules for what is aligned
