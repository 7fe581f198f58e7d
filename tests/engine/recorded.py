"""`loss.kind=tests.engine.recorded.Recorded`: InfoNCE, and every collective of the run in files.

Imported on each rank before it trains. $COLLECTIVES/RANK has a line for each collective: the ranks
of its group, its name, the type and the elements of the larger tensor.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td

from clip_train.losses.info_nce import InfoNCE

NAMES = (
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_reduce",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
    "reduce", "reduce_scatter_single", "reduce_scatter_tensor",
)  # fmt: skip
depth = [0]  # an operator's new name calls its old one: counted once


def recorded(name: str, original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if depth[0] == 0:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            largest = max(tensors, key=torch.Tensor.numel, default=None)
            group = next(
                (g for g in (*args, *kwargs.values()) if isinstance(g, td.ProcessGroup)), None
            )
            what = None if largest is None else (str(largest.dtype), largest.numel())
            line = json.dumps([td.get_process_group_ranks(group), name, what])
            with Path(os.environ["COLLECTIVES"], str(td.get_rank())).open("a") as file:
                file.write(line + "\n")
        depth[0] += 1
        try:
            return original(*args, **kwargs)
        finally:
            depth[0] -= 1

    return call


for each in NAMES:
    if hasattr(td, each):
        wrapped = recorded(each, getattr(td, each))
        setattr(td, each, wrapped)
        setattr(td.distributed_c10d, each, wrapped)


class Recorded(InfoNCE):
    """The same numbers."""
