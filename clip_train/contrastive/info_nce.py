"""InfoNCE over the global batch: CLIP's loss (arXiv 2103.00020), in closed form over tiles.

    L = 1/(2N) sum_i [ lse_j(S_ij) - S_ii ] + [ lse_j(S_ji) - S_ii ],     S = s I T^T

Each rank computes the loss and the gradient of the *global mean* with respect to its own features:
OpenCLIP's `--local-loss --gather-with-grad`, without its reduce-scatter in the backward and without
an n x N matrix. What crosses the network, once per step: 2 N D features in one all-gather, N row sums and
N column sums in one all-reduce.
"""

from __future__ import annotations

import torch

from clip_train.contrastive.exchange import Pairs, share_counts
from clip_train.contrastive.objective import NO_CONTEXT, Context, LossOutput, Objective, refuse_bias
from clip_train.contrastive.softmax import Softmaxes, add_cross_entropy_gradient
from clip_train.contrastive.tiles import AUTO_SIDE, accumulation_dtype, row_dots
from clip_train.protocols import Features


def info_nce(pairs: Pairs, scale: float, side: int) -> LossOutput:
    softmaxes = Softmaxes.of(pairs, scale, side)
    dtype = accumulation_dtype(pairs.image, pairs.text)
    d_image, d_text = (torch.zeros_like(x, dtype=dtype) for x in (pairs.image, pairs.text))
    add_cross_entropy_gradient(d_image, d_text, pairs, softmaxes, scale / (2 * len(pairs.image_all)))
    # S is linear in the scale, so its gradient is <I, dI> / s; summed over ranks it is the whole.
    d_scale = row_dots(pairs.image, d_image).sum().div(scale).to(dtype).reshape(1)
    return LossOutput(softmaxes.loss(), d_image, d_text, d_scale)


class InfoNCE(Objective):
    """The symmetric InfoNCE loss. tile: side of the largest piece of the logits that exists at once."""

    def __init__(self, tile: int = AUTO_SIDE):
        self.tile = tile

    @torch.no_grad()
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        refuse_bias(features, "InfoNCE")
        counts = share_counts(len(features.image), context.global_size)
        return info_nce(Pairs.gathered(features.image, features.text, counts), features.logit_scale.item(), self.tile)


class LocalInfoNCE(Objective):
    """InfoNCE of one micro-batch of one rank, and of no other's samples: what plain gradient accumulation minimises.

    Every micro-batch of `b` samples on every rank is a batch of its own, with b - 1 negatives for each sample. Returns
    its part, b / N, of the mean over them. No communication.
    """

    per_micro_batch = True

    def __init__(self, tile: int = AUTO_SIDE):
        self.tile = tile

    @torch.no_grad()
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        refuse_bias(features, "InfoNCE")
        I, T = features.image, features.text
        out = info_nce(Pairs(I, T, I, T), features.logit_scale.item(), self.tile)
        part = len(I) / (context.global_size or len(I))
        return LossOutput(out.loss * part, out.d_image * part, out.d_text * part, out.d_logit_scale * part)
