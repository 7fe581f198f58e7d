"""Delays in the wrong places: with CLIP_TRAIN_TEST_JITTER=SEED, one in four collectives, opened files, removals and
renames starts up to 20 ms late, at random. scripts/stress.py sets it; `plant` is called in each rank and command."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

VARIABLE = "CLIP_TRAIN_TEST_JITTER"
SECONDS, SHARE = 0.02, 0.25
EVENTS = {"open", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"}  # Python's audit events
COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "barrier",
    "batch_isend_irecv",
    "broadcast_object_list",
)


def plant() -> None:
    """In this process and those that it forks. Of a process that has not imported torch, only the files are late."""
    seed = os.environ.get(VARIABLE)
    if not seed:
        return
    rng = random.Random(f"{seed} {os.environ.get('RANK')}")

    def delay() -> None:
        if rng.random() < SHARE:
            time.sleep(rng.random() * SECONDS)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS and not str(args[0]).endswith((".py", ".pyc")):
            delay()

    if "torch.distributed" in sys.modules:
        import torch
        import torch.distributed as torch_dist

        hook = torch.compiler.disable(hook)  # else dynamo counts it as a frame of the model
        for name in COLLECTIVES:
            if hasattr(torch_dist, name):
                setattr(torch_dist, name, _late(getattr(torch_dist, name), delay))
    sys.addaudithook(hook)


def _late(function: Callable[..., Any], delay: Callable[[], None]) -> Callable[..., Any]:
    def late(*args: Any, **options: Any) -> Any:
        delay()
        return function(*args, **options)

    return late
