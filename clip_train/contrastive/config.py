"""The `loss` section of the recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from clip_train.contrastive.info_nce import InfoNCE
from clip_train.contrastive.seam import ContrastiveLoss
from clip_train.settings import Settings


class LossConfig(Settings):
    """Which objective is minimised over the global batch."""

    kind: Literal["info_nce"] = "info_nce"
    """info_nce: CLIP's symmetric cross-entropy, every other sample of the global batch a negative."""
    tile: PositiveInt = 2048
    """Side of the largest piece of the N x N logits that exists at once (memory: 2 x 4 x tile^2 bytes)."""


def build_loss(config: LossConfig) -> ContrastiveLoss:
    return InfoNCE(tile=config.tile)
