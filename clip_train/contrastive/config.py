"""The `loss` section of the recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from clip_train.contrastive.distill import Distillation, Teacher
from clip_train.contrastive.info_nce import InfoNCE
from clip_train.contrastive.local import LocalInfoNCE
from clip_train.contrastive.memory_bank import MemoryBank
from clip_train.contrastive.seam import ContrastiveLoss
from clip_train.settings import Settings


class LossConfig(Settings):
    """Which objective is minimised over the global batch."""

    kind: Literal["info_nce", "memory_bank"] = "info_nce"
    """info_nce: CLIP's symmetric cross-entropy, every other sample of the global batch a negative.
    memory_bank: the same, with the features of past batches on top (ContAccum)."""
    bank_size: PositiveInt = 4096
    """memory_bank: how many past pairs are kept, in samples. Each rank holds all: 2 x 4 x D bytes a pair."""
    bank_warmup_steps: NonNegativeInt = 1000
    """memory_bank: optimizer steps before the banks count; they fill from the first. Early features go stale
    quickly, and a bank of them can keep a model from learning at all."""
    bank_mode: Literal["negatives", "contaccum"] = "negatives"
    """memory_bank: are past pairs only negatives of the current ones, or terms of the loss as well, as in the
    paper (arXiv 2406.12356)?"""
    tile: PositiveInt = 2048
    """Side of the largest piece of the N x N logits that exists at once (memory: 2 x 4 x tile^2 bytes)."""


def build_loss(config: LossConfig, teacher: Teacher | None = None, *, local: bool = False) -> ContrastiveLoss:
    """The objective of the recipe. local: `batch.accumulation`; RunConfig has checked that they fit together."""
    if local:
        return LocalInfoNCE(tile=config.tile)
    if teacher is not None:
        return Distillation(teacher, tile=config.tile)
    if config.kind == "memory_bank":
        return MemoryBank(config.bank_size, config.bank_warmup_steps, config.bank_mode, tile=config.tile)
    return InfoNCE(tile=config.tile)
