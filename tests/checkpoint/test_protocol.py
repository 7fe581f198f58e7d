"""A crash, a pause or another process between two steps of the protocol.

No committed checkpoint is ever lost.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clip_train.checkpoint import commit
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manifest import CommitRef
from clip_train.checkpoint.retention import WriterSettings, apply_retention, commits_to_keep
from clip_train.storage.local import LocalStorage
from tests.checkpoint.eyes import damaged_in
from tests.checkpoint.parts import committed
from tests.checkpoint.runs import Run, assert_is


class Interrupted(LocalStorage):
    """Something happens just before a certain call, once."""

    def __init__(self, root: Path, call: str, name: str, event: Callable[[], None]) -> None:
        super().__init__(root)
        self.call, self.name, self.event = call, name, [event]

    def _now(self, call: str, name: str) -> None:
        if call == self.call and name.startswith(self.name) and self.event:
            self.event.pop()()

    def list(self, prefix: str = "", **more: bool) -> list:  # type: ignore[type-arg]
        self._now("list", prefix)
        return super().list(prefix, **more)

    def read_bytes(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self._now("read_bytes", name)
        return super().read_bytes(name, start, end)

    def delete(self, name: str) -> None:
        self._now("delete", name)
        super().delete(name)


def epoch_0(folder: Path, **settings: Any) -> WriterSettings:
    """Of the first process that wrote there."""
    token = json.loads((folder / "lease/e000000.json").read_bytes())["token"]
    held = commit.Lease(0, token)
    config = CheckpointConfig(**{"keep_last": 9, **settings})
    return WriterSettings(config, held, orphan_seconds=0.0)


@pytest.mark.parametrize("call,name", [("list", "ckpt"), ("delete", "commit")])
def test_zombie_in_retention_removes_nothing_of_its_successor(
    tmp_path: Path, call: str, name: str
) -> None:
    """It has listed the commits and asked for its lease, and then slept while another took over."""
    Run(tmp_path, keep_last=9).save(1, 2, 3)

    def takes_over() -> None:
        successor = Run(tmp_path)
        assert_is(successor.resume(), 3)
        successor.save(4, 5)
        under_way.parent.mkdir(parents=True)
        under_way.write_bytes(b"half")

    under_way = tmp_path / "ckpt/s0000000006/e000001-0123abcd/rank00000.safetensors"
    zombie = epoch_0(tmp_path, keep_last=2)
    apply_retention(Interrupted(tmp_path, call, name, takes_over), zombie, {})
    assert damaged_in(tmp_path) == [] and {4, 5} <= set(committed(tmp_path)) and under_way.exists()
    assert_is(Run(tmp_path).resume(), 5)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_lease_of_a_newer_version_stops_an_older_writer(tmp_path: Path, epoch: int) -> None:
    storage = LocalStorage(tmp_path)
    for _ in range(2):
        held = commit.acquire(storage)
    body = json.loads(storage.read_bytes(f"lease/e{held.epoch:06d}.json"))
    content = {**{k: v for k, v in body.items() if k != "sha256"}, "format": 99, "token": "theirs"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    sealed = json.dumps({**content, "sha256": hashlib.sha256(canonical).hexdigest()}).encode()
    (tmp_path / f"lease/e{epoch:06d}.json").write_bytes(sealed)
    with pytest.raises(commit.FencedError, match="of a newer clip-train, writes to"):
        commit.check_lease(storage, held)


def test_a_marker_that_the_listing_hides_keeps_its_data(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=9)
    run.save(1, 2, 3)

    class Hiding(LocalStorage):
        def list(self, prefix: str = "", **more: bool) -> list:  # type: ignore[type-arg]
            return [
                entry
                for entry in super().list(prefix, **more)
                if "commit/e000000-s0000000002" not in entry.name
            ]

    apply_retention(Hiding(tmp_path), epoch_0(tmp_path), {})
    assert damaged_in(tmp_path) == [] and set(committed(tmp_path)) == {1, 2, 3}


def test_the_best_is_one_that_is_there() -> None:
    refs = [CommitRef(0, step) for step in (5, 3, 2, 1)]
    for name, best in (("top1", 3), ("-loss", 1)):
        scores = {CommitRef(0, 4): 9.0, **dict(zip(refs[1:], (3.0, 2.0, 1.0), strict=True))}
        scores[CommitRef(0, 6)] = 0.0
        stay = commits_to_keep(
            refs, WriterSettings(CheckpointConfig(keep_last=1, keep_best=name)), scores
        )
        assert {ref.step for ref in stay} == {5, best}


def test_an_attempt_that_begins_during_retention_is_left_alone(tmp_path: Path) -> None:
    """An attempt of the same process: rank 1 may begin to write before rank 0's writer knows it."""
    Run(tmp_path, keep_last=9).save(1)
    attempts = ["ckpt/s0000000002/e000000-0123abcd", "ckpt/s0000000002/e000000-0123abce"]
    over = tmp_path / "ckpt/s0000000000/e000000-0123abcd/rank00000.safetensors"
    over.parent.mkdir(parents=True)
    over.write_bytes(b"given up")

    def begins() -> None:
        for attempt in attempts:
            (tmp_path / attempt).mkdir(parents=True)
            (tmp_path / attempt / "rank00001.safetensors").write_bytes(b"half")
        (tmp_path / attempts[0] / ".rank00000.safetensors.0123.part").write_bytes(b"half")

    storage = Interrupted(tmp_path, "list", "ckpt", begins)
    apply_retention(storage, epoch_0(tmp_path), {})
    assert len(list((tmp_path / "ckpt/s0000000002").glob("*/rank00001.safetensors"))) == 2
    assert len(list(tmp_path.rglob("*.part"))) == 1 and not over.exists()


def test_a_checkpoint_that_is_removed_while_it_is_chosen(tmp_path: Path) -> None:
    """By a process that still runs: there are newer ones, so this is no fresh start."""
    other, run = Run(tmp_path, keep_last=1), Run(tmp_path)
    other.save(1)
    run.manager.storage = Interrupted(tmp_path, "read_bytes", "commit/", lambda: other.save(2, 3))
    assert assert_is(run.resume(), 3).skipped == {}
    assert not any("FRESH" in line for line in run.said)


def test_what_another_process_left_goes_after_the_grace(tmp_path: Path) -> None:
    Run(tmp_path, keep_last=9).save(1)
    other = tmp_path / "ckpt/s0000000002/e000000-0123abcd/rank00000.safetensors"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"half")
    storage, settings = (
        LocalStorage(tmp_path),
        WriterSettings(CheckpointConfig(keep_last=9), commit.Lease(1, "")),
    )
    apply_retention(storage, settings, {})
    assert other.exists() and committed(tmp_path)
    os.utime(other, (time.time() - 3700,) * 2)
    apply_retention(storage, settings, {})
    assert not other.exists() and set(committed(tmp_path)) == {1}
    assert list(tmp_path.glob(".*")) == []


def test_a_manifest_that_flips_on_its_way_is_read_again(tmp_path: Path) -> None:
    """From a store whose client verifies nothing."""
    Run(tmp_path / "a").save(1)
    once = [True]

    class Flipping(LocalStorage):
        def read_bytes(self, name: str, start: int = 0, end: int | None = None) -> bytes:
            data = super().read_bytes(name, start, end)
            return (
                bytes([data[0] ^ 1]) + data[1:]
                if "MANIFEST" in name and once and once.pop()
                else data
            )

    found = commit.read_checkpoint(Flipping(tmp_path / "a"), CommitRef(0, 1))
    assert not once and found.manifest.step == 1
