"""A process that saves to the store and resumes from it, as the tests of this folder lead it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager, Saved
from clip_train.checkpoint.restore import Resumed
from tests.checkpoint.parts import bits, cut, whole
from tests.s3.bucket import Bucket

RUNS: list[Run] = []


class Run:
    """One process's life on one machine's disk."""

    def __init__(
        self, folder: Path, url: str, *, orphan_seconds: float = 0.0, **config: Any
    ) -> None:
        self.said: list[str] = []
        config = {
            "grace_seconds": 240.0,
            "remote": url,
            "max_failed_saves": 9,
            **config,
        }
        self.manager = CheckpointManager(
            CheckpointConfig(**config),
            folder,
            log=self.said.append,
            orphan_seconds=orphan_seconds,
        )
        self.folder = folder
        RUNS.append(self)

    def save(self, step: int, *, wait: bool = True, padding: int = 0) -> bool:
        own = {
            "rng": torch.full((4,), step % 256, dtype=torch.uint8),
            "padding": torch.zeros(padding),
        }
        saved = self.manager.save(
            step, cut(whole(step), 0, 1), own, {"step": step, "cursors": {"0": step}}, wait=wait
        )
        return saved in (Saved.COMMITTED, Saved.UNDER_WAY)

    def resume(self) -> Resumed | None:
        return self.manager.resume()

    def hurry(self) -> None:
        """Do not wait for what will not come."""
        self.manager.config = self.manager.config.model_copy(update={"grace_seconds": 0.5})

    def until(self, condition: Callable[[], bool], seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.said
            self.manager.poll()
            time.sleep(0.01)


def assert_is(resumed: Resumed | None, step: int) -> Resumed:
    assert resumed is not None and (resumed.step, resumed.state["cursors"]) == (
        step,
        {"0": step},
    ), resumed
    for (name, slot), tensor in whole(step).items():
        assert bits(resumed.reader.read(name, slot, 0, tensor.numel())) == bits(tensor)
    assert (
        resumed.rank_tensors is not None
        and resumed.rank_tensors["rng"].tolist() == [step % 256] * 4
    )
    return resumed


def data_key(view: Bucket, step: int) -> str:
    (key,) = [key for key in view.keys(f"run/ckpt/s{step:010d}/") if key.endswith(".safetensors")]
    return key
