"""InfoNCE without a gather: no rank holds all features of the global batch (Inf-CL, arXiv
2410.17243).

The texts of each rank visit every rank in two rounds. In the first round they collect the sums of
their columns of the logits, in the second their gradients. Between these, if sums of exponentials
underflow, one more round computes log-sum-exps by the safe way of `clip_train.losses.info_nce`.

A rank needs 8 n N D flops (10 with `gather`), sends 3 N D values (2 N D), and holds the features
and gradients of two ranks at a time.
"""

from dataclasses import dataclass, replace

import torch

from clip_train import dist
from clip_train.losses.exchange import (
    gathered_ids,
    grouped,
    have_negatives,
    send_round,
    share_counts,
)
from clip_train.losses.info_nce import (
    HEADROOM,
    SMALLEST_SUM,
    Normalizers,
    add_softmax_gradient,
)
from clip_train.losses.tiles import (
    AUTO_SIDE,
    Block,
    EntryIds,
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
        N, tile_side = sum(counts), self.tile
        # the index of this rank's first sample in the global batch
        own_first = sum(counts[: dist.rank()])
        dtype = accumulation_dtype(I, T)
        ids_all = gathered_ids(context, counts)
        ids = None if ids_all is None else EntryIds(ids_all, ids_all)
        # [n], as all vectors of rows and columns here
        positive = row_dots(I, T) * scale
        norms = [torch.linalg.vector_norm(x, dim=1, dtype=dtype).max() for x in (I, T)]
        longest = dist.all_gather(torch.stack(norms)[None]).amax(0)
        # see `info_nce._stabiliser`
        shift = (scale * longest[0] * longest[1] - HEADROOM).clamp_(min=0.0)

        row_sums, col_sums = torch.zeros_like(positive), torch.zeros_like(positive)
        for texts, texts_sums, first in send_round(T, col_sums, counts):
            block = Block(I, texts, row=own_first, col=first, ids=ids)
            block_row_sums, block_col_sums = exp_sums(block, scale, shift, tile_side)
            row_sums.add_(block_row_sums)
            texts_sums.add_(block_col_sums)
            del texts, block, texts_sums  # before the next ones arrive
        smallest = torch.minimum(row_sums.min(), col_sums.min())
        # without negatives sums are 0, and safe
        underflows = (smallest <= SMALLEST_SUM) & have_negatives(ids_all, N)
        # the same on all ranks
        unsafe = dist.all_reduce_sum(underflows.double()) > 0
        factored = context.deferred or not unsafe.item()
        if factored:
            row_lse, col_lse = row_sums.log() + shift, col_sums.log() + shift
        else:
            row_lse = torch.full_like(positive, -torch.inf)
            col_lse = torch.full_like(positive, -torch.inf)
            for texts, texts_lse, first in send_round(T, col_lse, counts):
                block = Block(I, texts, row=own_first, col=first, ids=ids)
                block_row_lse = row_logsumexp(block, scale, tile_side).double()
                torch.logaddexp(row_lse, block_row_lse, out=row_lse)
                transposed = Block(texts, I, row=first, col=own_first, ids=ids)
                block_col_lse = row_logsumexp(transposed, scale, tile_side).double()
                torch.logaddexp(texts_lse, block_col_lse, out=texts_lse)
        row_gap, col_gap = row_lse - positive, col_lse - positive
        own = Normalizers.of(
            positive + softplus(row_gap), positive + softplus(col_gap), shift, factored=factored
        )

        weight = 1 / (2 * N)
        # the gradient of each pair's own logit
        d_positive = ((row_gap.sigmoid() + col_gap.sigmoid()) * -weight).to(dtype)[:, None]
        d_image, d_text = T.to(dtype) * d_positive, I.to(dtype) * d_positive
        # texts travel with the normalizers of their columns, in one message
        packed = torch.cat([T.to(dtype), own.cols.to(dtype)[:, None]], dim=1)
        for visitors, d_texts, first in send_round(packed, d_text, counts):
            texts, text_normalizers = visitors[:, :-1], visitors[:, -1]
            add_softmax_gradient(
                Block(I, texts, row=own_first, col=first, ids=ids),
                replace(own, cols=text_normalizers),
                scale=scale,
                tile_side=tile_side,
                weight=weight,
                dA=d_image,
                dB=d_texts,
            )
            del visitors, texts, text_normalizers, d_texts  # before the next ones arrive
        loss = dist.all_reduce_sum((softplus(row_gap) + softplus(col_gap)).sum() * weight)
        return LossOutput.scaled(
            loss,
            d_image,
            d_text,
            d_scale=row_dots(I, d_image).sum(),
            scale=scale,
            unsafe=unsafe if context.deferred else None,
            metrics=grouped(ids_all),
        )
