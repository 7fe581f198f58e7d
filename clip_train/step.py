"""One training step, in two passes. Read this module to understand the core idea.

Every sample of the global batch is a negative of every other, so the loss is not a sum over pieces
of the batch. The features are computed piece by piece, and the loss once over all of them. Its
gradient is then pushed back through the pieces (GradCache, arXiv 2101.06983; here with retained
graphs, exact replay of random numbers, and the loss in closed form).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clip_train import dist
from clip_train.engines.base import Engine
from clip_train.errors import DivergedError
from clip_train.models.batch_norm import Update, collect_updates
from clip_train.models.dropout import draw_by
from clip_train.settings import Matmul
from clip_train.task import (
    LOCAL_LOSS,
    Batch,
    Context,
    Features,
    Flags,
    LossOutput,
    Objective,
    Phase,
    StepResult,
    is_scalar,
)

Guard = Callable[[Phase], AbstractContextManager[Any]]  # wraps one part of a step


class StepDiscarded(Exception):
    """Raised on all ranks before the update, because a rank has set a flag."""

    def __init__(self, flags: Flags) -> None:
        super().__init__(flags)
        self.flags = flags


def train_step(
    engine: Engine,
    batch: Batch,
    objective: Objective,
    *,
    micro_size: int,
    micro_tokens: int | None = None,
    kept_graphs: int,
    lr: float,
    flags: Callable[[], Flags] = Flags,
    guard: Guard = nullcontext,
) -> StepResult:
    """Take one optimizer step on the global batch; `batch` is this rank's share.

    batch: on the engine's device; with `shares` unless all ranks hold equally many samples. The
    result does not depend on `micro_size`, `micro_tokens` (as in `Batch.micro_batches`) or
    `kept_graphs` beyond rounding. flags: of this rank, asked for after its backward pass. guard:
    around each part (`clip_train.recovery`).

    Raises, on all ranks, StepDiscarded, and DivergedError if the loss or the gradient norm is not
    finite: before the update, when a step has changed only gradients. An engine that measures the
    norm in its own `step` raises DivergedError after it.
    """
    engine.train()
    micro_batches = batch.micro_batches(micro_size, micro_tokens)

    random_state = rng_state(engine.device)
    # Try the fast way to compute the loss, which subtracts no maximum from the logits. If its
    # exponentials underflowed, which is rare (`LossOutput.unsafe`), compute the step again safely.
    rounds = 0
    for deferred in (True, False):
        rounds += 1
        context = Context(
            # without shares, all ranks hold equally many samples
            global_size=sum(batch.shares) if batch.shares else None,
            columns=batch.columns.without("images", "texts"),
            deferred=deferred,
        )
        statistics: list[Update] = []
        output = two_pass(
            engine,
            micro_batches,
            objective,
            context,
            kept_graphs=kept_graphs,
            guard=guard,
            statistics=statistics,
        )
        norms, flag_sum = engine.reduce(flags())  # the global norm first, then each group's
        numbers = {"loss": output.loss, **output.metrics}
        if output.unsafe is not None:
            numbers["unsafe"] = output.unsafe
        values, norms_read, flag_sum_read = read_together(numbers, norms, flag_sum)
        agreed = Flags.unpacked(flag_sum_read)
        if agreed.starved or agreed.again:
            raise StepDiscarded(agreed)
        unsafe = values.pop("unsafe", False)
        if not unsafe:
            break
        engine.discard_gradients()
        restore_rng(random_state, engine.device)
    loss = values.pop("loss")
    if not math.isfinite(loss):
        raise DivergedError(f"the loss is {loss}")
    if not all(map(math.isfinite, norms_read)):  # empty for engines whose `step` measures them
        raise DivergedError(f"the gradient norm is {norms_read[0]} at a loss of {loss:.6g}")
    for update in statistics:  # before the engine averages them
        update()
    report = engine.step(lr, norms_read)  # updates the weights, then clamps logit_scale
    if not math.isfinite(report.grad_norm) and not report.skipped:
        raise DivergedError(f"the gradient norm is {report.grad_norm} at a loss of {loss:.6g}")
    objective.after_step()
    values["text_tokens"] = micro_batches.tokens_per_text
    if micro_batches.patches_per_image is not None:
        values["image_tokens"] = micro_batches.patches_per_image
    return replace(
        report,
        loss=loss,
        metrics=report.metrics | values,
        accum_steps=len(micro_batches),
        flags=agreed,
        rounds=rounds,
    )


def with_equal_chunks(batch: Batch, micro_tokens: int) -> Batch:
    """The batch with the number of micro-batches that the rank with the most patches needs.
    Collective: 8 bytes on the CPU. It is not part of `train_step`, which one rank may repeat."""
    most = dist.max_scalars(batch.least_chunks(micro_tokens))[0]
    return replace(batch, num_chunks=int(most))


def read_together(
    numbers: Mapping[str, Tensor | float], norms: Tensor, flag_sum: Tensor
) -> tuple[dict[str, float], list[float], float]:
    """Copy all three to the host in one transfer, and return them as Python numbers.

    This is the step's only wait for the device; all work has been queued.
    """
    on_device = {name: x for name, x in numbers.items() if isinstance(x, Tensor)}
    flat = [x.double().reshape(-1) for x in (*on_device.values(), norms, flag_sum)]
    # with offloaded gradients, the norms are in the CPU's memory
    together = torch.cat([x.to(flat[0].device, non_blocking=True) for x in flat])
    read = together.cpu().tolist()
    count = len(on_device)
    values = {name: float(x) for name, x in numbers.items() if name not in on_device}
    values.update(zip(on_device, read[:count], strict=True))
    return values, read[count:-1], read[-1]


def two_pass(
    engine: Any,
    micro_batches: Sequence[Any],
    objective: Objective,
    context: Context,
    *,
    kept_graphs: int = 1,
    guard: Guard = nullcontext,
    statistics: list[Update] | None = None,
) -> LossOutput:
    """Add the gradient of the global loss to `.grad` of the parameters. Returns the loss's output.

    Args:
        engine: an `Engine`, or any object with its `device`, `forward` and `backward`.
        micro_batches: `MicroBatch`es, or any objects that `engine.forward` accepts and that have
            `sample_seeds` and `places`.
        kept_graphs: how many micro-batches keep their graph after pass 1, and need no second
            forward.
        statistics: gets the updates of the batch norms' running statistics, for a caller that may
            discard the step. None: they are applied.
    """
    # running statistics move by pass 1 alone
    with collect_updates() as updates, guard("forward pass"):
        cache = encode(engine, micro_batches, objective, kept_graphs)
    # Micro-batches may be sorted by text length. The loss sees the samples in the batch's order.
    places = [entry.places for entry in cache if entry.places is not None]
    order = torch.cat(places) if places else None  # [n]
    features = joined([entry.features for entry in cache], order)
    prepared = [entry.prepared for entry in cache if entry.prepared is not None]
    context = replace(context, prepared=joined(prepared, order) if prepared else None)
    with matmul_precision(objective.matmul), guard("loss"):
        output = objective(features, context)  # once, globally
        if any(name.endswith(LOCAL_LOSS) for name in features):
            add_local_losses(output, features, objective.weights)
    gradients = split_gradients(output.gradients, cache, order)
    with guard("backward pass"):
        replay(engine, micro_batches, cache, gradients)
    if statistics is None:
        for update in updates:
            update()
    else:
        statistics += updates
    output.metrics |= {name: x for name, x in features.items() if is_scalar(x)}
    return output


def split_gradients(
    gradients: Features, cache: Sequence["CachedMicroBatch"], order: Tensor | None
) -> list[Features]:
    """The gradients of each micro-batch's features, from those of the whole batch.

    order: as in `joined`.
    """
    parts: list[Features] = [{} for _ in cache]
    for name, gradient in gradients.items():
        # in the library, a micro-batch may have the features of one tower only
        owners = [i for i, entry in enumerate(cache) if name in entry.features]
        if is_scalar(gradient):
            # Each micro-batch gets an equal part: under ZeRO-3, a parameter that gets no gradient in
            # one micro-batch keeps adding to the previous step's.
            for i in owners:
                parts[i][name] = gradient / len(owners)
            continue
        rows = gradient  # [rows of all samples, ...]
        if order is not None:
            samples = gradient.unflatten(0, (len(order), -1))  # [n, rows of a sample, ...]
            rows = samples[order].flatten(0, 1)  # from the batch's order to the micro-batches'
        pieces = rows.split([len(cache[i].features[name]) for i in owners])
        for i, piece in zip(owners, pieces, strict=True):
            parts[i][name] = piece
    return parts


def add_local_losses(output: LossOutput, features: Features, weights: Mapping[str, float]) -> None:
    """Add the local losses among `features` to a contrastive loss, in place. Collective.

        L = w_0 L_contrastive + sum_x w_x (sum_i l_xi) / (sum_i c_xi)

    Sample i has the sum `l_xi` of its terms and their number `c_xi` (tokens of a caption). Both
    sums run over the global batch, because a mean of the micro-batches' means would depend on their
    size.

    features: of this rank's n samples; a local loss is [n, 2], with l_xi and c_xi as its columns.
    weights: `Objective.weights`. The metrics have each mean
    over the global batch, without its weight.
    """
    names = [name for name in features if name.endswith(LOCAL_LOSS)]
    sums = torch.stack([features[name].double().sum(dim=0) for name in names])  # [losses, 2]
    contrastive_weight = weights.get("contrastive_loss", 1.0)
    output.metrics["contrastive_loss"] = output.loss
    output.loss = output.loss * contrastive_weight
    output.gradients = {name: x * contrastive_weight for name, x in output.gradients.items()}
    for name, (total, count) in zip(names, dist.all_reduce_sum(sums), strict=True):
        factor = weights.get(name, 1.0) / count.clamp(min=1)
        output.metrics[name] = total / count.clamp(min=1)
        output.loss = output.loss + total * factor
        gradient = torch.zeros_like(features[name])
        gradient[:, 0] = factor  # by the sums; the counts have none
        output.gradients[name] = gradient


@contextmanager
def matmul_precision(chosen: Matmul) -> Iterator[None]:
    """Set how GPUs multiply float32 matrices inside the block. The model has its own setting."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if chosen == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass
