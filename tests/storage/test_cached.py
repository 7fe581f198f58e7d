"""Copies of shards on the local disk: what happens to them there. `memory://` is the store.

tests/s3/test_reader.py has the rest.
"""

from __future__ import annotations

import hashlib
import resource
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from clip_train.storage.blocks import SUM_DIGITS, Checksums
from clip_train.storage.config import StorageConfig
from clip_train.storage.urls import open_read

BLOCK = 1 << 18
DATA = bytes(range(256)) * 4096  # 1 MiB
ONCE = StorageConfig(attempts=2).model_copy(update={"backoff_seconds": 0.01, "range_bytes": BLOCK})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FSSPEC_SIMPLECACHE_CACHE_STORAGE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    system, path = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}/0.tar"
    system.pipe(path, DATA)
    yield f"simplecache::memory:/{path}"
    system.rm(path)


def read(url: str, expected: bytes | None = None) -> bytes:
    """expected: what the index has."""
    sums = None
    if expected is not None:
        starts = range(0, len(expected), BLOCK)
        blocks = [hashlib.sha256(expected[start : start + BLOCK]).hexdigest() for start in starts]
        sums = Checksums(len(expected), BLOCK, "".join(digest[:SUM_DIGITS] for digest in blocks))
    with open_read(url, ONCE, sums) as file:
        return file.read()


def only(folder: Path) -> Path:
    (copy,) = (path for path in folder.iterdir() if not path.suffix)
    return copy


def test_a_copy_that_is_not_whole_is_made_again(url: str, folder: Path) -> None:
    """As a power cut leaves it: the name is there, and not all bytes are."""
    assert read(url) == DATA
    for size in (0, 300_000):
        with only(folder).open("r+b") as copy:
            copy.truncate(size)
        assert read(url) == DATA
        assert only(folder).read_bytes() == DATA


def test_a_copy_that_the_disk_has_damaged_is_made_again(url: str, folder: Path) -> None:
    """If the store's file is damaged too, it is copied once more, and not for every attempt."""
    assert read(url, DATA) == DATA
    with only(folder).open("r+b") as copy:
        copy.seek(400_000)
        copy.write(b"damaged")
    assert read(url, DATA) == DATA
    assert only(folder).read_bytes() == DATA
    with pytest.raises(OSError, match=r"the content has changed since the index was made"):
        read(url, DATA[::-1])


def test_a_copy_that_is_removed_while_it_is_read_is_made_again(url: str, folder: Path) -> None:
    with open_read(url, ONCE) as file:
        assert file.read(10) == DATA[:10]
        only(folder).unlink()
        assert file.read() == DATA[10:]


def test_a_full_disk_is_named(url: str, folder: Path) -> None:
    """And what was copied until then takes no space."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, before[1]))
    try:
        with pytest.raises(
            OSError,
            match=rf"memory:.*attempt 1 of 2: it cannot be copied to {folder}: .*; make room there.*FSSPEC_SIMPLE",
        ):
            read(url)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.stat().st_size for path in folder.iterdir()] == [0]
    assert read(url) == DATA


def test_a_folder_that_cannot_be_made_is_named(url: str, folder: Path) -> None:
    folder.write_bytes(b"")
    with pytest.raises(
        OSError, match=r"cannot be copied to .*: Not a directory; .* name another folder"
    ):
        read(url)


def test_a_file_of_the_same_size_is_copied_anew(url: str, folder: Path) -> None:
    """Without an ETag, by the time of its last change."""
    assert read(url) == DATA
    fsspec.filesystem("memory").pipe(url.partition(":/")[2].removeprefix(":/"), DATA[::-1])
    assert read(url) == DATA[::-1]
