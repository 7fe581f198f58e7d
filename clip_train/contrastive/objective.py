"""What is minimised over the global batch: `Objective`, the only interface between the step and a loss."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clip_train.contrastive.config import Matmul
from clip_train.protocols import FeatureGradients, Features, MicroBatch


@dataclass(frozen=True)
class Context:
    """What a loss may need beside this rank's features."""

    global_size: int | None = (
        None  # N, shared so that the first N % W ranks hold one more; None: all hold n
    )
    keys: Sequence[str] = ()  # n sample keys; empty: no sample is known to be another's copy
    prepared: Features | None = None  # what `Objective.prepare` returned for the n samples
    deferred: bool = (
        False  # the caller looks at `LossOutput.unsafe`, once the device has come so far
    )


NO_CONTEXT = Context()


@dataclass
class LossOutput:
    """A global loss, and this rank's share of its gradient.

    Shares sum, over the ranks, to the whole gradient of the mean loss over the global batch: an engine
    that averages over ranks must undo the division.
    """

    loss: Tensor  # [], float64: the mean over the global batch, the same on all ranks
    d_image: Tensor  # [n, D], with respect to this rank's image features
    d_text: Tensor  # [n, D]
    d_logit_scale: Tensor  # [1], with respect to the factor exp(logit_scale)
    d_logit_bias: Tensor | None = None  # [1]
    metrics: dict[str, Tensor | float] = field(
        default_factory=dict
    )  # what else metrics.jsonl should have; tensors []
    unsafe: Tensor | None = (
        None  # bool []: of no use, to be had again with `Context.deferred` off; None: it is not
    )

    @classmethod
    def scaled(
        cls,
        loss: Tensor,
        d_image: Tensor,
        d_text: Tensor,
        d_scale: Tensor,
        scale: Tensor,
        **more: Any,
    ) -> LossOutput:
        """d_image, d_text: but for the factor `scale`, [1], that every logit has, and are changed in place. d_scale:
        float64 []; S is linear in the scale, so it is <I, dI> before that factor; summed over ranks it is the whole."""
        d_logit_scale = d_scale.to(d_image.dtype).reshape(1)
        return cls(loss, d_image.mul_(scale), d_text.mul_(scale), d_logit_scale, **more)

    def split(self, sizes: Sequence[int]) -> list[FeatureGradients]:
        """The gradients of micro-batches of so many samples each.

        The scalars' gradients are divided equally: under ZeRO-3 a parameter without a gradient in some micro-batch
        would add to the previous step's.
        """
        k, bias = len(sizes), self.d_logit_bias
        return [
            FeatureGradients(
                d_image, d_text, self.d_logit_scale / k, None if bias is None else bias / k
            )
            for d_image, d_text in zip(
                self.d_image.split(sizes), self.d_text.split(sizes), strict=True
            )
        ]


class Objective(abc.ABC):
    """A contrastive loss in closed form: its gradients need no autograd graph, and no collective after the call.

    All ranks make the same calls. Only `__call__` has to be overridden.
    """

    matmul: Matmul = "highest"
    """How its products of float32 matrices are computed; `LossConfig.matmul`."""
    per_micro_batch = False
    """Plain gradient accumulation: called once for each micro-batch, and what it returns are parts of a sum over
    micro-batches and ranks."""

    def prepare(self, micro_batch: MicroBatch) -> Features | None:
        """Once for each micro-batch, in the first pass, without grad: a teacher's features."""
        return None

    @abc.abstractmethod
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        """features: of this rank's n samples, detached; row i of image belongs to row i of text."""

    def after_step(self) -> None:  # noqa: B027  most need nothing
        """The optimizer has stepped."""

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint; the same on all ranks, and good on any number of them."""
        return {}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:  # noqa: B027
        """Take over what `state_dict` gave; it may hold nothing of this objective's."""


def refuse_bias(features: Features, what: str) -> None:
    """ValueError where a loss with a softmax is given a bias."""
    if features.logit_bias is not None:
        raise ValueError(f"{what} has no logit_bias: its softmax would cancel it")
