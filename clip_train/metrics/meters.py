"""What is measured in a step, and the record that it goes into."""

import gc
import hashlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from clip_train import dist
from clip_train.callbacks import Callback


class StepTimer:
    """Where a step's time goes. A step lasts from one `finish` (or the timer's making) to the next.

    Work on a GPU is not waited for here: read a number from it (the loss) before `finish`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds from any start."""
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin a step now: after a pause that is no part of it, such as saving or evaluating."""
        self._started = self._clock()
        self._waited = 0.0

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Around fetching the next batch."""
        started = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - started

    def finish(self) -> tuple[float, float]:
        """The step that ends here; the next one begins. (Seconds; how many of these it waited for
        data)."""
        times = self._clock() - self._started, self._waited
        self.restart()
        return times


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
