"""Recover from running out of memory: discard the attempt at a step, and repeat it with half the
micro-batch.

The result of a step does not depend on the micro-batch size, so the loss curve does not show it. A
rank repeats a forward pass alone, while the others wait for its features. After a failed backward
pass, it informs the others by the step's flags, and all ranks repeat the step. Neither is possible
if another rank may be waiting in a collective inside the failed part. Then the run ends with a
message that states the remedy.
"""

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from clip_train import dist
from clip_train.batch import BatchPlan
from clip_train.engines.base import Engine
from clip_train.errors import OutOfMemoryError
from clip_train.metrics.meters import moment, seconds_between
from clip_train.models.batch_norm import has_batch_norm
from clip_train.step import StepDiscarded, restore_rng, rng_state, train_step
from clip_train.task import Batch, Flags, Objective, Phase, StepResult

# Messages of RuntimeErrors from torch's CPU allocator, oneDNN, CUDA, cuBLAS and cuDNN (the last but
# one is cuDNN 9's). oneDNN cannot create a primitive if its code or scratch memory does not fit;
# torch finds no engine if no workspace fits. Operations that a processor or GPU does not support
# raise these two as well: such a run fails at one sample. cuBLAS and cuDNN that are "not
# initialized" could not create a handle: memory for it is outside torch's cache, and is used up.
OUT_OF_MEMORY = (
    "can't allocate memory", "not enough memory", "out of memory", "bad_alloc",
    "could not create a memory object", "could not create a primitive",
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED",
    "_ALLOCATION_FAILED", "unable to find an engine to execute this computation",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error means out of memory. No other function decides this."""
    named = any(words in str(error) for words in OUT_OF_MEMORY)
    by_name = isinstance(error, RuntimeError) and named
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or by_name


class _AttemptFailed(Exception):
    """Raised on this rank alone, before another one could notice: nothing was exchanged."""


def recovering_step(
    engine: Engine,
    batch: Batch,
    objective: Objective,
    plan: BatchPlan,
    *,
    lr: float,
    log: Callable[[str], None],
    flags: Callable[[], Flags] = Flags,
) -> tuple[StepResult, BatchPlan]:
    """`train_step`, repeated with half the micro-batch while memory runs out.

    Returns the result and the plan to continue with. StepDiscarded if a rank's `flags` say that
    it is starved. OutOfMemoryError if one sample at a time does not fit either, or if one rank alone
    cannot recover."""
    start = rng_state(engine.device)
    first_plan = plan

    def flags_of_attempt() -> Flags:
        if parts.failed is not None:
            _zero_gradient(engine, batch)
        return flags()._replace(again=parts.failed is not None, smaller=plan is not first_plan)

    while True:
        parts = _Parts(engine)
        try:
            result = train_step(
                engine,
                batch,
                objective,
                micro_size=plan.micro_size,
                micro_tokens=plan.micro_tokens,
                kept_graphs=plan.kept_graphs,
                lr=lr,
                flags=flags_of_attempt,
                guard=parts.guard,
            )
            if result.flags.smaller and plan is first_plan:  # so that all ranks stay alike
                plan = _smaller(plan, "out of memory on another rank", log)
            forward, loss, backward = (seconds_between(*ends) for ends in parts.ends.values())
            result.metrics.update(compute_seconds=forward + backward, loss_seconds=loss)
            return result, plan
        except StepDiscarded as e:
            if e.flags.starved:
                # the run is saved next: as it was before the step
                engine.discard_gradients()
                restore_rng(start, engine.device)
                raise
            why = parts.failed or "out of memory in the backward pass of another rank"
        except _AttemptFailed as e:
            why = str(e)
        # At this point nothing holds the failed attempt's tensors: its traceback has been released.
        plan = _smaller(plan, why, log)
        engine.discard_gradients()
        restore_rng(start, engine.device)
        release()


class _Parts:
    """The parts of one attempt at a step, and the consequence if one of them runs out of memory."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failed: str | None = None  # why the backward pass ended early, which others must learn
        self.ends: dict[Phase, tuple[Any, Any]] = {}  # moments: when a part began, and ended

    @contextmanager
    def guard(self, phase: Phase) -> Iterator[None]:
        start = moment(self.engine.device)
        error: str | None = None
        try:
            yield
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            error = (str(e).splitlines() or [type(e).__name__])[0]
        if error is None:
            self.ends[phase] = start, moment(self.engine.device)
            return
        remedy = self._remedy(phase)
        if remedy is not None:
            raise OutOfMemoryError(
                f"out of memory in the {phase} on rank {dist.rank()} ({error}), where the others "
                f"wait for it, so the step cannot be repeated. {remedy}; start the run again to "
                "continue from its last checkpoint"
            )
        why = f"out of memory in the {phase} ({error})"
        if phase != "backward pass" or dist.world_size() == 1:
            raise _AttemptFailed(why)
        self.failed = why

    def _remedy(self, phase: Phase) -> str | None:
        """None: this rank can repeat the part, with more micro-batches than the others have."""
        remedy = self.engine.remedy(phase)
        if remedy is None and dist.world_size() > 1:
            remedy = self.engine.remedy("backward pass")
            if phase != "loss" and has_batch_norm(self.engine.module):
                remedy = (
                    "Set a smaller batch.micro_size, or vision_cfg.norm to group in the model's "
                    "JSON"
                )
        return remedy


def _zero_gradient(engine: Engine, batch: Batch) -> None:
    """Compute a zero gradient in place of the incomplete one, because the other ranks sum it."""
    engine.discard_gradients()
    release()
    features = engine.forward(batch.micro_batches(1)[0])
    engine.backward(features, {name: torch.zeros_like(x) for name, x in features.items()}, True)


def _smaller(plan: BatchPlan, why: str, log: Callable[[str], None]) -> BatchPlan:
    """`halved`, logged. OutOfMemoryError at one sample."""
    smaller = halved(plan)
    if smaller is None:
        raise OutOfMemoryError(
            f"{why}, with one sample at a time (batch.micro_size 1, batch.kept_graphs 1): use "
            "more ranks, a higher engine.zero_stage, engine.precision=bf16, or a smaller "
            "batch.global_size"
        )
    log(
        f"{why}: repeating the same global batch; from here on, batch.micro_size is "
        f"{smaller.micro_size} instead of {plan.micro_size}, and retained graphs are "
        f"{smaller.kept_graphs} instead of {plan.kept_graphs}"
    )
    return smaller


def halved(plan: BatchPlan) -> BatchPlan | None:
    """Half the micro-batch and half the samples whose graphs are kept; None at one sample."""
    b, m = plan.micro_size, min(plan.kept_graphs, plan.accum_steps)
    if b == 1 and m == 1:
        return None
    half = -(-b // 2)
    half_tokens = None if plan.micro_tokens is None else -(-plan.micro_tokens // 2)
    return replace(
        plan, micro_size=half, kept_graphs=max(1, m * b // 2 // half), micro_tokens=half_tokens
    )


def release() -> None:
    """Free memory that only a reference cycle or an allocator still holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps freed blocks of the heap
    if trim is not None:
        trim(0)