class CachedMicroBatch:
    """A micro-batch between the two passes."""

    places: Tensor | None  # int64 [b]: `MicroBatch.places`
    features: Features  # with their graph, if it is retained
    seeds: Tensor | None  # int64 [b]: `MicroBatch.sample_seeds`
    # the random state before its forward pass; None if the graph is retained
    rng: dict[str, torch.Tensor] | None
    prepared: Features | None  # what `Objective.prepare` returned

    @property
    def has_graph(self) -> bool:
        return self.rng is None


def encode(
    engine: Any,
    micro_batches: Sequence[Any],
    objective: Objective,
    kept_graphs: int,
) -> list[CachedMicroBatch]:
    """Pass 1: features of every micro-batch, with the graphs of the last `kept_graphs`.

    At least one graph is retained: pass 2 needs the memory of one in any case. So a step with a
    single micro-batch has no second forward pass.
    """
    cache = []
    first_retained = len(micro_batches) - max(kept_graphs, 1)
    for i, micro_batch in enumerate(micro_batches):
        with torch.no_grad():
            prepared = objective.prepare(micro_batch)
        retained = i >= first_retained
        rng = None if retained else rng_state(engine.device)
        with torch.set_grad_enabled(retained):
            features = engine.forward(micro_batch)
        cache.append(
            CachedMicroBatch(micro_batch.places, features, micro_batch.sample_seeds, rng, prepared)
        )
    return cache


