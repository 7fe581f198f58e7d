"""Fetching a checkpoint onto a disk that has what earlier fetches have left."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path

import pytest

from clip_train.checkpoint import CheckpointConfig, CheckpointManager
from clip_train.errors import CheckpointError
from clip_train.storage import LocalStorage
from tests import warm
from tests.checkpoint.parts import committed, cut, whole


def manager(root: Path, disk: str) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(remote=str(root / "store")), root / disk)


def save_one(root: Path) -> None:
    first = manager(root, "old")
    assert first.save(1, cut(whole(1), 0, 1), {}, {"step": 1}, wait=True)
    first.close()


class Deadly(LocalStorage):
    """A store in whose first answer the process is killed."""

    def read_range(self, name: str, start: int, end: int) -> bytes:
        os._exit(9)


def killed_while_it_fetches(root: Path) -> None:
    doomed = manager(root, "new")
    doomed.remote = Deadly(root / "store")
    doomed.resume()


def test_what_killed_fetches_have_left_goes_before_the_next(tmp_path: Path) -> None:
    save_one(tmp_path)
    for _ in range(2):
        process = warm.process(killed_while_it_fetches, tmp_path)
        process.start()
        process.join()
        assert process.exitcode == 9
        (abandoned,) = (tmp_path / "new").rglob(".rank*.part")  # the one before has gone
    abandoned_token = abandoned.name.split(".")[-2]
    age, token = time.time() - 4000, f"{'0' * 12}-1-"
    theirs, long_ago, mine = (
        abandoned.with_name(f".rank00000.safetensors.{name}.part")
        for name in (f"{token}a", f"{token}b", abandoned_token.replace(f"-{process.pid}-", f"-{os.getpid()}-"))
    )
    for path in (theirs, long_ago, mine):
        path.write_bytes(b"half")
    os.utime(long_ago, (age, age))
    resumed = manager(tmp_path, "new").resume()
    assert resumed is not None and resumed.step == 1 and set(committed(tmp_path / "new")) == {1}
    # of a process that runs on another machine, and of one that runs here
    assert set((tmp_path / "new").rglob(".*.part")) == {theirs, mine}


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_disk_that_fills_up_is_not_taken_for_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    save_one(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(
            CheckpointError, match=f"the disk is full at {re.escape(str(tmp_path / 'new'))}, .*make room"
        ):
            manager(tmp_path, "new").resume()
    assert not list((tmp_path / "new").rglob(".*.part"))
    assert manager(tmp_path, "new").resume() is not None
