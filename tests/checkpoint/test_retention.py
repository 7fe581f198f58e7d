"""What is removed beside old checkpoints."""

from __future__ import annotations

import errno
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import acquire
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manifest import Commit, CommitRef
from clip_train.checkpoint.retention import WriterSettings, apply_retention, remove_leftovers
from clip_train.storage.base import Storage
from clip_train.storage.errors import DeniedError
from clip_train.storage.local import LocalStorage
from tests.checkpoint.runs import Run


def attempt(step: int, name: str, epoch: int = 0) -> str:
    return f"ckpt/s{step:010d}/e{epoch:06d}-{name * 8}"


def marker_of(epoch: int, step: int, prefix: str) -> bytes:
    return manifest.add_checksum(asdict(Commit(epoch, step, prefix, "0" * 64)))


def test_leftovers_of_earlier_processes_are_removed(tmp_path: Path) -> None:
    """Files written or fetched before go; saves under way and committed ones stay."""
    storage = LocalStorage(tmp_path)
    committed_there, left, under_way = attempt(1, "a"), attempt(2, "b"), attempt(3, "c", epoch=1)
    marker = CommitRef(0, 1).name
    storage.put_bytes(marker, marker_of(0, 1, committed_there))
    for prefix in (committed_there, left, under_way):
        storage.put_bytes(f"{prefix}/rank00001.safetensors", b"1")
        storage.put_bytes(f"{manifest.FETCHED}{prefix}/rank00000.safetensors", b"1")
    remove_leftovers(storage, 1)
    names = {entry.name for entry in [*storage.list("ckpt"), *storage.list("tmp")]}
    assert names == {
        f"{place}/rank0000{rank}.safetensors"
        for prefix in (committed_there, under_way)
        for rank, place in ((1, prefix), (0, manifest.FETCHED + prefix))
    }
    assert storage.exists(marker)
    for parent in ("", manifest.FETCHED):  # no empty folders either
        assert not storage.path(parent + left).parent.exists()


def test_what_unfinished_writes_left_goes_with_its_attempt(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    left = tmp_path / attempt(7, "b", epoch=3) / ".rank00000.safetensors.0123.part"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    leases = [acquire(storage) for _ in range(25)]
    prefix = attempt(1, "a", epoch=24)
    storage.put_bytes(f"{prefix}/rank00000.safetensors", b"1")
    storage.put_bytes(CommitRef(24, 1).name, marker_of(24, 1, prefix))
    settings = WriterSettings(CheckpointConfig(keep_last=1), leases[-1], orphan_seconds=0.0)
    apply_retention(storage, settings, {})
    assert not left.parent.exists()


class Elsewhere(Storage):
    """As a remote store: not a disk."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.url = LocalStorage(folder), "s3://bucket/run"

    def read_bytes(self, *args: Any) -> bytes:
        return self.disk.read_bytes(*args)

    def list(self, *args: Any) -> list:  # type: ignore[type-arg]
        return self.disk.list(*args)

    def size(self, name: str) -> int:
        return self.disk.size(name)

    def put_file(self, *args: Any) -> None:
        self.disk.put_file(*args)

    def put_bytes(self, *args: Any, **options: bool) -> bool:
        return self.disk.put_bytes(*args, **options)

    def delete(self, *names: str) -> None:
        self.disk.delete(*names)


def committed(storage: LocalStorage, step: int) -> str:
    """The folder of a checkpoint of epoch 0."""
    prefix = attempt(step, "a")
    storage.put_bytes(f"{prefix}/rank00000.safetensors", b"1")
    storage.put_bytes(CommitRef(0, step).name, marker_of(0, step, prefix))
    return prefix


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of files that cannot be removed: they are in use on NFS, or immutable."""
    names: set[str] = set()
    unlink = os.unlink

    def stays(path: os.PathLike[str] | str, **options: Any) -> None:
        if Path(path).name in names:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", stays)
    return names


def test_a_file_that_cannot_be_removed_keeps_nothing_else(tmp_path: Path, stuck: set[str]) -> None:
    """A file in use, an immutable marker, a folder that is a link to another disk."""
    storage = LocalStorage(tmp_path / "run")
    lease = acquire(storage)
    folders = [committed(storage, step) for step in range(1, 6)]
    in_use, marker = folders[0], CommitRef(0, 2).name
    (storage.path(in_use) / ".nfs0001").touch()
    stuck |= {".nfs0001", Path(marker).name}
    moved = storage.path(folders[2]).rename(tmp_path / "other disk")
    storage.path(folders[2]).symlink_to(moved)
    settings = WriterSettings(CheckpointConfig(keep_last=1), lease)
    failures = apply_retention(storage, settings, {})
    assert set(failures) == {in_use, marker} and "busy" in failures[in_use]
    left = [folder for folder in folders if os.path.lexists(storage.path(folder))]
    assert left == [in_use, folders[1], folders[4]] and moved.exists()
    assert [path.name for path in storage.path(in_use).iterdir()] == [".nfs0001"]
    stuck.clear()
    assert apply_retention(storage, settings, {}) == {}
    assert [folder for folder in folders if storage.path(folder).exists()] == [folders[4]]


def test_leftovers_that_cannot_be_removed_keep_nothing_else(
    tmp_path: Path, stuck: set[str]
) -> None:
    storage = LocalStorage(tmp_path)
    prefixes = [attempt(step, "a") for step in (1, 2, 3)]
    for prefix in prefixes:
        storage.put_bytes(f"{prefix}/rank00000.safetensors", b"1")
    (storage.path(prefixes[0]) / ".nfs0001").touch()
    stuck.add(".nfs0001")
    assert set(remove_leftovers(storage, 1)) == {prefixes[0]}
    assert [storage.path(prefix).exists() for prefix in prefixes] == [True, False, False]


def test_a_denied_removal_in_a_store_keeps_nothing_else(tmp_path: Path) -> None:
    class Locked(Elsewhere):
        """One object is under a legal hold."""

        def delete_tree(self, prefix: str) -> None:
            if prefix == held:
                raise DeniedError(f"deleting {prefix}: HTTP 403 AccessDenied")
            super().delete_tree(prefix)

    disk = LocalStorage(tmp_path)
    lease = acquire(disk)
    held, *others = [committed(disk, step) for step in range(1, 5)]
    settings = WriterSettings(CheckpointConfig(keep_last=1), lease)
    assert set(apply_retention(Locked(tmp_path), settings, {})) == {held}
    assert [disk.list(prefix) != [] for prefix in others] == [False, False, True]


def test_the_user_reads_once_what_could_not_be_removed(tmp_path: Path) -> None:
    """A marker that a folder has replaced: the warning names it, and comes once for all saves."""
    run = Run(tmp_path, keep_last=1)
    run.save(1)
    marker = tmp_path / CommitRef(0, 1).name
    marker.unlink()
    (marker / "inside").mkdir(parents=True)
    run.save(2, 3, 4)
    warnings = [line for line in run.said if "could not be removed" in line]
    assert len(warnings) == 1, run.said
    assert "s0000000001" in warnings[0] and "remove it by hand" in warnings[0]
    steps = sorted(path.name for path in (tmp_path / "ckpt").iterdir())
    assert steps == ["s0000000001", "s0000000004"]
