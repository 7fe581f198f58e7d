"""Run a function on several real ranks over gloo: a warm process each, a FileStore, no fixed ports.

CLIP_TRAIN_TEST_DEVICE (tests/devices.py) puts ranks on GPUs. Tests that take their device from `device()` then run
there: those of tests/engine that build by `engine_at`. The others stay on the CPU.
"""

from __future__ import annotations

import datetime
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from tests import devices, processor, shared_gpu, warm


def device() -> torch.device:
    """Of this rank; the CPU in a process that is none."""
    if on_gpus() and torch_dist.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def on_gpus() -> bool:
    return devices.chosen() != "cpu"


def _rank_main(
    rank: int, world_size: int, folder: str, fn: Callable[..., Any], args: tuple
) -> None:
    torch.set_num_threads(processor.THREADS)
    placed = devices.chosen()
    if placed == "cuda":
        torch.cuda.set_device(rank)
    elif placed == "cuda-shared":
        shared_gpu.prepare(world_size)
    # DeepSpeed insists on these even where the group exists already.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DS_ACCELERATOR=devices.accelerator()
    )
    store = torch_dist.FileStore(f"{folder}/store", world_size)
    torch_dist.init_process_group(
        devices.BACKENDS[placed],
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=600),
        device_id=torch.device("cuda", rank) if placed == "cuda" else None,
    )
    store.set(f"rank {rank} has joined", "")
    try:
        outcome = ("result", fn(*args))
    except Exception as e:
        outcome = ("error", (type(e).__name__, str(e), traceback.format_exc()))
    # Written before the group ends: a rank that failed must not be mistaken for one that never answered.
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(outcome))
    if outcome[0] == "result":
        torch_dist.barrier()
    else:  # a rank that is still joining must not find this one gone
        store.wait([f"rank {other} has joined" for other in range(world_size)])
    torch_dist.destroy_process_group()


class RankFailedError(AssertionError):
    """A rank raised; `.errors` is {rank: (type name, message)}."""

    def __init__(self, errors: dict[int, tuple[str, str, str]]):
        self.errors = {rank: error[:2] for rank, error in errors.items()}
        super().__init__("\n".join(f"rank {rank}:\n{error[2]}" for rank, error in errors.items()))


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`fn(*args)` on every rank (a module-level function); returns the ranks' results in order.

    Skips the test if the machine has too few GPUs for CLIP_TRAIN_TEST_DEVICE."""
    needed = {"cpu": 0, "cuda": world_size, "cuda-shared": 1}[devices.chosen()]
    if needed and torch.cuda.device_count() < needed:
        import pytest

        pytest.skip(f"{world_size} ranks ({devices.chosen()}) need {needed} GPUs")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            warm.process(_rank_main, rank, world_size, folder, fn, args)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(1200)
            if process.is_alive():
                process.kill()
        outcomes = {}
        for rank in range(world_size):
            file = Path(folder, f"rank{rank}")
            lost = ("error", ("NoAnswer", f"rank {rank} ended without an answer", ""))
            outcomes[rank] = pickle.loads(file.read_bytes()) if file.exists() else lost
    errors = {rank: payload for rank, (kind, payload) in outcomes.items() if kind == "error"}
    if errors:
        raise RankFailedError(errors)
    return [outcomes[rank][1] for rank in range(world_size)]
