"""What a model means for a training step: the one interface between the step, a model and a loss.

A `Task` names the features that a model returns and the groups of its parameters. An `Objective` is
the loss over the global batch. Nothing else asks what kind of model it is. `ImageText` is CLIP.

`b` samples in a micro-batch, `n` on a rank, `N` in the global batch, `D` the width of the features.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from clip_train.protocols import Features, MicroBatch
from clip_train.settings import Matmul


class Task(Protocol):
    """What a kind of model means for a step. All ranks make the same calls."""

    scalars: tuple[str, ...]
    """Parameters of shape [1] that belong to no group. Engines give the model their fp32 values."""
    group_names: tuple[str, ...]
    """The groups of all other parameters, such as the towers. Norms are reported for each."""
    bounds: Mapping[str, tuple[float, float]]
    """The range that a scalar is clamped to after each optimizer step."""

    def group(self, parameter: str) -> str | None:
        """The group of a parameter, by its name in the model's state dict; None for a scalar."""

    def features(
        self, model: nn.Module, micro_batch: MicroBatch, only: Collection[str] | None = None
    ) -> Features:
        """The features of a micro-batch, and the scalars as the loss needs them.

        only: names of the groups whose features are needed; None: all.
        """

    def encode(self, model: nn.Module, name: str, inputs: Tensor) -> Tensor:
        """The features `name`, [b, D], of inputs of that kind alone: what evaluation needs."""

    def with_masters(self, features: Features, masters: Mapping[str, Tensor]) -> Features:
        """`features`, with scalars computed from the fp32 `masters` in place of rounded copies.

        Gradients still go to the copies, and are those of the masters.
        """


class ImageText:
    """CLIP: a tower of images, a tower of texts, a logit scale and perhaps a bias.

    The model is `model(images, texts, sample_seeds)` and returns `(image, text, exp(logit_scale),
    logit_bias)`, where an input may be None; its parameters have OpenCLIP's names.
    """

    scalars: tuple[str, ...] = ("logit_scale", "logit_bias")
    group_names: tuple[str, ...] = ("image", "text")
    bounds: Mapping[str, tuple[float, float]] = {"logit_scale": (0.0, math.log(100))}  # CLIP's

    def group(self, parameter: str) -> str | None:
        if parameter in self.scalars:
            return None
        return "image" if parameter.startswith("visual.") else "text"

    def features(
        self, model: nn.Module, micro_batch: MicroBatch, only: Collection[str] | None = None
    ) -> Features:
        images = micro_batch.images if only is None or "image" in only else None
        texts = micro_batch.texts if only is None or "text" in only else None
        return named_features(*model(images, texts, micro_batch.sample_seeds))

    def encode(self, model: nn.Module, name: str, inputs: Tensor) -> Tensor:
        """name "image": uint8 [b, 3, H, W]; "text": int64 [b, context_length]."""
        if name == "image":
            return model(inputs, None)[0]
        return model(None, inputs)[1]

    def with_masters(self, features: Features, masters: Mapping[str, Tensor]) -> Features:
        """A copy of the scale in bf16 moves in steps of 3% near 100."""
        out = dict(features)
        if "logit_scale" in masters:
            copy = features["logit_scale"]
            out["logit_scale"] = copy * (masters["logit_scale"].exp() / copy.detach())
        if "logit_bias" in masters:
            copy = features["logit_bias"]
            out["logit_bias"] = copy + (masters["logit_bias"] - copy.detach())
        return out


IMAGE_TEXT = ImageText()


def named_features(
    image: Tensor | None, text: Tensor | None, logit_scale: Tensor, logit_bias: Tensor | None = None
) -> Features:
    """CLIP's features by name, without those that are None.

    image, text: [b, D], normalized. logit_scale: [1], the factor itself. logit_bias: [1].
    """
    named = {"image": image, "text": text, "logit_scale": logit_scale, "logit_bias": logit_bias}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def groups(task: Task, parameters: Iterable[str]) -> dict[str, str]:
    """Parameter -> its group; scalars are left out."""
    named = {name: task.group(name) for name in parameters}
    return {name: group for name, group in named.items() if group is not None}


@dataclass(frozen=True)
class Context:
    """What a loss may need beside this rank's features."""

    # N, sharded so that the first N % W ranks hold one more; None: every rank holds n
    global_size: int | None = None
    keys: Sequence[str] = ()  # n sample keys; empty: no sample is known to be another's copy
    prepared: Features | None = None  # what `Objective.prepare` returned for the n samples
    # the caller looks at `LossOutput.unsafe` later, once the device has come so far
    deferred: bool = False


NO_CONTEXT = Context()


@dataclass
class LossOutput:
    """A global loss, and this rank's share of its gradient.

    Shares sum, over the ranks, to the whole gradient of the mean loss over the global batch: an
    engine that averages over ranks must undo the division.
    """

    loss: Tensor  # [], float64: the mean over the global batch, the same on all ranks
    gradients: Features  # with respect to this rank's features: rows [n, D], and scalars [1]
    # what else metrics.jsonl should have; tensors have one element
    metrics: dict[str, Tensor | float] = field(default_factory=dict)
    # bool []: true where the output must be computed again with `Context.deferred` off; None: safe
    unsafe: Tensor | None = None

    @classmethod
    def scaled(
        cls,
        loss: Tensor,
        d_image: Tensor,
        d_text: Tensor,
        d_scale: Tensor,
        scale: Tensor,
        d_bias: Tensor | None = None,
        **more: Any,
    ) -> LossOutput:
        """The output of a loss of `scale * I T^T (+ bias)`.

        d_image, d_text: the gradients without the factor `scale`, [1]; they are changed in place.
        d_scale: float64 []; the logits are linear in the scale: it is <I, dI> before that factor.
        d_bias: [1].
        """
        d_logit_scale = d_scale.to(d_image.dtype).reshape(1)
        gradients = named_features(d_image.mul_(scale), d_text.mul_(scale), d_logit_scale, d_bias)
        return cls(loss, gradients, **more)


def is_scalar(feature: Tensor) -> bool:
    """Rows have two dimensions or more, scalars are [1]."""
    return feature.ndim == 1


class Objective(abc.ABC):
    """A contrastive loss in closed form: its gradients need no autograd graph, and no collective
    after the call.

    All ranks make the same calls. Only `__call__` has to be overridden.
    """

    matmul: Matmul = "highest"
    """How its products of float32 matrices are computed; `LossConfig.matmul`."""
    takes_bias: ClassVar[bool] = False
    """Whether the model must have a `logit_bias`; if not, it may not have one."""

    def prepare(self, micro_batch: MicroBatch) -> Features | None:
        """Once for each micro-batch, in the first pass, without grad: a teacher's features."""
        return None

    @abc.abstractmethod
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        """features: those of this rank's n samples, detached; equal rows belong together."""

    def after_step(self) -> None:  # noqa: B027  most need nothing
        """The optimizer has stepped."""

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint; the same on all ranks, and valid on any number of them."""
        return {}

    def load_state_dict(self, tensors: dict[str, Tensor], device: Any) -> None:  # noqa: B027
        """Restore what `state_dict` returned; `tensors` may hold nothing of this objective's."""
