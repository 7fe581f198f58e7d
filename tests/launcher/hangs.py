"""Code of a user's own that makes a rank hang, for recipes; each hang has another cause."""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from clip_train import dist
from clip_train.callbacks import Callback

STEP = 5  # the step after which it hangs
AWAY = "away"
SAMPLES = 200  # of rank 1, after which no more come


class SkipsACollective(Callback):
    """`log.callbacks`: rank 1 does not make a call that all others make, and goes on to its next step. In a group of
    their own, in which gloo waits; in the group of all it would compare the sizes of two different collectives, and
    end the process."""

    def __init__(self) -> None:
        self.group: Any = None

    def after_step(self, record: dict[str, Any], *others: Any) -> None:
        if self.group is None:
            self.group = torch_dist.new_group()
        if record["step"] == STEP and dist.rank() != 1:
            torch_dist.all_reduce(torch.zeros(3), group=self.group)


class StaysAway(Callback):
    """`log.callbacks`: rank 1 does not return once the file AWAY is in the working directory."""

    def after_step(self, record: dict[str, Any], *others: Any) -> None:
        if dist.rank() == 1 and Path(AWAY).exists():
            time.sleep(1000)


class HoldsTheGil(Callback):
    """`log.callbacks`: no thread of rank 1 runs any more."""

    def after_step(self, record: dict[str, Any], *others: Any) -> None:
        if record["step"] == STEP and dist.rank() == 1:
            ctypes.PyDLL(None).sleep(1000)


seen = itertools.count()


def stalling(samples: Iterable[Any]) -> Iterator[Any]:
    """`data.stages`: on rank 1 no more samples come."""
    for sample in samples:
        if next(seen) >= SAMPLES and os.environ["RANK"] == "1":
            time.sleep(1000)
        yield sample
