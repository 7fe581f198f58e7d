"""Shards for the tests, written by Python's tarfile: of the package's code only their index."""

from __future__ import annotations

import functools
import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from PIL import Image

from clip_train.data.index import INDEX_NAME, ShardEntry, ShardIndex, index_of, to_bytes
from clip_train.data.reader import count_missing
from clip_train.storage.blocks import Checksums, block_sum
from clip_train.storage.config import StorageConfig


@functools.cache
def jpeg(number: int, size: int = 24) -> bytes:
    """A small image that differs from every other number's."""
    rng = np.random.default_rng(number)
    pixels = np.kron(rng.integers(0, 256, (3, 3, 3)), np.ones((size // 3, size // 3, 1))).astype(
        np.uint8
    )
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


def tar_bytes(members: list[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def sample(key: str, number: int) -> list[tuple[str, bytes]]:
    return [(f"{key}.jpg", jpeg(number)), (f"{key}.txt", f"caption {number}".encode())]


def write_shard(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.write_bytes(tar_bytes(members))
    return path


def write_dataset(folder: Path, sizes: list[int]) -> str:
    """Shards of so many samples each, with keys "s<shard>n<number>". Returns what `data.train` would say."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for shard, size in enumerate(sizes):
        members = []
        for i in range(size):
            members += sample(f"s{shard}n{i}", number)
            number += 1
        write_shard(folder / f"{shard:03d}.tar", members)
    return str(folder / "*.tar")


def write_counts(folder: Path, counts: dict[str, int]) -> None:
    """An index of the shards with these counts, right or wrong."""
    entries = {}
    for name, samples in counts.items():
        data = (folder / name).read_bytes()
        sums = Checksums(len(data), max(1, len(data)), block_sum(data))
        entries[name] = ShardEntry(samples, hashlib.sha256(data).hexdigest(), sums)
    (folder / INDEX_NAME).write_bytes(to_bytes(entries))


def counted(spec: str | Path, storage: StorageConfig | None = None) -> ShardIndex:
    """The index of shards, for a `ValLoader`."""
    storage = storage or StorageConfig()
    found = index_of(str(spec), "auto", storage, "data.val")
    return count_missing(found, storage, together=False)


def keys_in(folder: Path) -> set[str]:
    """All sample keys, as tarfile sees them."""
    keys = set()
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            keys |= {name.split(".")[0] for name in tar.getnames()}
    return keys


def shards_open_as(monkeypatch: pytest.MonkeyPatch, file_of: Callable[[bytes], BinaryIO]) -> None:
    """A disk that fails: whoever opens a shard from now on gets `file_of(its bytes)`."""
    real = Path.open

    def opened(path: Path, *args: Any, **more: Any) -> Any:
        if path.suffix != ".tar":
            return real(path, *args, **more)
        with real(path, "rb") as file:
            data = file.read()
        return file_of(data)

    monkeypatch.setattr(Path, "open", opened)
