"""`logit_scale` and `logit_bias` at fp32's value, whatever the model's own precision: for every engine."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from clip_train.protocols import Features


class Scalars:
    """The fp32 masters of the one-element parameters, in low precision only; empty otherwise.

    A low-precision copy of `logit_scale` moves in steps of 3% near 100.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("logit_scale", "logit_bias")

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def set(self, values: dict[str, Tensor]) -> None:
        """name -> fp32 [1], on the device of the features."""
        self._values = {name: value.detach().to(torch.float32) for name, value in values.items()}

    def put_into(self, features: Features) -> None:
        """The masters' values, with the gradient still going to the model's parameters."""
        if not self._values:
            return
        seen = features.logit_scale
        features.logit_scale = seen * (self._values["logit_scale"].exp() / seen.detach())
        if features.logit_bias is not None:
            features.logit_bias = features.logit_bias + (self._values["logit_bias"] - features.logit_bias.detach())
