"""The forward passes, the same on every engine; `logit_scale` and `logit_bias` at fp32's value in any precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clip_train.protocols import Features, MicroBatch

SCALARS = ("logit_scale", "logit_bias")


class Towers:
    """Base of the engines."""

    def __init__(self, model: Any) -> None:
        """model: as the engine wants it called, hooks included."""
        self._model = model
        self._masters: dict[str, Tensor] = {}  # of SCALARS, in low precision only

    def train(self, mode: bool = True) -> None:
        self._model.train(mode)

    def forward(self, micro_batch: MicroBatch) -> Features:
        out = Features(*self._model(micro_batch.images, micro_batch.texts, micro_batch.sample_seeds))
        if self._masters:
            self._put_masters_into(out)
        return out

    def encode_image(self, images: Tensor) -> Tensor:
        return self._model(images, None)[0]

    def encode_text(self, texts: Tensor) -> Tensor:
        return self._model(None, texts)[1]

    def set_masters(self, values: dict[str, Tensor]) -> None:
        """name -> [1], on the device of the features: a copy of `logit_scale` in bf16 moves in steps of 3% near 100."""
        self._masters = {name: value.detach().to(torch.float32) for name, value in values.items()}

    def _put_masters_into(self, features: Features) -> None:
        """With the gradient still going to the model's parameters."""
        seen = features.logit_scale
        features.logit_scale = seen * (self._masters["logit_scale"].exp() / seen.detach())
        if features.logit_bias is not None:
            features.logit_bias = features.logit_bias + (self._masters["logit_bias"] - features.logit_bias.detach())
