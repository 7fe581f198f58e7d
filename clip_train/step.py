"""One training step, in two passes. Read this to know what the project is about.

Every sample of the global batch is every other's negative, so the batch cannot be cut in pieces and the
pieces' losses added: the features are computed piece by piece, the loss once over all of them, and its
gradient is pushed back through the pieces (GradCache, arXiv 2101.06983; with retained graphs, exact RNG replay
and the loss in closed form).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from clip_train import dist
from clip_train.contrastive.matmul import matmul_precision
from clip_train.contrastive.rng import restore_rng, rng_state
from clip_train.engine import Engine
from clip_train.errors import DivergedError
from clip_train.models.batch_norm import observed
from clip_train.protocols import (
    Batch,
    Differentiable,
    Features,
    MicroBatch,
    Phase,
)
from clip_train.task import Context, LossOutput, Objective, is_scalar

Guard = Callable[[Phase, Callable[[], Any]], Any]  # runs one part of a step


@dataclass(frozen=True)
class StepResult:
    """The same on all ranks."""

    loss: float  # of the global batch, before the update
    grad_norm: float  # global, before the clip
    skipped: bool = False  # fp16: gradients overflowed, no update
    # norms by group, the scalars that the loss was computed with, and what the objective reports
    metrics: dict[str, float] = field(default_factory=dict)


def unguarded(phase: Phase, action: Callable[[], Any]) -> Any:
    return action()


def train_step(
    engine: Engine,
    batch: Batch,
    objective: Objective,
    *,
    micro_size: int,
    kept_graphs: int,
    lr: float,
    guard: Guard = unguarded,
) -> StepResult:
    """Take one optimizer step on this rank's share `batch`, on the engine's device, of the global batch.

    The result does not depend on `micro_size` or `kept_graphs` beyond rounding. Ranks that do not hold equally
    many samples need `batch.shares`. DivergedError, on all ranks, before the update, if the loss is not finite. `guard`
    runs each part (`clip_train.recovery`): up to the last one, a step that fails has changed nothing but gradients.
    """
    engine.train()
    micro_batches = batch.micro_batches(micro_size)

    def accumulate(deferred: bool) -> dict[str, float]:
        if not objective.per_micro_batch:
            context = Context(batch.global_size, batch.keys, deferred=deferred)
            done = two_pass(
                engine, micro_batches, objective, context, kept_graphs=kept_graphs, guard=guard
            )
            return numbers([done])
        context = Context(
            batch.global_size or len(batch) * dist.world_size(), batch.keys, deferred=deferred
        )
        last = len(micro_batches) - 1
        parts = [
            two_pass(engine, [m], objective, context, last=i == last)
            for i, m in enumerate(micro_batches)
        ]
        out = numbers(
            parts
        )  # plain gradient accumulation: parts of a sum over micro-batches and ranks
        out["loss"], out["unsafe"] = dist.sum_scalars(out["loss"], out["unsafe"])
        return out

    random_state = rng_state(engine.device)
    found = accumulate(deferred=True)
    if found["unsafe"]:  # once in a million steps
        engine.discard_gradients()
        restore_rng(random_state, engine.device)
        found = accumulate(deferred=False)
    loss, _ = found.pop("loss"), found.pop("unsafe")
    if not math.isfinite(loss):
        raise DivergedError(f"the loss is {loss}")
    report = engine.step(lr)
    if not math.isfinite(report.grad_norm) and not report.skipped:
        raise DivergedError(f"the gradient norm is {report.grad_norm} at a loss of {loss:.6g}")
    objective.after_step()
    return StepResult(loss, report.grad_norm, report.skipped, report.by_group | found)


def numbers(parts: Sequence[LossOutput]) -> dict[str, float]:
    """All numbers of a step's losses, with one wait for the device, after both passes."""
    output = parts[-1]
    unsafe = [part.unsafe for part in parts if part.unsafe is not None]
    wanted = {
        "loss": torch.stack([part.loss for part in parts]).sum(),
        "unsafe": torch.stack(unsafe).any() if unsafe else torch.zeros_like(output.loss),
        **output.metrics,
    }
    on_device = {
        name: value.to(output.loss).reshape(())
        for name, value in wanted.items()
        if isinstance(value, torch.Tensor)
    }
    read = zip(on_device, torch.stack([*on_device.values()]).cpu().tolist(), strict=True)
    return {
        **{name: value for name, value in wanted.items() if not isinstance(value, torch.Tensor)},
        **dict(read),
    }


