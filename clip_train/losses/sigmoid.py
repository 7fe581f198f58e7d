"""The sigmoid loss of SigLIP (arXiv 2303.15343) over the global batch, in closed form over tiles.

    L = 1/N sum_ij softplus(-y_ij z_ij),    z = s I T^T + b,    y_ij = 1 for a pair, else -1

This is OpenCLIP's definition: the sum over all N^2 entries, divided by the N samples. Entries are
independent of each other, so one tiled pass gives the value and the gradient. There are two ways to
combine every image with every text:

    gather  2 N D features cross the network once; each rank multiplies its images with all texts
            and its texts with all images (8 n N D flops). Gradients are not sent.
    ring    texts travel from rank to rank with the gradient that they collect, and return after W
            hops (6 n N D flops). No rank ever holds more than two ranks' texts.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

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
from clip_train.losses.tiles import (
    AUTO_SIDE,
    Block,
    EntryIds,
    accumulation_dtype,
    row_dots,
    softplus,
)
from clip_train.task import NO_CONTEXT, Context, Features, LossOutput, Objective


@dataclass(eq=False)
class SigmoidLoss(Objective):
    """SigLIP's loss. group_role: as in `InfoNCE`; a positive is an entry with y_ij = 1."""

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
        ids = None if ids_all is None else EntryIds(ids_all, ids_all)

        positive = row_dots(I, T) * scale + bias  # [n], float64
        # the derivative of softplus(-z) at the pairs, [n]
        slope_at_pairs = -(-positive).sigmoid()
        d_positive = (slope_at_pairs / N).to(dtype)[:, None]
        # the gradient of the pairs; the tiled passes add that of all other entries
        d_image, d_text = T.to(dtype) * d_positive, I.to(dtype) * d_positive
        tiled_pass = partial(
            _tiled_pass,
            scale=scale,
            bias=bias,
            weight=1 / N,
            tile_side=self.tile,
            groups_are_positives=self.group_role == "positives",
        )
        if self.exchange == "ring" or len(counts) == 1:
            own_first = sum(counts[: dist.rank()])
            # this rank's images with all texts
            value = slope = I.new_zeros((), dtype=torch.float64)
            for texts, d_texts, first in send_round(T, d_text, counts):
                block = Block(I, texts, row=own_first, col=first, ids=ids)
                sums = tiled_pass(block, d_image, d_texts)
                value, slope = value + sums.value, slope + sums.slope
                del texts, d_texts, block  # before the next ones arrive
        else:
            pairs = Pairs.gathered(I, T, counts, ids_all)
            value, slope = tiled_pass(pairs.rows, d_image, None)
            # the same entries as seen from the texts: their sums are known
            tiled_pass(pairs.cols, d_text, None, with_sums=False)

        loss = dist.all_reduce_sum((softplus(-positive).sum() + value) / N)
        d_bias = ((slope_at_pairs.sum() + slope) / N).to(dtype).reshape(1)
        return LossOutput.scaled(
            loss,
            d_image,
            d_text,
            d_scale=row_dots(I, d_image).sum(),
            scale=scale,
            d_bias=d_bias,
            metrics=grouped(ids_all),
        )


class EntrySums(NamedTuple):
    """Sums over the entries of a block that are not pairs, float64 []."""

    value: Tensor  # of softplus(-y z)
    slope: Tensor  # of its derivative with respect to z


def _tiled_pass(
    block: Block,
    dA: Tensor,
    dB: Tensor | None,
    *,
    scale: Tensor,
    bias: Tensor,
    weight: float,
    tile_side: int,
    groups_are_positives: bool,
    with_sums: bool = True,
) -> EntrySums:
    """Add the gradient of a block: `dA += weight * G B`, and `dB += weight * G^T A` unless dB is
    None. G is the derivative of softplus(-y z) with respect to z, and 0 for pairs.

    `G = sigmoid(z)` for negatives. Entries with equal ids are left out. With
    `groups_are_positives`, they are positives instead: `G = -sigmoid(-z)`.

    Returns the sums over the block, zeros without `with_sums`.
    """
    value = block.A.new_zeros((), dtype=torch.float64)
    slope = block.A.new_zeros((), dtype=torch.float64)
    zero = block.A.new_zeros((), dtype=block.dtype)
    for rows, cols, S, G in block.logits(scale, -bias.to(block.dtype), tile_side):
        # S becomes -y z, so that softplus(S) is the value. Entries that are left out become -inf,
        # which adds nothing to the value and has no gradient.
        same = block.same(rows, cols) if groups_are_positives else None
        if same is None:
            block.fill(rows, cols, S, -torch.inf)
            torch.sigmoid(S, out=G)
        else:
            sign = 1 - 2 * same.to(S.dtype)
            block.fill_pairs(rows, cols, S.mul_(sign), -torch.inf)
            torch.sigmoid(S, out=G).mul_(sign)
        if with_sums:
            slope += G.sum()
            # softplus; torch's own is linear above 20
            value += torch.logaddexp(S, zero, out=S).sum()
        block.add_products(rows, cols, G, weight=weight, dA=dA, dB=dB)
    return EntrySums(value, slope)
