"""InfoNCE over the global batch: CLIP's loss (arXiv 2103.00020), in closed form over tiles.

    L = 1/(2N) sum_i [ lse_j(S_ij) - S_ii ] + [ lse_j(S_ji) - S_ii ],     S = s I T^T

Each rank computes the loss and the gradient of the *global mean* with respect to its own features:
OpenCLIP's `--local-loss --gather-with-grad`, without its reduce-scatter in the backward and without
an n x N matrix. What crosses the network, once per step: 2 N D features in one all-gather, N row sums and
N column sums in one all-reduce.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clip_train.contrastive.exchange import Pairs, Shares
from clip_train.contrastive.seam import LossOutcome
from clip_train.contrastive.softmax import Softmaxes, add_cross_entropy_gradient
from clip_train.contrastive.tiles import AUTO_SIDE, accumulation_dtype, row_dots


def info_nce(pairs: Pairs, scale: float, side: int) -> LossOutcome:
    softmaxes = Softmaxes.of(pairs, scale, side)
    dtype = accumulation_dtype(pairs.image, pairs.text)
    d_image, d_text = (torch.zeros_like(x, dtype=dtype) for x in (pairs.image, pairs.text))
    add_cross_entropy_gradient(d_image, d_text, pairs, softmaxes, scale / (2 * pairs.shares.total), side)
    # S is linear in the scale, so its gradient is <I, dI> / s; summed over ranks it is the whole.
    d_scale = row_dots(pairs.image, d_image).sum().div(scale).to(dtype).reshape(1)
    return LossOutcome(softmaxes.loss(), d_image, d_text, d_scale)


class InfoNCE:
    """The symmetric InfoNCE loss; see `ContrastiveLoss` for the contract.

    `tile`: side of the largest piece of the logits that exists at once.
    """

    def __init__(self, tile: int = AUTO_SIDE):
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
        if logit_bias is not None:
            raise ValueError("InfoNCE has no logit_bias: its softmax would cancel it")
        shares = self._shares(len(image_features), global_size)
        return info_nce(Pairs.gathered(image_features, text_features, shares), logit_scale.item(), self.tile)

    def _shares(self, n: int, global_size: int | None) -> Shares:
        return Shares.of(n, global_size)


class LocalInfoNCE(InfoNCE):
    """InfoNCE of the samples given, and of no other rank's: what plain gradient accumulation minimises.

    Every micro-batch of `b` samples on every rank is a batch of its own, with b - 1 negatives for each sample.
    Its loss is the *mean* over them, whatever the global batch: the caller weighs micro-batches. No communication.
    `train_step` accumulates with it plainly: forward and backward of each micro-batch in turn.
    """

    def _shares(self, n: int, global_size: int | None) -> Shares:
        return Shares.alone(n)
