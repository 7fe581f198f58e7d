"""Measurements of a step: the batch's digest, memory, time, the share of the device's peak, traces,
garbage collection."""

import gc
import hashlib
import re
import resource
import sys
import threading
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from clip_train import dist
from clip_train.callbacks import Callback
from clip_train.flops import ForwardFlops
from clip_train.metrics.gpus import GPUS
from clip_train.metrics.skipped import Skipped

SIDE = 1024  # of the square matrices whose product measures a CPU
TABLE_ROWS = 30  # of a profile
REMEDY = "the run is not affected; correct the cause before you ask for it again"


class BatchDigest(Callback):
    """Adds `batch_digest` to each record: proof that two runs saw the same global batch."""

    def after_step(
        self, record: dict[str, Any], keys: Sequence[str], invalid: Mapping[str, int]
    ) -> None:
        """Collective. The sha256, in hex, of the sorted `Batch.names` joined by newlines (UTF-8)."""
        of_all = sorted(key for of_rank in dist.gather_objects(keys) for key in of_rank)
        record["batch_digest"] = hashlib.sha256("\n".join(of_all).encode()).hexdigest()


def peak_memory_bytes(device: torch.device | None = None) -> int:
    """The most that PyTorch has held on the GPU so far; on a CPU the most that the process has
    held."""
    if (device is None or device.type == "cuda") and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def moment(device: torch.device) -> Any:
    """Now; on a GPU the end of all work that is queued so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(earlier: Any, later: Any) -> float:  # a GPU must have reached both
    return later - earlier if isinstance(later, float) else earlier.elapsed_time(later) / 1000


def peak_flops(device: torch.device) -> float | None:
    """FLOPs per second. On a GPU: the datasheet's value in bf16, None if it is not in `GPUS`. On a
    CPU: the measured speed of a product of fp32 matrices with this rank's threads."""
    if device.type == "cuda":
        words = re.split(r"\W+", torch.cuda.get_device_name(device))
        return next((gpu.flops for name, gpu in GPUS.items() if name.split("-")[0] in words), None)
    x = torch.ones(SIDE, SIDE)
    return 2 * SIDE**3 / min(timeit.repeat(partial(torch.mm, x, x), number=1))


class Utilization(Callback):
    """Adds `mfu` (arXiv 2204.02311) and `mfu_computed` to each record, null if they are not known,
    and on GPUs the memory that PyTorch has reserved.

    `mfu` counts three forwards of a sample with all padding, as other trainers do. `mfu_computed`
    counts what the devices compute: no padding that is skipped, but repeated forwards and
    recomputed activations. For rank 0, assuming that all ranks have the same device.
    """

    def __init__(
        self,
        forward_flops: Callable[[], ForwardFlops],
        device: torch.device,
        skipped: Skipped,
        recomputed: float = 0.0,
    ) -> None:
        """forward_flops: called after the first step. recomputed: forwards that a backward computes
        again (`memory.plan.RECOMPUTED`)."""
        self._forward_flops, self._device, self._skipped = forward_flops, device, skipped
        self._recomputed = recomputed

    @cached_property
    def _known(self) -> tuple[float, ForwardFlops] | None:  # FLOPs a second of a device; the model
        return self._skipped.attempt("mfu", self._measure, remedy="it is null in metrics.jsonl")

    def _measure(self) -> tuple[float, ForwardFlops] | None:
        peak = peak_flops(self._device)
        return None if peak is None else (peak, self._forward_flops())

    def after_step(
        self, record: dict[str, Any], keys: Sequence[str], invalid: Mapping[str, int]
    ) -> None:
        rate = record["samples_per_second"] / dist.world_size()
        record["mfu"] = record["mfu_computed"] = None
        if self._known is not None:
            peak, forward = self._known
            # the backward counts as 2 forwards
            record["mfu"] = rate * 3 * forward.total / peak
            k = record["accum_steps"]
            repeated = (k - min(record["kept_graphs"], k)) / k
            forwards = (3 + repeated + self._recomputed) * record["rounds"]
            image = forward.image_of(record.get("image_tokens"))
            computed = image + forward.text_of(record["text_tokens"])
            record["mfu_computed"] = rate * forwards * computed / peak
        if self._device.type == "cuda":
            record["reserved_memory_bytes"] = torch.cuda.max_memory_reserved(self._device)


class Profiler(Callback):
    """Traces steps `first` to `last` of a run that continues after step `start`.

    Each rank writes `rankN.json.gz`, which ui.perfetto.dev opens, and `rankN.txt`, its largest
    operators.
    """

    def __init__(self, first: int, last: int, start: int, folder: Path, skipped: Skipped) -> None:
        self._folder, self._skipped = folder, skipped
        untraced = max(first - 1 - start, 0)  # the last of these warms the profiler up
        warmup = min(untraced, 1)
        self._profile = torch.profiler.profile(
            schedule=torch.profiler.schedule(
                wait=untraced - warmup, warmup=warmup, active=last - start - untraced, repeat=1
            ),
            on_trace_ready=self._write,
            profile_memory=True,
        )
        self._thread = threading.current_thread()
        self._profile.start()

    def after_step(
        self, record: dict[str, Any], keys: Sequence[str], invalid: Mapping[str, int]
    ) -> None:
        self._skipped.attempt("the profile", self._profile.step, remedy=REMEDY)

    def close(self) -> None:
        # Another thread closes the run where another rank has failed. torch ends a profile only in
        # the thread that began it, and waits for the GPU, which may wait for that rank.
        if threading.current_thread() is self._thread:
            self._skipped.attempt("the profile", self._profile.stop, remedy=REMEDY)

    def _write(self, profile: torch.profiler.profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{dist.rank()}.json.gz"
        for name in (path, path.with_name(f"rank{dist.rank()}.txt")):
            name.unlink(missing_ok=True)  # it may be a link to another file
        profile.export_chrome_trace(str(path))
        order = f"self_{'cuda' if torch.cuda.is_available() else 'cpu'}_time_total"
        table = profile.key_averages().table(order, row_limit=TABLE_ROWS)
        path.with_name(f"rank{dist.rank()}.txt").write_text(table)


class GarbageCollections(Callback):
    """Collect Python's garbage at the same steps on all ranks, as torchtitan does.

    By default, Python collects at different steps on each rank, and every step waits for the
    slowest rank. A step leaves no reference cycles that hold tensors.
    """

    # steps between collections of new objects, and of all objects made after the start
    YOUNG, ALL = 50, 1000

    def __init__(self) -> None:
        self.first = True

    def after_step(
        self, record: dict[str, Any], keys: Sequence[str], invalid: Mapping[str, int]
    ) -> None:
        if self.first:  # objects made at the start live as long as the run
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
