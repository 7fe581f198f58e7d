"""The objectives, in closed form over tiles, behind one interface: `Objective`."""

from clip_train.contrastive.build import build_loss
from clip_train.contrastive.config import LossConfig
from clip_train.contrastive.distillation import Distillation
from clip_train.contrastive.info_nce import InfoNCE, LocalInfoNCE
from clip_train.contrastive.memory_bank import MemoryBank, sample_ids
from clip_train.contrastive.objective import Context, LossOutput, Objective
from clip_train.contrastive.sigmoid import SigmoidLoss

__all__ = [
    "Context",
    "Distillation",
    "InfoNCE",
    "LocalInfoNCE",
    "LossConfig",
    "LossOutput",
    "MemoryBank",
    "Objective",
    "SigmoidLoss",
    "build_loss",
    "sample_ids",
]