def replay(
    engine: Any,
    micro_batches: Sequence[Any],
    cache: list[CachedMicroBatch],
    gradients: list[Features],
) -> None:
    """Pass 2: backward through the retained graphs first, which frees them. Then forward and
    backward for every other micro-batch.

    Each of these forwards starts from the random state that it had in pass 1. At the end, the state
    after pass 1 is restored, as if there had been one pass only.
    """
    after = rng_state(engine.device)  # after pass 1
    retained = [i for i, entry in enumerate(cache) if entry.has_graph]
    others = [i for i, entry in enumerate(cache) if not entry.has_graph]
    backwards_left = len(cache)
    for i in reversed(retained):
        backwards_left -= 1
        draw_by(cache[i].seeds)  # dropout needs them if activations are recomputed in the backward
        features = cache[i].features
        cache[i].features = {}  # the backward frees the graph
        engine.backward(features, gradients[i], last=backwards_left == 0)
        del features
    for i in others:
        backwards_left -= 1
        rng = cache[i].rng
        assert rng is not None
        restore_rng(rng, engine.device)
        # features of frozen towers are taken from the first pass
        features = engine.forward(micro_batches[i], cache[i].features)
        engine.backward(features, gradients[i], last=backwards_left == 0)
    restore_rng(after, engine.device)


def joined(parts: Sequence[Features], order: Tensor | None) -> Features:
    """The features of all micro-batches, concatenated and detached. Scalars, which are equal in
    all, are taken from the last.

    order: int64 [n], the place of each sample in the result; None: the order of the parts.
    """
    out = {}
    names = dict.fromkeys(name for part in parts for name in part)  # each once, in order
    for name in names:
        values = [part[name].detach() for part in parts if name in part]
        if is_scalar(values[-1]):
            out[name] = values[-1]
        else:
            rows = torch.cat(values)
            if order is not None:
                samples = rows.unflatten(0, (len(order), -1))  # [n, rows of a sample, ...]
                in_batch_order = torch.empty_like(samples)
                in_batch_order[order] = samples  # the inverse of `samples[order]`
                rows = in_batch_order.flatten(0, 1)
            out[name] = rows
    return out


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """States of torch's generators, uint8: the CPU's, and that of the model's device.

    The second forward has to draw the same numbers as the first. Dropouts of this project's models
    are functions of the sample and do not need this; all other random operations do. Without replay
    the gradient is biased, not only noisy: its relative error is about one half.

    ValueError for a device whose generator cannot be read.
    """
    state = {"rng.cpu": torch.get_rng_state()}
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        if not hasattr(module, "get_rng_state"):
            raise ValueError(
                f"torch.{device.type} has no get_rng_state: the second pass would draw other masks"
            )
        if device.type == "mps":  # there is one device, and the function takes no argument
            state["rng.device"] = module.get_rng_state()
        else:
            state["rng.device"] = module.get_rng_state(device)
    return state


def restore_rng(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `rng_state` saved. A state saved on a CPU restores the CPU's generator only."""
    torch.set_rng_state(state["rng.cpu"])
    if "rng.device" in state and device.type != "cpu":
        module = torch.get_device_module(device)
        if device.type == "mps":
            module.set_rng_state(state["rng.device"])
        else:
            module.set_rng_state(state["rng.device"], device)
