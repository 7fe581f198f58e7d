"""One training step, in two passes. Read this to know what the project is about.

Every sample of the global batch is every other's negative, so the batch cannot be cut in pieces and the
pieces' losses added: the features are computed piece by piece, the loss once over all of them, and its
gradient is pushed back through the pieces (GradCache, arXiv 2101.06983; with kept graphs, exact RNG replay
and the loss in closed form).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from clip_train import dist
from clip_train.contrastive import (
    ContrastiveLoss,
    FeatureCache,
    InfoNCE,
    LocalInfoNCE,
    SigmoidLoss,
    StatefulLoss,
    contrast,
)
from clip_train.contrastive.distill import Teacher
from clip_train.contrastive.rng import RngState
from clip_train.errors import DivergedError
from clip_train.protocols import Batch, Differentiable, Engine, FeatureGradients, Phase
from clip_train.user_engine import UserBatch, UserEngine

T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """What one step tells; the same on all ranks."""

    loss: float  # of the global batch, before the update
    grad_norm: float  # global, before the clip
    logit_scale: float  # the factor the loss was computed with
    skipped: bool = False  # fp16: gradients overflowed, no update
    extra: dict[str, float] = field(default_factory=dict)  # what the objective has to tell beside the loss


class Guard(Protocol):
    """Runs one part of a step."""

    def __call__(self, phase: Phase, action: Callable[[], T], /) -> T: ...


def unguarded(phase: Phase, action: Callable[[], T], /) -> T:
    return action()


def train_step(
    engine: Engine,
    batch: Batch,
    contrastive: ContrastiveLoss,
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
    if isinstance(contrastive, LocalInfoNCE):
        return local_step(engine, batch, contrastive, micro_size=micro_size, lr=lr)
    teacher = getattr(contrastive, "teacher", None)
    # pass 1: features; graphs of the last ones only
    cache = guard("forward pass", lambda: encode(engine, batch, micro_size, kept_graphs, teacher))
    scale = cache.entries[-1].features.logit_scale.item()
    # once, over the global batch
    outcome = guard("loss", lambda: contrast(contrastive, cache, batch.keys, batch.global_size))
    loss = finite(outcome.loss.item())
    # pass 2: the cached gradients go back through the model
    guard("backward pass", lambda: replay(engine, cache, cache.split(outcome)))
    result = update(engine, lr, StepResult(loss, math.nan, scale, extra=outcome.extra))
    if isinstance(contrastive, StatefulLoss):
        contrastive.after_step()
    return result


def finite(loss: float) -> float:
    if not math.isfinite(loss):
        raise DivergedError(f"the loss is {loss}")
    return loss


def update(engine: Engine, lr: float, result: StepResult) -> StepResult:
    """The optimizer's step; `result` with what it told."""
    report = engine.step(lr)
    if not math.isfinite(report.grad_norm) and not report.skipped:
        raise DivergedError(f"the gradient norm is {report.grad_norm} at a loss of {result.loss:.6g}")
    return replace(result, grad_norm=report.grad_norm, skipped=report.skipped)


def encode(
    engine: Differentiable, batch: Batch, micro_size: int, kept_graphs: int, teacher: Teacher | None = None
) -> FeatureCache:
    """Pass 1: every micro-batch's features, keeping the graphs of the last `kept_graphs` (at least one).

    One kept graph costs no more memory than pass 2 needs anyway, and makes a single micro-batch an ordinary
    step without a second forward.
    """
    cache = FeatureCache()
    micro_batches = batch.micro_batches(micro_size)
    first_kept = len(micro_batches) - max(kept_graphs, 1)
    for i, micro_batch in enumerate(micro_batches):
        taught = None
        if teacher is not None:
            with torch.no_grad():
                taught = teacher(micro_batch)  # once: pass 2 needs no teacher
        if i >= first_kept:
            cache.add(micro_batch, engine.forward(micro_batch), None, taught)
        else:
            rng = RngState.capture(engine.device)
            with torch.no_grad():
                cache.add(micro_batch, engine.forward(micro_batch), rng, taught)
    return cache


