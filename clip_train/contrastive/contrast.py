"""Calling an objective with what it wants to know beside the features."""

from __future__ import annotations

from clip_train.contrastive.cache import FeatureCache
from clip_train.contrastive.distill import Distillation
from clip_train.contrastive.memory_bank import MemoryBank, sample_ids
from clip_train.contrastive.seam import ContrastiveLoss, LossOutcome


def contrast(
    contrastive: ContrastiveLoss, cache: FeatureCache, keys: list[str], global_size: int | None = None
) -> LossOutcome:
    """The loss over the global batch, and the gradients of this rank's features. Collective.

    A memory bank is told which samples these are (`keys`, n of them), a distillation what the teacher said.
    global_size: N; None where every rank holds n.
    """
    features = cache.features()
    seen = features.image, features.text, features.logit_scale, features.logit_bias
    if isinstance(contrastive, MemoryBank):
        return contrastive(*seen, ids=sample_ids(keys) if keys else None, global_size=global_size)
    if isinstance(contrastive, Distillation):
        return contrastive(*seen, taught=cache.taught(), global_size=global_size)
    return contrastive(*seen, global_size=global_size)
