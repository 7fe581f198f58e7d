"""What is removed beside old checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import acquire
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manifest import Commit, CommitRef
from clip_train.checkpoint.retention import Policy, apply_retention, remove_leftovers
from clip_train.storage.local import LocalStorage


def attempt(step: int, name: str, epoch: int = 0) -> str:
    return f"ckpt/s{step:010d}/e{epoch:06d}-{name * 8}"


def marker_of(epoch: int, step: int, prefix: str) -> bytes:
    return manifest.add_checksum(asdict(Commit(epoch, step, prefix, "0" * 64)))


def test_a_disk_of_ones_own_is_cleared_of_what_earlier_processes_left(tmp_path: Path) -> None:
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
    assert storage.exists(marker) and not storage.path(left).parent.exists()


def test_what_unfinished_writes_left_goes_with_its_attempt(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    left = tmp_path / attempt(7, "b", epoch=3) / ".rank00000.safetensors.0123.part"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    leases = [acquire(storage) for _ in range(25)]
    prefix = attempt(1, "a", epoch=24)
    storage.put_bytes(f"{prefix}/rank00000.safetensors", b"1")
    storage.put_bytes(CommitRef(24, 1).name, marker_of(24, 1, prefix))
    policy = Policy(CheckpointConfig(keep_last=1, orphan_grace_minutes=0.0), leases[-1])
    apply_retention(storage, policy, {})
    assert not left.parent.exists()
