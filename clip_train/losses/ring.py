"""InfoNCE without a gather: no rank holds all features of the global batch (Inf-CL, arXiv
2410.17243).

The texts of each rank visit every rank twice, together with the values that they collect. The first
round sums over rows and columns of the logits, the second computes the gradients. A rank needs 8 n
N D flops (10 with `gather`), sends 3 N D values (2 N D), and holds the features and gradients of
two ranks at a time.
"""

from dataclasses import dataclass

import torch

from clip_train import dist
from clip_train.losses.exchange import (
    gathered_ids,
    grouped,
    have_negatives,
    send_round,
    share_counts,
)
from clip_train.losses.info_nce import HEADROOM, SMALLEST_SUM, add_softmax_gradient
from clip_train.losses.tiles import (
    AUTO_SIDE,
    Block,
    accumulation_dtype,
    exp_sums,
    row_dots,
    row_logsumexp,
    softplus,
)
from clip_train.task import NO_CONTEXT, Context, Features, LossOutput, Objective


@dataclass(eq=False)
class RingInfoNCE(Objective):
    """The loss of `InfoNCE`, without its gather."""

    tile: int = AUTO_SIDE  # side of the largest piece of the logits that exists at once
    takes_ids = True

    @torch.no_grad()
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        I, T, scale = features["image"], features["text"], features["logit_scale"]
        if "logit_bias" in features:
            raise ValueError("a loss with a softmax has no logit_bias: it would cancel the bias")
        counts = share_counts(len(I), context.global_size)
        N, here, side = sum(counts), sum(counts[: dist.rank()]), self.tile
        dtype = accumulation_dtype(I, T)
        ids_all = gathered_ids(context, counts)
        ids = None if ids_all is None else (ids_all, ids_all)
        positive = row_dots(I, T) * scale  # [n], as all vectors of rows and columns here
        norms = [torch.linalg.vector_norm(x, dim=1, dtype=dtype).max() for x in (I, T)]
        longest = dist.all_gather(torch.stack(norms)[None]).amax(0)
        shift = (scale * longest[0] * longest[1] - HEADROOM).clamp_(min=0.0)

        row_sums, col_sums = torch.zeros_like(positive), torch.zeros_like(positive)
        for texts, of_texts, first in send_round(T, col_sums, counts):
            rows, cols = exp_sums(Block(I, texts, here, first, ids), scale, shift, side)
            row_sums.add_(rows)
            of_texts.add_(cols)
        smallest = torch.minimum(row_sums.min(), col_sums.min())
        # alike on all ranks. Without negatives sums are 0, and safe
        unsafe = (
            dist.all_reduce_sum(((smallest <= SMALLEST_SUM) & have_negatives(ids_all, N)).double())
            > 0
        )
        direct = context.deferred or not unsafe.item()
        row_lse, col_lse = row_sums.log() + shift, col_sums.log() + shift

        if not direct:
            row_lse, col_lse = (torch.full_like(positive, -torch.inf) for _ in range(2))
            for texts, of_texts, first in send_round(T, col_lse, counts):
                rows = row_logsumexp(Block(I, texts, here, first, ids), scale, side)
                torch.logaddexp(row_lse, rows.double(), out=row_lse)
                cols = row_logsumexp(Block(texts, I, first, here, ids), scale, side)
                torch.logaddexp(of_texts, cols.double(), out=of_texts)
        row_gap, col_gap = row_lse - positive, col_lse - positive
        of_rows, of_cols = positive + softplus(row_gap), positive + softplus(col_gap)
        if direct:
            of_rows, of_cols = (shift - of_rows).exp(), (shift - of_cols).exp()

        weight = 1 / (2 * N)
        along = ((row_gap.sigmoid() + col_gap.sigmoid()) * -weight).to(dtype)[:, None]
        d_image, d_text = T.to(dtype) * along, I.to(dtype) * along
        visitors = torch.cat([T.to(dtype), of_cols.to(dtype)[:, None]], dim=1)
        for texts, of_texts, first in send_round(visitors, d_text, counts):
            block = Block(I, texts[:, :-1], here, first, ids)
            of = (of_rows, texts[:, -1])
            used = shift if direct else None
            add_softmax_gradient(
                block, of, scale, used, side, weight, d_image, of_texts, direct=direct
            )
        loss = dist.all_reduce_sum((softplus(row_gap) + softplus(col_gap)).sum() * weight)
        return LossOutput.scaled(
            loss, d_image, d_text, row_dots(I, d_image).sum(), scale,
            unsafe=unsafe if context.deferred else None,
            metrics=grouped(ids_all),
        )  # fmt: skip
