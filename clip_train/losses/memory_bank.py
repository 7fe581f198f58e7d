"""InfoNCE with memory banks of past features (ContAccum, arXiv 2406.12356).

The global batch has `N` pairs, of which this rank holds `n`. The banks, one of images and one of
texts, have `M` past pairs, of which this rank computes `m = M / W`. S is the (N + M) x (N + M)
matrix of scaled products, current pairs first. Only the current features have a gradient.

    negatives  L = 1/(2N)     sum over the N current pairs i of  (lse_i - S_ii) + (lse'_i - S_ii)
    contaccum  L = 1/(2(N+M)) sum over all N + M pairs i of      (lse_i - S_ii) + (lse'_i - S_ii)

lse_i and lse'_i are the log-sum-exps over all N + M entries of row i and of column i of S, in both
modes. `contaccum` is the paper's loss: its past pairs are terms of the loss, too.

A past copy of a sample is not a negative of it: entries off the diagonal whose row and column have
the same sample id are left out, unless both are current.

In addition to the exact loss, a rank needs 16 n M D flops with `negatives`, and 6 m M D more with
`contaccum`.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from clip_train import dist
from clip_train.batch import shares
from clip_train.losses.exchange import Pairs
from clip_train.losses.info_nce import Softmaxes, info_nce
from clip_train.losses.tiles import AUTO_SIDE, Block, EntryIds, row_dots
from clip_train.task import (
    NO_CONTEXT,
    NO_ID,
    Context,
    Features,
    LossOutput,
    Objective,
    sample_ids,
)


@dataclass(eq=False)
class MemoryBank(Objective):
    """The exact InfoNCE of the global batch and `size` past pairs.

    In the first `warmup_steps`, and while the banks are empty, this is `InfoNCE`. The banks change
    in `after_step` only, so that a loss may be computed twice.
    """

    size: int
    # optimizer steps before the loss uses the banks; they fill from the first step on
    warmup_steps: int = 0
    mode: Literal["negatives", "contaccum"] = "negatives"
    tile: int = AUTO_SIDE  # side of the largest piece of the logits that exists at once
    steps: int = 0  # optimizer steps taken with this objective
    # "image" and "text" [M, D], "ids" int64 [M], the oldest first, M <= size
    past: dict[str, Tensor] = field(default_factory=dict)
    # the same values of the global batch, in sample order, until `after_step`
    pending: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        scale, deferred = features["logit_scale"], context.deferred
        pairs = Pairs.of(features, context)
        names = context.columns.get("names")
        if names is None:
            own_ids = torch.full((len(pairs.image),), NO_ID)
        else:
            own_ids = sample_ids(names)
        own_ids = own_ids.to(pairs.image.device, non_blocking=True)
        ids = dist.gather_rows(own_ids, pairs.counts)  # [N]
        self.pending = {"image": pairs.image_all, "text": pairs.text_all, "ids": ids}
        entries = 0
        if self.past and self.steps >= self.warmup_steps:
            entries = len(self.past["ids"])
        if entries:
            output = banked(
                pairs,
                ids,
                self.past,
                scale=scale,
                tile_side=self.tile,
                past_are_terms=self.mode == "contaccum",
                deferred=deferred,
            )
        else:
            output = info_nce(pairs, scale, self.tile, deferred=deferred)
        output.metrics = {"bank_entries": float(entries)}
        return output

    def after_step(self) -> None:
        """Add this step's features to the banks. All ranks add the same."""
        for name, new in self.pending.items():
            entries = new
            if name in self.past:
                entries = torch.cat([self.past[name].to(new), new])
            # a copy frees the memory of the rows that leave
            self.past[name] = entries[-self.size :].clone()
        self.pending = {}
        self.steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        past = {f"bank.{name}": tensor for name, tensor in self.past.items()}
        return {"bank.steps": torch.tensor([self.steps]), **past}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Restore the banks. If the checkpoint has none, start with empty ones."""
        self.steps = 0
        if "bank.steps" in tensors:
            self.steps = int(tensors["bank.steps"].item())
        self.past = {
            name: tensors[f"bank.{name}"][-self.size :].clone().to(device)
            for name in ("image", "text", "ids")
            if f"bank.{name}" in tensors
        }


@dataclass(frozen=True)
class OwnBlocks:
    """This rank's rows of S, or of S^T."""

    current: Block  # its n current pairs against all N + M columns
    # Its m past pairs against the columns that are terms of the loss. Mode `negatives` has them,
    # too: past rows are entries of the current columns' softmaxes, and dL/ds needs them.
    past: Block