def two_pass(
    engine: Differentiable,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    context: Context,
    *,
    kept_graphs: int = 1,
    guard: Guard = unguarded,
    last: bool = True,
) -> LossOutput:
    """Add the gradient of the objective over these samples of all ranks. Returns its output.

    kept_graphs: micro-batches whose graphs are retained. last: no other backward follows in this optimizer step.
    """
    with (
        observed() as running_statistics
    ):  # of batch norms: of pass 1 alone, and only where all of this goes well
        cache = guard("forward pass", lambda: encode(engine, micro_batches, objective, kept_graphs))
    features, prepared = (
        joined([e.features for e in cache]),
        [e.prepared for e in cache if e.prepared is not None],
    )
    seen = replace(context, prepared=joined(prepared) if prepared else None)
    with matmul_precision(objective.matmul):
        output = guard("loss", lambda: objective(features, seen))  # once, over the global batch
    guard(
        "backward pass",
        lambda: replay(engine, cache, output.split([len(m) for m in micro_batches]), last),
    )
    for update in running_statistics:
        update()
    output.metrics |= {name: x for name, x in features.items() if is_scalar(x)}
    return output


@dataclass
class CachedMicroBatch:
    """A micro-batch between the two passes."""

    inputs: MicroBatch
    features: Features  # with their graph, where it is retained
    rng: (
        dict[str, torch.Tensor] | None
    )  # that its forward started from; None where the graph is retained
    prepared: Features | None  # by `Objective.prepare`


def encode(
    engine: Differentiable,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    kept_graphs: int,
) -> list[CachedMicroBatch]:
    """Pass 1: every micro-batch's features, retaining the graphs of the last `kept_graphs` (at least one).

    One retained graph costs no more memory than pass 2 needs anyway, and makes a single micro-batch an ordinary
    step without a second forward.
    """
    cache = []
    first_retained = len(micro_batches) - max(kept_graphs, 1)
    for i, micro_batch in enumerate(micro_batches):
        with torch.no_grad():
            prepared = objective.prepare(micro_batch)
        retained = i >= first_retained
        rng = None if retained else rng_state(engine.device)
        with torch.set_grad_enabled(retained):
            cache.append(CachedMicroBatch(micro_batch, engine.forward(micro_batch), rng, prepared))
    return cache


def replay(
    engine: Differentiable,
    cache: list[CachedMicroBatch],
    gradients: list[Features],
    last: bool,
) -> None:
    """Pass 2: retained graphs first, which frees them; then each other micro-batch again, with its own randomness.

    The random state afterwards is the one after pass 1, as if there had been one forward.
    """
    after = rng_state(engine.device)
    while cache and cache[-1].rng is None:
        engine.backward(cache.pop().features, gradients.pop(), last and not cache)
    for i, (entry, gradient) in enumerate(zip(cache, gradients, strict=True), 1):
        assert entry.rng is not None
        restore_rng(entry.rng, engine.device)
        engine.backward(
            engine.forward(entry.inputs, entry.features), gradient, last and i == len(cache)
        )
    restore_rng(after, engine.device)


def joined(parts: Sequence[Features]) -> Features:
    """The rows of all micro-batches in one, detached; the scalars are those of the last."""
    return {
        name: last.detach()
        if is_scalar(last)
        else torch.cat([part[name].detach() for part in parts])
        for name, last in parts[-1].items()
    }
