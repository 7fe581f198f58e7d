"""Writing a snapshot to the local disk: room first, hashed on the way, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from clip_train.checkpoint import layout
from clip_train.checkpoint.layout import BLOCK_BYTES, FileEntry
from clip_train.checkpoint.order import Order
from clip_train.errors import CheckpointError
from clip_train.storage import LocalStorage

HEADROOM = 64 << 20  # bytes left free beside a checkpoint: manifests, and whoever else writes there
_CHUNK = 4 << 20  # bytes copied and hashed at a time: all the memory that writing takes


def free_bytes(folder: Path) -> int:
    """Free space on the disk of `folder`, which need not exist yet."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_space(folder: str | Path, needed: int, free: int) -> None:
    """CheckpointError when `needed` bytes will not fit into `free`."""
    if needed + HEADROOM > free:
        raise CheckpointError(
            f"not enough space for a checkpoint at {folder}: {needed / 1e9:.3f} GB needed "
            f"(and {HEADROOM / 1e9:.3f} GB to spare), {free / 1e9:.3f} GB free; make room, or lower "
            "checkpoint.keep_last"
        )


def write_snapshot(storage: LocalStorage, buffer: int, order: Order) -> FileEntry:
    """Copy the beginning of `buffer` (a file descriptor) into the attempt's folder. CheckpointError, OSError."""
    check_space(storage.root, order.size, free_bytes(storage.root))
    name = layout.rank_file(order.rank)
    staging = storage.root / "tmp"
    staging.mkdir(parents=True, exist_ok=True)
    local = staging / f"{order.prefix.replace('/', '+')}+{name}"
    try:
        sha256, blocks = copy_hashed(buffer, local, order.size)
        storage.put_file(local, f"{order.prefix}/{name}", move=True)
    finally:
        local.unlink(missing_ok=True)
    return FileEntry(name, order.size, sha256, order.rank, blocks)


def copy_hashed(fd: int, path: Path, size: int) -> tuple[str, list[str]]:
    """The first `size` bytes of `fd` into a new file, fsynced; its sha256, and that of each block. OSError.

    Read in pieces rather than mapped: pages of a mapping would count as this process's memory.
    """
    whole, blocks, block = hashlib.sha256(), [], hashlib.sha256()
    piece = memoryview(bytearray(_CHUNK))
    with path.open("wb", buffering=0) as f:
        at = 0
        while at < size:
            got = os.preadv(fd, [piece[: min(_CHUNK, size - at)]], at)
            if got == 0:
                raise OSError(f"the snapshot ends at byte {at} of {size}")
            data, rest = piece[:got], piece[:got]
            while rest:
                rest = rest[f.write(rest) :]
            whole.update(data)
            while data:
                room = BLOCK_BYTES - at % BLOCK_BYTES
                block.update(data[:room])
                at += len(data[:room])
                data = data[room:]
                if at % BLOCK_BYTES == 0 or at == size:
                    blocks.append(block.hexdigest())
                    block = hashlib.sha256()
        os.fsync(f.fileno())
    return whole.hexdigest(), blocks
