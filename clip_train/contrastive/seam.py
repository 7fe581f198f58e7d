"""The one seam through which every objective is reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass
class LossOutcome:
    """A global loss, and this rank's share of its gradient.

    Shares sum, over the ranks, to the whole gradient of the mean loss over the global batch: an engine
    that averages over ranks must undo the division.
    """

    loss: Tensor  # [], float64: the mean over the global batch, the same on all ranks
    d_image: Tensor  # [n, D], with respect to this rank's image features
    d_text: Tensor  # [n, D]
    d_logit_scale: Tensor  # [1], with respect to the factor exp(logit_scale)
    d_logit_bias: Tensor | None = None  # [1]
    extra: dict[str, float] = field(default_factory=dict)  # what else metrics.jsonl should have of this step


class ContrastiveLoss(Protocol):
    """`(image [n, D], text [n, D], logit_scale [1], logit_bias [1] | None) -> LossOutcome`.

    Called on all ranks together; row i of `image` belongs to row i of `text`. `global_size`: N samples on all
    ranks, shared so that the first N % W hold one more; None where every rank holds n. Its gradients need no
    autograd graph and no collective after it has returned.
    """

    def __call__(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        *,
        global_size: int | None = None,
    ) -> LossOutcome: ...


@runtime_checkable
class StatefulLoss(Protocol):
    """An objective that remembers: told when a step is over, and part of the checkpoint."""

    def after_step(self) -> None:
        """The optimizer has stepped. On all ranks together."""
        ...

    def state_tensors(self) -> dict[str, Tensor]:
        """The same on all ranks."""
        ...

    def load_state_tensors(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """On any number of ranks."""
        ...
