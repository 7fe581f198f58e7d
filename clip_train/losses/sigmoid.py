"""The sigmoid loss of SigLIP (arXiv 2303.15343) over the global batch, in closed form over tiles.

    L = 1/N sum_ij softplus(-y_ij z_ij),    z = s I T^T + b,    y_ij = 1 for a pair, else -1

as OpenCLIP defines it: the sum over all N^2 pairs, divided by the N samples. Pairs are independent
of each other, so one tiled pass gives the value and the gradient. There are two ways to combine
every image with every text:

    gather  2 N D features cross the network once; each rank multiplies its images with all texts
            and its texts with all images (8 n N D flops). Gradients are not sent.
    ring: texts travel from rank to rank with the gradient that they collect, and return after W
    hops. 6 n N D flops, and no rank ever holds more than two ranks' texts.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from clip_train import dist
from clip_train.losses.exchange import (
    Pairs,
    gathered_ids,
    grouped,
    send_round,
    share_counts,
)
from clip_train.losses.tiles import AUTO_SIDE, Block, accumulation_dtype, row_dots, softplus
from clip_train.task import NO_CONTEXT, Context, Features, LossOutput, Objective


@dataclass(eq=False)
class SigmoidLoss(Objective):
    """SigLIP's loss. group_role: as of `InfoNCE`; the label of a positive is 1."""

    tile: int = AUTO_SIDE  # side of the largest piece of the logits that exists at once
    exchange: Literal["gather", "ring"] = "gather"
    group_role: Literal["leave_out", "positives"] = "leave_out"
    takes_bias = True
    takes_ids = True

    @torch.no_grad()
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        I, T = features["image"], features["text"]
        if "logit_bias" not in features:
            raise ValueError(
                "loss.kind (sigmoid) needs a model with a logit_bias, and this one has none; "
                "set model.init_logit_bias=-10 model.init_logit_scale=2.3026"
            )
        counts = share_counts(len(I), context.global_size)
        N, scale, bias = sum(counts), features["logit_scale"], features["logit_bias"]
        dtype = accumulation_dtype(I, T)
        ids_all = gathered_ids(context, counts)
        ids = None if ids_all is None else (ids_all, ids_all)

        positive = row_dots(I, T) * scale + bias  # [n], float64
        at_positive = -(-positive).sigmoid()  # [n]: of softplus(-z)
        along = (at_positive / N).to(dtype)[:, None]
        # the positives' part; the tiled passes add to it
        d_image, d_text = T.to(dtype) * along, I.to(dtype) * along
        attract = self.group_role == "positives"
        tiled_pass = partial(
            _tiled_pass, scale=scale, bias=bias, weight=1 / N, side=self.tile, attract=attract
        )
        if self.exchange == "ring" or len(counts) == 1:
            sums = I.new_zeros(2, dtype=torch.float64)
            here = sum(counts[: dist.rank()])
            for texts, of_texts, first in send_round(T, d_text, counts):
                sums += tiled_pass(d_image, of_texts, Block(I, texts, here, first, ids))
        else:
            pairs = Pairs.gathered(I, T, counts, ids_all)
            sums = tiled_pass(d_image, None, pairs.rows)
            tiled_pass(d_text, None, pairs.cols, with_sums=False)
        value, slope = sums

        loss = dist.all_reduce_sum((softplus(-positive).sum() + value) / N)
        d_scale = row_dots(I, d_image).sum()
        d_bias = ((at_positive.sum() + slope) / N).to(dtype).reshape(1)
        return LossOutput.scaled(
            loss, d_image, d_text, d_scale, scale, d_bias=d_bias,
            metrics=grouped(ids_all),
        )  # fmt: skip


def _tiled_pass(
    dA: Tensor,
    dB: Tensor | None,
    block: Block,
    *,
    scale: Tensor,
    bias: Tensor,
    weight: float,
    side: int,
    attract: bool,
    with_sums: bool = True,
) -> Tensor:
    """`dA += weight * G B`, if asked `dB += weight * G^T A`; `G = sigmoid(S + bias)` of negatives.

    attract: entries with equal ids are positives, -sigmoid(-S - bias), except the pairs themselves.
    Returns the sums of `softplus(S + bias)`, or of `softplus(-S - bias)`, and of G, float64 [2]
    (zeros without `with_sums`).
    """
    sums = block.A.new_zeros(2, dtype=torch.float64)
    zero = block.A.new_zeros((), dtype=block.dtype)
    for rows, cols, S, G in block.logits(scale, -bias.to(block.dtype), side):
        same = block.same(rows, cols) if attract else None
        # -inf adds nothing to either sum, and its gradient is zero
        if same is None:
            block.fill(rows, cols, S, -torch.inf)
            torch.sigmoid(S, out=G)
        else:
            sign = 1 - 2 * same.to(S.dtype)
            block.fill_pairs(rows, cols, S.mul_(sign), -torch.inf)
            torch.sigmoid(S, out=G).mul_(sign)
        if with_sums:
            sums[1] += G.sum()
            # softplus; torch's own turns linear at 20
            sums[0] += torch.logaddexp(S, zero, out=S).sum()
        block.add_products(rows, cols, G, weight, dA, dB)
    return sums
