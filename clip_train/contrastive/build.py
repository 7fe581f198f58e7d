"""From the `loss` section to the objective: where a new one is named."""

from __future__ import annotations

from clip_train.contrastive.config import LossConfig
from clip_train.contrastive.distillation import Distillation, Teacher
from clip_train.contrastive.info_nce import InfoNCE, LocalInfoNCE
from clip_train.contrastive.memory_bank import MemoryBank
from clip_train.contrastive.objective import Objective
from clip_train.contrastive.sigmoid import SigmoidLoss


def build_loss(config: LossConfig, teacher: Teacher | None = None, *, local: bool = False) -> Objective:
    """The objective of the recipe. local: `batch.accumulation`; RunConfig has checked that they fit together."""
    if local:
        return LocalInfoNCE(tile=config.tile)
    if teacher is not None:
        return Distillation(teacher, tile=config.tile)
    if config.kind == "memory_bank":
        return MemoryBank(config.bank_size, config.bank_warmup_steps, config.bank_mode, tile=config.tile)
    if config.kind == "sigmoid":
        return SigmoidLoss(tile=config.tile, exchange=config.exchange)
    return InfoNCE(tile=config.tile)
