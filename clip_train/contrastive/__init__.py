"""The contrastive objective behind one seam, the feature cache, and RNG replay.

`ContrastiveLoss` is the seam: features in, loss and this rank's share of the gradients out, in closed form.
"""

from clip_train.contrastive.cache import FeatureCache
from clip_train.contrastive.config import LossConfig, build_loss
from clip_train.contrastive.info_nce import InfoNCE
from clip_train.contrastive.seam import ContrastiveLoss, LossOutcome
from clip_train.contrastive.sigmoid import SigmoidLoss

__all__ = ["ContrastiveLoss", "FeatureCache", "InfoNCE", "LossConfig", "LossOutcome", "SigmoidLoss", "build_loss"]
