"""Somebody else's two-tower module as an engine of the two-pass step: see `clip_train.step.contrastive_step`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from clip_train import dist
from clip_train.plain_engine import surrogate
from clip_train.protocols import Batch, FeatureGradients, Features, MicroBatch

NAMES = ("image_features", "text_features", "logit_scale", "logit_bias")  # as OpenCLIP's dictionaries have them


def _no_seeds() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass
class UserMicroBatch(MicroBatch):
    images: Any  # b samples
    texts: Any  # b samples
    sample_seeds: Tensor = field(default_factory=_no_seeds)  # the model draws from torch's generators instead

    def __len__(self) -> int:
        return num_samples("images", self.images)


@dataclass
class UserBatch(Batch):
    """Inputs of any make that can be cut along their first dimension: tensors, sequences, mappings of them."""

    images: Any  # n samples
    texts: Any  # n samples
    sample_seeds: Tensor = field(default_factory=_no_seeds)

    def __post_init__(self) -> None:
        n, texts = len(self), num_samples("texts", self.texts)
        if n != texts or n == 0:
            raise ValueError(f"images are {n} samples and texts {texts}: give equally many, at least one")

    def __len__(self) -> int:
        return num_samples("images", self.images)

    def micro_batches(self, micro_size: int) -> list[MicroBatch]:
        starts = range(0, len(self), micro_size)
        return [UserMicroBatch(*(cut(x, i, i + micro_size) for x in (self.images, self.texts))) for i in starts]


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


def tensors(inputs: Any) -> Iterator[Tensor]:
    """Those among inputs of any make; of a sequence those of its first sample."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Mapping):
        for value in inputs.values():
            yield from tensors(value)
    elif isinstance(inputs, (list, tuple)) and inputs:
        yield from tensors(inputs[0])


class UserEngine:
    """One step of `model(images, texts)`: k backwards that add to `.grad`, of which DDP sees only the last.

    DDP modules may be anywhere in `model`: inside torch.compile's wrapper or an adapter, one for each tower. What
    an adapter has beside them, often `logit_scale`, is summed over ranks here.

    kept_graphs: as many as may be kept of those wanted. DDP hangs its reduction on a forward that is followed by its
    own backward at once, so one of several micro-batches goes forward again.
    """

    def __init__(self, model: Callable[..., Any], batch: UserBatch, micro_size: int, kept_graphs: int):
        if micro_size < 1:
            raise ValueError(f"micro_size ({micro_size}) must be at least 1")
        self.model = model
        modules = model.modules() if isinstance(model, nn.Module) else ()
        parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
        held = itertools.chain(parameters, tensors(batch.images), tensors(batch.texts))
        self.device = next((x.device for x in held), torch.device("cpu"))
        self.ddp = [m for m in modules if isinstance(m, DistributedDataParallel)]
        inside = {p for m in self.ddp for p in m.parameters()}
        self.outside = [p for p in parameters if p.requires_grad and p not in inside] if self.ddp else []
        self.held_before: list[Tensor | None] = []  # gradients of `outside`, of earlier steps
        self.backwards_left = -(-len(batch) // micro_size)
        most = max(1, self.backwards_left - 1) if self.ddp else self.backwards_left
        self.kept_graphs = min(kept_graphs, most)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Without DDP's reduction, but for the last micro-batch."""
        with contextlib.ExitStack() as stack:
            if self.backwards_left > 1:
                for module in self.ddp:
                    stack.enter_context(module.no_sync())
            yield

    def forward(self, micro_batch: MicroBatch) -> Features:
        with self._quiet(), _looking_for_ddp(self.model):
            features = as_features(self.model(micro_batch.images, micro_batch.texts))
        if not torch.is_grad_enabled():
            # autocast of older torch (2.6, not 2.13) would hand these casts of the weights, without a graph, to pass 2
            torch.clear_autocast_cache()
        return features

    def backward(self, features: Features, gradients: FeatureGradients, last: bool = False) -> None:
        total = surrogate(features, gradients)
        if self.ddp:
            total = total * dist.world_size()  # DDP averages over ranks, and these are shares of a sum
        if not self.held_before:
            self.held_before = [p.grad for p in self.outside]
            for p in self.outside:
                p.grad = None
        with self._quiet():
            total.backward()
        self.backwards_left -= 1
        if self.backwards_left == 0:
            self._average_outside()

    def _average_outside(self) -> None:
        """As DDP does with what is inside of it."""
        for p, before in zip(self.outside, self.held_before, strict=True):
            own = torch.zeros_like(p) if p.grad is None else p.grad  # all ranks take part
            p.grad = dist.all_reduce_sum(own).div_(dist.world_size())
            if before is not None:
                p.grad += before


@contextlib.contextmanager
def _looking_for_ddp(model: Callable[..., Any]) -> Iterator[None]:
    """ValueError where a function calls a DDP module: gradients would be reduced at every backward, and averaged."""

    def refuse(module: nn.Module, _: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                "model is a function around a DistributedDataParallel module; give an nn.Module that holds it as a "
                "submodule, and whose forward does what the function does"
            )

    if isinstance(model, nn.Module):
        yield
        return
    hook = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def as_features(out: Any) -> Features:
    """What a model returned, a tuple or OpenCLIP's dictionary, as Features in at least float32."""
    values: Sequence[Any] = [out.get(name) for name in NAMES] if isinstance(out, Mapping) else out
    if not isinstance(values, (tuple, list)) or not 3 <= len(values) <= 4 or any(v is None for v in values[:3]):
        raise ValueError(
            "the model must return (image_features, text_features, logit_scale[, logit_bias]), or a dict with these "
            f"names, not {type(out).__name__}; logit_scale is the factor itself: exp of the parameter"
        )
    image, text, scale, bias = (*values, None)[:4]
    return Features(
        _wide(image), _wide(text), _wide(scale).reshape(1), None if bias is None else _wide(bias).reshape(1)
    )


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
