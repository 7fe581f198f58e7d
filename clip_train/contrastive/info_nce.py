"""InfoNCE over the global batch: CLIP's loss (arXiv 2103.00020), in closed form over tiles.

    L = 1/(2N) sum_i [ lse_j(S_ij) - S_ii ] + [ lse_j(S_ji) - S_ii ],     S = s I T^T

Each rank computes the loss and the gradient of the *global mean* with respect to its own features:
OpenCLIP's `--local-loss --gather-with-grad`, without its reduce-scatter in the backward and without
an n x N matrix. What crosses the network, once per step: 2 N D features in one all-gather, N row sums and
N column sums in one all-reduce.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from clip_train import dist
from clip_train.contrastive.exchange import Shares, gather_pairs
from clip_train.contrastive.seam import LossOutcome
from clip_train.contrastive.tiles import (
    AUTO_SIDE,
    accumulation_dtype,
    add_softmax_gradient,
    exp_sums,
    row_dots,
    row_logsumexp,
)

HEADROOM = 60.0  # exponents may reach +60: e^60 times a million columns is still far below float32's e^88
SMALLEST_SUM = 1e-28  # of exponentials: below it, terms that matter may have underflowed


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) for every x; torch's own turns linear at 20, which is 2e-9 off."""
    return torch.logaddexp(x, x.new_zeros(()))


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
        I, T = image_features, text_features
        shares = Shares.of(len(I), global_size)
        N, own, scale = shares.total, shares.own, logit_scale.item()
        I_all, T_all = gather_pairs(I, T, shares)  # [N, D]
        dtype = accumulation_dtype(I, T)

        positive = row_dots(I_all, T_all) * scale  # [N], float64 as all vectors of this length here
        row_negatives, col_negatives, shift = self._negatives(I, T, I_all, T_all, scale, shares.first)  # [N], [N]
        # With the positive outside the sum, loss and gradient keep their digits when the loss is tiny.
        row_gap, col_gap = row_negatives - positive, col_negatives - positive
        row_loss, col_loss = softplus(row_gap), softplus(col_gap)
        loss = (row_loss + col_loss).mean() / 2
        row_lse, col_lse = positive + row_loss, positive + col_loss

        weight = 1 / (2 * N)
        along = -(row_gap.sigmoid() + col_gap.sigmoid())[own, None] * (weight * scale)  # [n, 1]
        d_image, d_text = (x.to(dtype) * along.to(dtype) for x in (T, I))  # the positives' part
        sweep = partial(
            add_softmax_gradient, scale=scale, weight=weight, shift=shift, first=shares.first, side=self.tile
        )
        if len(I) == N:  # one rank: the same tile serves both sides, 8 N^2 D flops in all
            sweep(d_image, d_text, I, T, row_lse=row_lse, col_lse=col_lse)
        else:  # 10 n N D flops, and no collective
            sweep(d_image, None, I, T_all, row_lse=row_lse[own], col_lse=col_lse)
            sweep(d_text, None, T, I_all, row_lse=col_lse[own], col_lse=row_lse)
        # S is linear in the scale, so its gradient is <I, dI> / s; summed over ranks it is the whole.
        d_scale = row_dots(I, d_image).sum().div(scale).to(dtype).reshape(1)
        return LossOutcome(loss, d_image, d_text, d_scale)

    def _negatives(
        self,
        I: Tensor,
        T: Tensor,
        I_all: Tensor,
        T_all: Tensor,
        scale: float,
        first: int,
    ) -> tuple[Tensor, Tensor, float | None]:
        """log-sum-exp of the negatives of every image [N] and every text [N], float64, and the shift that worked.

        |S_ij| <= s max|I| max|T| (Cauchy-Schwarz), so no pass over the logits is needed for a maximum.
        All ranks see the same sums, so they take the same branch.
        """
        longest_image, longest_text = (
            torch.linalg.vector_norm(x, dim=1, dtype=accumulation_dtype(x)).max().item() for x in (I_all, T_all)
        )
        shift = max(scale * longest_image * longest_text - HEADROOM, 0.0)
        sums = I.new_zeros((2, len(I_all)), dtype=torch.float64)  # this rank's rows, and its part of all columns
        sums[0, first : first + len(I)], sums[1] = exp_sums(I, T_all, scale, shift, first, self.tile)
        rows, cols = dist.all_reduce_sum(sums)  # one collective: a row's sum is zero on all ranks but its own
        if sums.min().item() > SMALLEST_SUM:
            return rows.log() + shift, cols.log() + shift, shift
        sums.zero_()
        sums[0, first : first + len(I)] = row_logsumexp(I, T_all, scale, first, self.tile)
        sums[1, first : first + len(I)] = row_logsumexp(T, I_all, scale, first, self.tile)
        rows, cols = dist.all_reduce_sum(sums)
        return rows, cols, None
