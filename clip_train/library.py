"""The two passes over any two-tower module, for your own training loop: see docs/library.md."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from clip_train import dist
from clip_train.contrastive.info_nce import InfoNCE
from clip_train.contrastive.sigmoid import SigmoidLoss
from clip_train.engine import surrogate
from clip_train.models.blocks import at_least_float32
from clip_train.settings import broken
from clip_train.step import two_pass
from clip_train.task import Context, Features, MicroBatch, named_features

# as OpenCLIP's dictionaries have them
NAMES = ("image_features", "text_features", "logit_scale", "logit_bias")


def contrastive_step(
    model: Callable[..., Any],
    images: Any,
    texts: Any,
    *,
    micro_size: int,
    kept_graphs: int = 1,
    loss: InfoNCE | SigmoidLoss | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Tensor:
    """Add the gradient of the mean loss over the global batch to `.grad`, however the batch is cut.

    Clearing gradients before and stepping the optimizer afterwards is the caller's. Under
    DistributedDataParallel `.grad` is then the same on all ranks, under `fully_shard` each rank has
    its shard of it.

    Args:
        model: `model(images, texts)` -> (image_features [b, D], text_features [b, D], both
            normalised, logit_scale: the factor itself[, logit_bias]), or a dict with these names.
            Its training mode is left as it is.
        images, texts: this rank's n samples: tensors, sequences, or dicts of them, on the model's
            device. All ranks need equally many.
        micro_size: samples that go through the model at once.
        kept_graphs: micro-batches whose graphs are retained, at least 1; more spare more forwards
            and need more memory.
        loss: None is InfoNCE().
        scaler: gradients are then multiplied by its scale, as `scaler.scale(loss).backward()`
            would; go on with `scaler.step(optimizer)` and `scaler.update()`.

    Returns:
        The loss over the global batch, float64 [], detached and not scaled; not checked for being
        finite.

    Raises:
        ValueError: inputs that cannot be cut alike; a model that returns something else, or that is
            a function on several ranks; a wrapper that reduces gradients in another way; another
            kind of loss; a device whose random state cannot be replayed.
    """
    objective = InfoNCE() if loss is None else loss
    if not isinstance(objective, (InfoNCE, SigmoidLoss)):
        raise ValueError(
            f"loss must be InfoNCE or SigmoidLoss, not {type(objective).__name__}: others need the "
            "trainer"
        )
    n, num_texts = num_samples("images", images), num_samples("texts", texts)
    rules = [
        (micro_size < 1, f"micro_size ({micro_size}) must be at least 1"),
        (
            n != num_texts or n == 0,
            f"images are {n} samples and texts {num_texts}: give equally many, at least one",
        ),
        (
            dist.world_size() > 1 and not isinstance(model, nn.Module),
            "model is a function, and there are several ranks: give an nn.Module that holds it as "
            "a submodule, and whose forward does what the function does, so that its gradients are "
            "summed over ranks",
        ),
        *wrapper_rules(model),
    ]
    for message in broken(rules):
        raise ValueError(message)
    starts = range(0, n, micro_size)
    no_seeds = torch.empty(0, dtype=torch.int64)  # the model draws from torch's generators
    micro_batches = [
        MicroBatch(cut(images, i, i + micro_size), cut(texts, i, i + micro_size), no_seeds)
        for i in starts
    ]
    engine = ModuleEngine(model, images, texts, len(micro_batches), scaler)
    kept = min(kept_graphs, engine.most_graphs)
    output = two_pass(engine, micro_batches, objective, Context(), kept_graphs=kept)
    return output.loss


def wrapper_rules(model: Callable[..., Any]) -> Iterator[tuple[bool, str]]:
    """What holds where `model`, or a module in it, cannot be stepped, and the message."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        name, ranks = type(module).__name__, dist.world_size()
        yield (
            isinstance(module, FullyShardedDataParallel)
            or hasattr(module, "set_gradient_accumulation_boundary"),
            f"model holds {name}, which reduces gradients in its own way: wrap the plain module "
            "with DistributedDataParallel or fully_shard, or use the trainer",
        )
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation may have left it whole
            meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
            yield (
                any(mesh.size() != ranks for mesh in meshes),
                f"model holds {name} that is sharded over {[m.size() for m in meshes]} of "
                f"{ranks} ranks: give fully_shard a mesh of all ranks",
            )


def num_samples(name: str, inputs: Any) -> int:
    """ValueError where the parts of a mapping do not agree."""
    if not isinstance(inputs, Mapping):
        return len(inputs)
    sizes = {key: num_samples(f"{name}.{key}", value) for key, value in inputs.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"{name}: all values need the same first dimension, not {sizes}")
    return next(iter(sizes.values()))


