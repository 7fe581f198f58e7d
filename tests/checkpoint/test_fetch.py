"""Fetching a checkpoint onto a disk that has what earlier fetches have left."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager, Saved
from clip_train.errors import CheckpointError
from clip_train.storage.local import LocalStorage
from tests import warm
from tests.checkpoint.parts import cut, whole


def manager(root: Path, disk: str) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(remote=str(root / "store")), root / disk)


def save_one(root: Path) -> None:
    first = manager(root, "old")
    padding = {"padding": torch.zeros(5_000_000)}  # more than a block
    saved = first.save(1, cut(whole(1), 0, 1), padding, {"step": 1}, wait=True)
    assert saved is Saved.COMMITTED
    first.close()


class Deadly(LocalStorage):
    """A store in whose second answer the process is killed."""

    answers = 0

    def read_bytes(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self.answers += end is not None
        if self.answers >= 2:  # several threads count
            os._exit(9)
        return super().read_bytes(name, start, end)


def killed_while_it_fetches(root: Path) -> None:
    doomed = manager(root, "new")
    doomed.remote = Deadly(root / "store")
    doomed.resume()


def test_what_a_killed_fetch_has_left_is_used_by_the_next(tmp_path: Path) -> None:
    save_one(tmp_path)
    for _ in range(2):
        process = warm.process(killed_while_it_fetches, tmp_path)
        process.start()
        process.join()
        assert process.exitcode == 9
        assert (
            len(list((tmp_path / "new").rglob("*.safetensors"))) <= 1
        )  # however often it is killed
        assert not (tmp_path / "new/commit").exists()
    resumed = manager(tmp_path, "new").resume()
    assert resumed is not None and resumed.step == 1
    (fetched,) = (tmp_path / "new").rglob("*.safetensors")
    (stored,) = (tmp_path / "store").rglob("*.safetensors")
    assert fetched.read_bytes() == stored.read_bytes()


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
            CheckpointError,
            match=f"cannot write {re.escape(str(tmp_path / 'new'))}/.*No space left.*free space",
        ):
            manager(tmp_path, "new").resume()
    assert manager(tmp_path, "new").resume() is not None
