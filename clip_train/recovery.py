"""Recovers from out of memory: all ranks discard the attempt and repeat it with half the
micro-batch.

The result of a step does not depend on the micro-batch size, so the loss curve does not show it.
If another rank may be waiting in a collective inside the part that failed, the ranks cannot agree
on anything: the run ends, and the message says what to do.
"""

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from clip_train import dist
from clip_train.batch import BatchPlan
from clip_train.engine import Engine
from clip_train.errors import OutOfMemoryError
from clip_train.models.batch_norm import has_batch_norm
from clip_train.step import restore_rng, rng_state, train_step
from clip_train.task import Batch, Objective, Phase, StepResult

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
    """The one place that knows what running out of memory looks like."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    named = any(words in str(error) for words in OUT_OF_MEMORY)
    return isinstance(error, RuntimeError) and named


class _AttemptFailed(Exception):
    """Raised on all ranks together; nothing of the attempt may be used."""


def recovering_step(
    engine: Engine,
    batch: Batch,
    objective: Objective,
    plan: BatchPlan,
    *,
    lr: float,
    log: Callable[[str], None],
) -> tuple[StepResult, BatchPlan]:
    """`train_step`, repeated with half the micro-batch while memory runs out.

    Returns the result and the plan that fitted. Costs two all-reduces of one number.
    OutOfMemoryError if one sample at a time does not fit either, or if one rank alone cannot
    recover."""
    start = rng_state(engine.device)
    while True:
        try:
            result = train_step(
                engine,
                batch,
                objective,
                micro_size=plan.micro_size,
                kept_graphs=plan.kept_graphs,
                lr=lr,
                guard=partial(together, engine),
            )
            return result, plan
        except _AttemptFailed as e:
            why = str(e)
        # Out here nothing holds the failed attempt's tensors any more: its traceback is gone.
        smaller = halved(plan)
        if smaller is None:
            raise OutOfMemoryError(
                f"{why}, with one sample at a time (batch.micro_size 1, batch.kept_graphs 1): use "
                "more ranks, a higher engine.zero_stage, engine.precision=bf16, or a smaller "
                "batch.global_size"
            )
        engine.discard_gradients()
        restore_rng(start, engine.device)
        release()
        log(
            f"{why}: batch.micro_size from {plan.micro_size} to {smaller.micro_size}, retained "
            f"graphs from {plan.kept_graphs} to {smaller.kept_graphs} from here on; the same "
            "global batch again"
        )
        plan = smaller


@contextmanager
def together(engine: Engine, phase: Phase) -> Iterator[None]:
    """Around a part of the step: if it runs out of memory on one rank, it fails on all."""
    error: str | None = None
    remedy = engine.remedy(phase)  # None: no rank can be waiting for another one inside this part
    if phase != "loss" and dist.world_size() > 1 and has_batch_norm(engine.module):
        cut = "Set a smaller batch.micro_size, or vision_cfg.norm to group in the model's JSON"
        remedy = remedy or cut
    try:
        yield
    except Exception as e:
        if not is_out_of_memory(e):
            raise
        error = (str(e).splitlines() or [type(e).__name__])[0]
    if remedy is None:
        if dist.any_rank(error is not None):
            raise _AttemptFailed(
                f"out of memory in the {phase}{'' if error is None else f' ({error})'}"
            )
    elif error is not None:
        raise OutOfMemoryError(
            f"out of memory in the {phase} on rank {dist.rank()} ({error}), where the others wait "
            f"for it: it cannot be made good. {remedy}; the run goes on from its last checkpoint "
            "when started again"
        )


def halved(plan: BatchPlan) -> BatchPlan | None:
    """Half the micro-batch and half the samples whose graphs are kept; None at one sample."""
    b, m = plan.micro_size, min(plan.kept_graphs, plan.accum_steps)
    if b == 1 and m == 1:
        return None
    half = -(-b // 2)
    return BatchPlan(plan.global_size, plan.world_size, half, max(1, m * b // 2 // half))


def release() -> None:
    """Give back what only a cycle or an allocator still holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps freed blocks of the heap
    if trim is not None:
        trim(0)
