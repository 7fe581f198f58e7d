"""What is measured beside a step: the batch's digest, memory, collections of garbage."""

import gc
import hashlib
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from clip_train import dist
from clip_train.callbacks import Callback


class BatchDigest(Callback):
    """Adds `batch_digest` to each record: proof that two runs saw the same global batch."""

    def after_step(
        self, record: dict[str, Any], keys: Sequence[str], invalid: Mapping[str, int]
    ) -> None:
        """Collective. The sha256, in hex, of the sorted sample keys joined by newlines (UTF-8)."""
        of_all = sorted(key for of_rank in dist.gather_objects(keys) for key in of_rank)
        record["batch_digest"] = hashlib.sha256("\n".join(of_all).encode()).hexdigest()


def peak_memory_bytes(device: torch.device | None = None) -> int:
    """The most that PyTorch has held on the GPU so far; on a CPU the most that the process has
    held."""
    if (device is None or device.type == "cuda") and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class GarbageCollections(Callback):
    """Python collects garbage at the same steps on all ranks.

    Left to itself it interrupts each rank at another step, and every step waits for the slowest
    rank (torchtitan does the same). A step leaves no cycles that hold tensors.
    """

    YOUNG, ALL = 50, 1000  # steps between collections of new objects, and of all but the first's

    def __init__(self) -> None:
        self.first = True

    def after_step(
        self, record: dict[str, Any], keys: Sequence[str], invalid: Mapping[str, int]
    ) -> None:
        if self.first:  # what the start made lives as long as the run
            self.first = False
            gc.collect()
            gc.freeze()
            gc.disable()
        elif record["step"] % self.ALL == 0:
            gc.collect()
        elif record["step"] % self.YOUNG == 0:
            gc.collect(1)

    def close(self) -> None:
        gc.unfreeze()
        gc.enable()
