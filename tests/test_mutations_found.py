"""Tests that faults of scripts/mutations.py asked for, because nothing else noticed them."""

from __future__ import annotations

import math
import queue
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_train import dist
from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import SaveRequest, acquire
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager, Saved
from clip_train.checkpoint.retention import WriterSettings
from clip_train.checkpoint.snapshot import SharedMemory, plan_file
from clip_train.checkpoint.writer import Event, Message, Writer
from clip_train.losses.info_nce import InfoNCE
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step
from clip_train.storage.local import LocalStorage
from tests.engine.layouts import engine_at
from tests.ranks import run_ranks
from tests.toy import ToyCLIP, share, toy_batch

TOO_HIGH = 4.9  # ln 100 is 4.605


def master_after_a_step(layout: str) -> float:
    def toy() -> ToyCLIP:
        torch.manual_seed(5)
        return ToyCLIP(logit_scale=TOO_HIGH)

    engine = engine_at(layout, toy, OptimConfig(name="sgd", lr=1e-4))
    batch = share(toy_batch(8), dist.rank(), dist.world_size())
    train_step(engine, batch, InfoNCE(), micro_size=4, kept_graphs=1, lr=1e-4)
    held = [f.tensors["param"].item() for f in engine.state_fragments() if f.name == "logit_scale"]
    engine.close()
    return held[0] if held else math.nan  # nan: another rank holds it


@pytest.mark.engine
@pytest.mark.parametrize("layout", ["zero 1", "zero 2", "zero 3", "fsdp 3"])
def test_the_master_copy_of_logit_scale_is_clamped(layout):
    """What the next step starts from, and what a checkpoint holds; the model's copy is overwritten by it."""
    held = [value for value in run_ranks(master_after_a_step, 2, layout) if not math.isnan(value)]
    assert held
    assert all(value <= math.log(100) + 1e-6 for value in held)


class Killed(BaseException):
    """As final as SIGKILL for what only catches Exception."""


class DyingStorage(LocalStorage):
    """What writes to it is killed at the write after `left` others."""

    left: int

    def put_bytes(self, *args: Any, **kwargs: Any) -> bool:
        self.count()
        return super().put_bytes(*args, **kwargs)

    def writing(self, name: str) -> Any:
        self.count()
        return super().writing(name)

    def count(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1


@pytest.mark.parametrize("writes", [0, 1, 2, 3, 4])
def test_a_save_killed_between_two_writes_damages_nothing(tmp_path: Path, writes: int):
    """The marker comes last. Random kills (checkpoint/test_kill.py) seldom hit the moment before it."""
    first = CheckpointManager(CheckpointConfig(), tmp_path)
    assert first.save(1, [], {}, {}, wait=True) is Saved.COMMITTED
    first.close()
    storage = DyingStorage(tmp_path)
    storage.left = writes
    plan = plan_file(0, [], {"rng": torch.zeros(3)})
    memory = SharedMemory()
    memory.reserve(plan.num_bytes).result()
    memory.fill(plan)
    held, messages = acquire(LocalStorage(tmp_path)), queue.SimpleQueue[Message]()
    settings = WriterSettings(CheckpointConfig(), held, str(tmp_path))
    writer = Writer(settings, memory.fd, messages.put)
    writer.local = storage
    prefix = manifest.attempt_prefix(1, 2)
    writer.receive(SaveRequest(2, prefix, 1, 0, 1, plan.num_bytes, plan.fragments, {}))
    ends = [messages.get(timeout=60.0).event for _ in range(2)]
    assert ends == [Event.WRITTEN, Event.FAILED]
    memory.close()
    resumed = CheckpointManager(CheckpointConfig(), tmp_path).resume()
    assert resumed is not None
    assert (resumed.step, resumed.skipped) == (1, {})
