"""Run a function on several ranks that are threads of one process, over torch's threaded process group, on the CPU.

The group moves tensors by plain copies, so its sums share no code with gloo's. Threads share the random generator and
all globals: weights must be drawn before, and DeepSpeed, which keeps its groups as globals, needs `tests.ranks`.
"""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist

from tests import devices, warm
from tests.ranks import RankFailedError

SECONDS = 300  # until a world that does not end has failed


def run_threads(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`fn(*args)` on every rank (a module-level function), in one new process; returns the ranks' results in order."""
    results, errors = pickle.loads(warm.call(_world, fn, world_size, args))
    if errors:
        raise RankFailedError(errors)
    return results


def _world(fn: Callable[..., Any], world_size: int, args: tuple[Any, ...]) -> bytes:
    """The ranks' results and errors, pickled by value: tensors that a connection sends share memory with this process,
    which ends."""
    from torch._C._distributed_c10d import _set_thread_isolation_mode
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
    )

    os.environ[devices.SWITCH] = "cpu"  # the group does not order the streams of a GPU
    _install_threaded_pg()
    # functional collectives then find the group of their thread
    _set_thread_isolation_mode(True)
    store = torch_dist.HashStore()
    results: list[Any] = [None] * world_size
    errors: dict[int, tuple[str, str, str]] = {}

    def rank_main(rank: int) -> None:
        torch_dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            # else a backward runs in a thread that belongs to no rank
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(*args)
        # a rank that another's failure ended raises SystemExit
        except BaseException as e:
            if not isinstance(e, SystemExit):
                errors[rank] = (type(e).__name__, str(e), traceback.format_exc())
            ProcessLocalGroup.exception_handle(e)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(SECONDS)
        if thread.is_alive():
            errors[rank] = ("NoAnswer", f"rank {rank} did not end in {SECONDS} seconds", "")
    return pickle.dumps((results, errors))