def cut(inputs: Any, start: int, stop: int) -> Any:
    """Samples `[start, stop)`."""
    if isinstance(inputs, Mapping):
        return {key: cut(value, start, stop) for key, value in inputs.items()}
    return inputs[start:stop]


class ModuleEngine:
    """One step of `model(images, texts)`: k backwards that add to `.grad`; the last one reduces.

    Modules under DDP or `fully_shard` may be anywhere in `model`: inside torch.compile's wrapper or
    an adapter, one for each tower. What an adapter has beside them, often `logit_scale`, is summed
    over ranks here.

    most_graphs: that can be retained. DDP hangs its reduction on a forward that is followed by its
    own backward at once, so one of several micro-batches goes forward again.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        images: Any,
        texts: Any,
        k: int,
        scaler: torch.amp.GradScaler | None = None,
    ):
        self.model = model
        self.scaler = scaler
        module = model if isinstance(model, nn.Module) else nn.Module()
        parameters = list(module.parameters())
        held = [x for x in (*parameters, *tree_leaves((images, texts))) if isinstance(x, Tensor)]
        self.device = held[0].device if held else torch.device("cpu")
        modules = list(module.modules())
        self.ddp = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self.sharded = [m for m in modules if isinstance(m, FSDPModule)]
        inside = {p for m in self.ddp for p in m.parameters()}
        inside |= {p for p in parameters if isinstance(p, DTensor)}
        self.averages = bool(self.ddp or self.sharded)
        self.outside = (
            [p for p in parameters if p.requires_grad and p not in inside] if self.averages else []
        )
        self.held_before = [p.grad for p in self.outside]  # of earlier steps
        for p in self.outside:
            p.grad = None
        self.backwards_left = k
        self.most_graphs = max(1, k - 1) if self.ddp else k

    def _quiet(self) -> contextlib.ExitStack:
        """Without a reduction, except for the last micro-batch."""
        stack = contextlib.ExitStack()
        if self.backwards_left > 1:
            for module in self.ddp:
                stack.enter_context(module.no_sync())
            for unit in self.sharded:
                self._defer(unit, True)
                stack.callback(self._defer, unit, False)
        return stack

    @staticmethod
    def _defer(module: FSDPModule, deferred: bool) -> None:
        """Whether the next backward leaves its gradients on this rank, for a later one to reduce.

        A unit that stays whole after its forward then stays so: one all-gather a step.
        """
        module.set_requires_gradient_sync(not deferred, recurse=False)
        module.set_is_last_backward(not deferred)
        # private: only fully_shard's caller knows its reshard_after_forward
        groups = cast(Any, module)._get_fsdp_state()._fsdp_param_groups
        whole = not any(group._reshard_after_forward for group in groups)
        module.set_reshard_after_backward(not (deferred and whole), recurse=False)

    def forward(self, micro_batch: MicroBatch, seen: Features | None = None) -> Features:
        """Always both towers: a module of any make may draw from torch's generators in either."""
        with self._quiet():
            return as_features(self.model(micro_batch.images, micro_batch.texts))

    def backward(self, features: Features, gradients: Features, last: bool = False) -> None:
        total = surrogate(features, gradients)
        if self.scaler is not None:
            total = self.scaler.scale(total)
        if self.averages:  # over ranks, and these are shares of a sum
            total = total * dist.world_size()
        with self._quiet():
            total.backward()
        self.backwards_left -= 1
        if self.backwards_left > 0:
            return
        # Parameters outside are averaged, as those inside are.
        for p, before in zip(self.outside, self.held_before, strict=True):
            own = torch.zeros_like(p) if p.grad is None else p.grad  # all ranks take part
            p.grad = dist.all_reduce_sum(own).div_(dist.world_size())
            if before is not None:
                p.grad += before


def as_features(out: Any) -> Features:
    """A model's output, a tuple or OpenCLIP's dictionary, as Features in at least float32."""
    values: Sequence[Any] = [out.get(name) for name in NAMES] if isinstance(out, Mapping) else out
    if (
        not isinstance(values, (tuple, list))
        or not 3 <= len(values) <= 4
        or any(v is None for v in values[:3])
    ):
        raise ValueError(
            "the model must return (image_features, text_features, logit_scale[, logit_bias]), or "
            f"a dict with these names, not {type(out).__name__}; logit_scale is the factor itself: "
            "exp of the parameter"
        )
    image, text, scale, *bias = (at_least_float32(value) for value in values if value is not None)
    return named_features(image, text, scale.reshape(1), bias[0].reshape(1) if bias else None)
