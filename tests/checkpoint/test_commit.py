"""How rank 0 learns that the others' parts are there."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import (
    NO_LEASE,
    FencedError,
    Lease,
    SaveFailedError,
    SaveRequest,
    acquire,
    commit_checkpoint,
    put_rank_manifest,
)
from clip_train.checkpoint.manifest import CommitRef, FileEntry
from clip_train.storage.base import Entry
from clip_train.storage.local import LocalStorage

WORLD_SIZE = 200


class Shop(LocalStorage):
    """Counts what is asked of it, and has the later half's manifests at the third look."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.looks, self.asked = 0, Counter[str]()
        self.third_look: Callable[[], None] = lambda: None

    def list(self, prefix: str = "") -> list[Entry]:
        self.looks += prefix.startswith("ckpt/")
        if self.looks == 3:
            self.third_look()
        return super().list(prefix)

    def read_bytes(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        if "/_rank" in name:
            self.asked[name] += 1
        return super().read_bytes(name, start, end)


def request(rank: int) -> SaveRequest:
    prefix, name = manifest.attempt_prefix(0, 7), f"rank{rank:05d}.safetensors"
    empty: dict[str, Any] = {"shapes": {}, "rows": [], "tensors": {}}
    out = SaveRequest(7, prefix, 0, rank, WORLD_SIZE, 3, empty, {"step": 7}, "now")
    out.entry = FileEntry(name, 3, ["0" * 64])
    return out


def put(storage: LocalStorage, ranks: range) -> None:
    for rank in ranks:
        storage.put_bytes(f"{request(rank).prefix}/rank{rank:05d}.safetensors", b"abc")
        put_rank_manifest(storage, request(rank))


def test_commit_reads_each_manifest_once_when_it_exists(tmp_path: Path) -> None:
    storage = Shop(tmp_path)
    held = acquire(storage)
    put(storage, range(100))
    storage.third_look = lambda: put(storage, range(100, WORLD_SIZE))
    commit_checkpoint(storage, request(0), held, 3600.0)
    assert storage.exists(CommitRef(0, 7).name) and len(storage.asked) == WORLD_SIZE
    assert storage.asked.total() == WORLD_SIZE  # each once, when it is there


def test_a_rank_whose_manifest_never_comes_is_named(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    put(storage, range(WORLD_SIZE - 1))
    with pytest.raises(
        SaveFailedError, match=f"no manifest of ranks {WORLD_SIZE - 1} under {tmp_path}"
    ):
        commit_checkpoint(storage, request(0), NO_LEASE, 3.0)
    assert not storage.exists(CommitRef(0, 7).name)


def test_another_ranks_error_is_named(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    put(storage, range(WORLD_SIZE - 1))
    put_rank_manifest(storage, request(WORLD_SIZE - 1), SaveFailedError("no space"))
    with pytest.raises(SaveFailedError, match=f"rank {WORLD_SIZE - 1}: no space"):
        commit_checkpoint(storage, request(0), NO_LEASE, 60.0)


@pytest.mark.parametrize("token, fenced", [("mine", False), ("theirs", True)])
def test_own_earlier_commit_marker_does_not_fence(tmp_path: Path, token: str, fenced: bool) -> None:
    """A checkpoint writer committed it, and died before it could say so; its rank has taken another snapshot since."""
    storage = LocalStorage(tmp_path)
    earlier = manifest.attempt_prefix(0, 7, 2)
    put(storage, range(WORLD_SIZE))
    marker = manifest.Commit(0, 7, earlier, "0" * 64, token)
    storage.put_bytes(CommitRef(0, 7).name, manifest.add_checksum(asdict(marker)))
    with pytest.raises(FencedError) if fenced else contextlib.nullcontext():
        where = commit_checkpoint(storage, request(0), Lease(0, "mine"), 60.0)
        assert where == f"{tmp_path}/{earlier}"
