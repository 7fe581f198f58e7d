"""The contrastive objective behind one seam, the feature cache, and RNG replay.

`ContrastiveLoss` is the seam: features in, loss and this rank's share of the gradients out, in closed form.
"""

from clip_train.contrastive.cache import FeatureCache
from clip_train.contrastive.config import LossConfig, build_loss
from clip_train.contrastive.contrast import contrast
from clip_train.contrastive.distill import Distillation
from clip_train.contrastive.info_nce import InfoNCE, LocalInfoNCE
from clip_train.contrastive.memory_bank import MemoryBank, sample_ids
from clip_train.contrastive.seam import ContrastiveLoss, LossOutcome, StatefulLoss
from clip_train.contrastive.sigmoid import SigmoidLoss

__all__ = [
    "ContrastiveLoss",
    "Distillation",
    "FeatureCache",
    "InfoNCE",
    "LocalInfoNCE",
    "LossConfig",
    "LossOutcome",
    "MemoryBank",
    "SigmoidLoss",
    "StatefulLoss",
    "build_loss",
    "contrast",
    "sample_ids",
]