def banked(
    pairs: Pairs,
    ids: Tensor,
    past: dict[str, Tensor],
    *,
    scale: Tensor,
    tile_side: int,
    past_are_terms: bool,
    deferred: bool,
) -> LossOutput:
    """Compute the loss of the current pairs and a filled bank. Collective.

    Args:
        ids: of the current pairs, int64 [N].
        past: the banks, as `MemoryBank.past`.
        past_are_terms: past pairs are terms of the loss; else they are only negatives.
    """
    N, M = len(ids), len(past["ids"])
    num_terms = N + M if past_are_terms else N
    images = torch.cat([pairs.image_all, past["image"].to(pairs.image)])  # [N + M, D]
    texts = torch.cat([pairs.text_all, past["text"].to(pairs.text)])
    past_ids = past["ids"].to(ids)
    all_ids = torch.cat([ids, past_ids])
    # [N + M]: NO_ID in current columns, so current pairs stay negatives of each other
    ids_without_current = torch.cat([torch.full_like(ids, NO_ID), past_ids])
    counts = shares(M, dist.world_size())
    first_past = N + sum(counts[: dist.rank()])
    own_past = slice(first_past, first_past + counts[dist.rank()])
    own_rows = pairs.own_rows

    def own_blocks(current: Tensor, rows: Tensor, cols: Tensor) -> OwnBlocks:
        """current: [n, D]. rows, cols: the features of all rows and columns, [N + M, D]."""
        return OwnBlocks(
            current=Block(
                A=current,
                B=cols,
                row=own_rows.start,
                ids=EntryIds(rows=all_ids, cols=ids_without_current),
            ),
            past=Block(
                A=rows[own_past],
                B=cols[:num_terms],
                row=own_past.start,
                ids=EntryIds(rows=all_ids, cols=all_ids),
            ),
        )

    image_rows = own_blocks(pairs.image, images, texts)
    text_rows = own_blocks(pairs.text, texts, images)
    products = row_dots(images[:num_terms], texts[:num_terms])
    softmaxes = Softmaxes.over(
        [image_rows.current, image_rows.past],
        [text_rows.current, text_rows.past],
        positive=products * scale,
        scale=scale,
        tile_side=tile_side,
        sum_over_ranks=pairs.sum,
        deferred=deferred,
    )
    weight, dtype = 1 / (2 * num_terms), image_rows.current.dtype
    # the gradient of each current pair's own logit: dL/dS_ii = -weight * (2 - p_ii - p'_ii)
    d_positive = (softmaxes.missing[own_rows, None] * -weight).to(dtype)  # [n, 1]
    d_image = pairs.text.to(dtype) * d_positive
    d_text = pairs.image.to(dtype) * d_positive
    softmaxes.add_gradient(d_image, None, image_rows.current, weight)
    softmaxes.add_gradient(d_text, None, text_rows.current, weight, transposed=True)
    # d_past is only needed for the scale's gradient; past features get none
    d_past = torch.zeros_like(image_rows.past.A, dtype=dtype)
    softmaxes.add_gradient(d_past, None, image_rows.past, weight)
    # The scale's gradient, with G = dL/dS and S = s I T^T:
    #   dL/ds = sum_ij G_ij <I_i, T_j> = sum_i <I_i, (G T)_i>
    # d_image is (G T)_i of the current rows, and d_past that of the past rows without their positives
    d_scale = row_dots(pairs.image, d_image).sum() + row_dots(image_rows.past.A, d_past).sum()
    if past_are_terms:
        # the positives of the past rows: G_ii = -weight * missing_i
        d_scale -= (softmaxes.missing * products)[own_past].sum() * weight
    return LossOutput.scaled(
        softmaxes.loss(), d_image, d_text, d_scale, scale, unsafe=softmaxes.unsafe
    )
