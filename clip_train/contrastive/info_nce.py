"""InfoNCE over the global batch: CLIP's loss (arXiv 2103.00020), in closed form over tiles.

    L = 1/(2N) sum_i [ lse_j(S_ij) - S_ii ] + [ lse_j(S_ji) - S_ii ],     S = s I T^T

Each rank computes the loss and the gradient of the *global mean* with respect to its own features:
OpenCLIP's `--local-loss --gather-with-grad`, without its reduce-scatter in the backward and without
an n x N matrix. What crosses the network, once per step: 2 N D features in one all-gather, N row
sums and N column sums in one all-reduce.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clip_train.contrastive.exchange import Pairs
from clip_train.contrastive.softmax import Softmaxes, add_cross_entropy_gradient
from clip_train.contrastive.tiles import AUTO_SIDE, accumulation_dtype, row_dots
from clip_train.task import NO_CONTEXT, Context, Features, LossOutput, Objective


def info_nce(pairs: Pairs, scale: Tensor, side: int, *, deferred: bool) -> LossOutput:
    softmaxes = Softmaxes.of(pairs, scale, side, deferred=deferred)
    dtype = accumulation_dtype(pairs.image, pairs.text)
    d_image, d_text = (torch.zeros_like(x, dtype=dtype) for x in (pairs.image, pairs.text))
    add_cross_entropy_gradient(d_image, d_text, pairs, softmaxes, 1 / (2 * len(pairs.image_all)))
    d_scale = row_dots(pairs.image, d_image).sum()
    return LossOutput.scaled(
        softmaxes.loss(), d_image, d_text, d_scale, scale, unsafe=softmaxes.unsafe
    )


@dataclass(eq=False)
class InfoNCE(Objective):
    """The symmetric InfoNCE loss."""

    tile: int = AUTO_SIDE  # side of the largest piece of the logits that exists at once

    @torch.no_grad()
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        pairs = Pairs.of(features, context.global_size)
        return info_nce(pairs, features["logit_scale"], self.tile, deferred=context.deferred)