def replay(engine: Differentiable, cache: FeatureCache, gradients: list[FeatureGradients]) -> None:
    """Pass 2: kept graphs first, which frees them; then each other micro-batch again, with its own randomness.

    The random state afterwards is the one after pass 1, as if there had been one forward.
    """
    after = RngState.capture(engine.device)
    while cache.entries and cache.entries[-1].graph_kept:
        last = len(cache.entries) == 1
        engine.backward(cache.entries.pop().features, gradients.pop(), last)
    for i, (entry, gradient) in enumerate(zip(cache.entries, gradients, strict=True)):
        assert entry.rng is not None
        entry.rng.restore()
        engine.backward(engine.forward(entry.inputs), gradient, i == len(gradients) - 1)
    after.restore()


def local_step(engine: Engine, batch: Batch, contrastive: LocalInfoNCE, *, micro_size: int, lr: float) -> StepResult:
    """Plain gradient accumulation: each micro-batch on each rank is its own contrastive batch. No cache.

    The loss is the mean over micro-batches, each weighed by its samples.
    """
    N = batch.global_size or len(batch) * dist.world_size()
    total = 0.0
    micro_batches = batch.micro_batches(micro_size)
    for i, micro_batch in enumerate(micro_batches):
        features = engine.forward(micro_batch)
        seen = features.detach()
        outcome = contrastive(seen.image, seen.text, seen.logit_scale, seen.logit_bias)
        share = len(micro_batch) / N
        total += outcome.loss.item() * share
        d_image, d_text, d_scale = outcome.d_image * share, outcome.d_text * share, outcome.d_logit_scale * share
        engine.backward(features, FeatureGradients(d_image, d_text, d_scale), i == len(micro_batches) - 1)
    loss = finite(dist.sum_scalars(total)[0])
    return update(engine, lr, StepResult(loss, math.nan, seen.logit_scale.item()))


def contrastive_step(
    model: Callable[..., Any],
    images: Any,
    texts: Any,
    *,
    micro_size: int,
    kept_graphs: int = 1,
    loss: InfoNCE | SigmoidLoss | None = None,
) -> torch.Tensor:
    """The two passes over anybody's module, for a training loop of one's own: see docs/library.md.

    Adds the gradient of the mean loss over the global batch to `.grad`; clearing it before and stepping the optimizer
    afterwards is the caller's. Under DistributedDataParallel it is then the same on all ranks.

    Args:
        model: `model(images, texts)` -> (image_features [b, D], text_features [b, D], both normalised, logit_scale:
            the factor itself[, logit_bias]), or a dict with these names. Its training mode is left as it is.
        images, texts: this rank's n samples: tensors, sequences, or dicts of them, on the model's device. All ranks
            need equally many.
        micro_size: samples that go through the model at once.
        kept_graphs: micro-batches whose graphs are kept, at least 1; more spare more forwards and need more memory.
        loss: None is InfoNCE().

    Returns:
        The loss over the global batch, float64 [], detached; not checked for being finite.

    Raises:
        ValueError: inputs that cannot be cut alike; a model that returns something else, or is a function around a
            DDP module; another kind of loss.
    """
    contrastive = InfoNCE() if loss is None else loss
    if not isinstance(contrastive, (InfoNCE, SigmoidLoss)) or isinstance(contrastive, LocalInfoNCE):
        raise ValueError(
            f"loss must be InfoNCE or SigmoidLoss, not {type(contrastive).__name__}: others need a trainer"
        )
    batch = UserBatch(images, texts)
    engine = UserEngine(model, batch, micro_size, kept_graphs)
    cache = encode(engine, batch, micro_size, engine.kept_graphs)
    outcome = contrast(contrastive, cache, batch.keys)
    replay(engine, cache, cache.split(outcome))
    return outcome.loss
