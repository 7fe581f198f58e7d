"""InfoNCE within a micro-batch: what plain gradient accumulation minimises, for comparison.

Every micro-batch of `b` samples on every rank is a batch of its own, with b - 1 negatives for each sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clip_train.contrastive.info_nce import softplus
from clip_train.contrastive.seam import LossOutcome
from clip_train.contrastive.tiles import accumulation_dtype, add_softmax_gradient, row_logsumexp


class LocalInfoNCE:
    """The loss and its gradient of the features given, and of no other rank's. No communication.

    `train_step` accumulates with it plainly: forward and backward of each micro-batch in turn.
    """

    def __init__(self, tile: int = 2048):
        self.tile = tile

    @torch.no_grad()
    def __call__(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        *,
        global_size: int | None = None,
    ) -> LossOutcome:
        """The *mean* over these `b` samples, whatever the global batch; the caller weighs micro-batches."""
        if logit_bias is not None:
            raise ValueError("InfoNCE has no logit_bias: its softmax would cancel it")
        I, T, scale = image_features, text_features, logit_scale.item()
        dtype, b = accumulation_dtype(I, T), len(I)
        positive = (I.to(dtype) * T.to(dtype)).sum(1) * scale  # [b]
        row_gap = row_logsumexp(I, T, scale, 0, self.tile) - positive
        col_gap = row_logsumexp(T, I, scale, 0, self.tile) - positive
        loss = (softplus(row_gap.double()) + softplus(col_gap.double())).mean() / 2
        weight = 1 / (2 * b)
        at_positive = -(row_gap.sigmoid() + col_gap.sigmoid())[:, None] * (weight * scale)  # [b, 1]
        d_image, d_text = T.to(dtype) * at_positive, I.to(dtype) * at_positive
        add_softmax_gradient(
            d_image, d_text, I, T, scale=scale, weight=weight, row_lse=positive + softplus(row_gap),
            col_lse=positive + softplus(col_gap), shift=None, first=0, side=self.tile,
        )  # fmt: skip
        d_scale = (I.double() * d_image.double()).sum().div(scale).to(dtype).reshape(1)
        return LossOutcome(loss, d_image, d_text, d_scale)
