"""InfoNCE with memory banks of past features (ContAccum, arXiv 2406.12356).

`N` pairs in the global batch, `M` in the banks (one of images, one of texts, equally long), `n` and
`m` of them on this rank. S is the (N + M) x (N + M) matrix of scaled products; gradient reaches the
current features only.

    negatives  L = 1/(2N) sum over current pairs of [ lse_j(S_ij) - S_ii ] + [ lse_j(S_ji) - S_ii ]
    contaccum  L = 1/(2(N+M)) sum over all N + M pairs of the same: past pairs are rows too, as in
               the paper

The logarithm runs over all N + M columns in both. An entry whose row and column are the same sample
by id is left out unless both are current: the past copy of a sample is not a negative of it. Flops
on a rank in addition to the exact loss: `negatives` 16 n M D; `contaccum` 6 m M D more, with m = M
/ W.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from clip_train import dist
from clip_train.batch import shares
from clip_train.losses.exchange import Pairs
from clip_train.losses.info_nce import Softmaxes, info_nce
from clip_train.losses.tiles import AUTO_SIDE, Block, row_dots
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

    Until the banks count, and while they are empty, this is `InfoNCE`. The banks change in
    `after_step` only, so that a loss may be computed twice.
    """

    size: int
    warmup_steps: int = 0  # optimizer steps before the banks count; they fill from the first
    mode: Literal["negatives", "contaccum"] = "negatives"
    tile: int = AUTO_SIDE
    steps: int = 0  # taken with this objective
    # image and text [M, D], ids int64 [M], the oldest first, M <= size
    past: dict[str, Tensor] = field(default_factory=dict)
    # The global batch in sample order, until the step is taken.
    pending: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        scale, deferred = features["logit_scale"], context.deferred
        pairs = Pairs.of(features, context)
        ids = torch.full((len(pairs.image),), NO_ID)
        names = context.columns.get("names")
        if names is not None:
            ids = sample_ids(names)
        ids = dist.gather_rows(ids.to(pairs.image.device, non_blocking=True), pairs.counts)
        self.pending = {"image": pairs.image_all, "text": pairs.text_all, "ids": ids}
        entries = len(self.past["ids"]) if self.past and self.steps >= self.warmup_steps else 0
        if entries:
            are_terms = self.mode == "contaccum"
            output = banked(
                pairs, ids, self.past, scale, self.tile, past_are_terms=are_terms, deferred=deferred
            )
        else:
            output = info_nce(pairs, scale, self.tile, deferred=deferred)
        output.metrics = {"bank_entries": float(entries)}
        return output

    def after_step(self) -> None:
        """Add this step's features to the banks. All ranks add the same."""
        for name, new in self.pending.items():
            both = torch.cat([self.past[name].to(new), new]) if name in self.past else new
            # a copy: the rows that leave do not stay alive
            self.past[name] = both[-self.size :].clone()
        self.pending = {}
        self.steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        past = {f"bank.{name}": tensor for name, tensor in self.past.items()}
        return {"bank.steps": torch.tensor([self.steps]), **past}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """From a checkpoint without banks: start with empty ones."""
        self.steps = int(tensors["bank.steps"].item()) if "bank.steps" in tensors else 0
        self.past = {
            name: tensors[f"bank.{name}"][-self.size :].clone().to(device)
            for name in ("image", "text", "ids")
            if f"bank.{name}" in tensors
        }


def banked(
    pairs: Pairs,
    ids: Tensor,
    past: dict[str, Tensor],
    scale: Tensor,
    side: int,
    *,
    past_are_terms: bool,
    deferred: bool,
) -> LossOutput:
    """S has the N current pairs first, then the M past ones; this rank has a contiguous share.

    ids: of the current ones, int64 [N]. past_are_terms: of the loss, not only negatives.
    """
    N, M = len(ids), len(past["ids"])
    images = torch.cat([pairs.image_all, past["image"].to(pairs.image)])  # [N + M, D]
    texts = torch.cat([pairs.text_all, past["text"].to(pairs.text)])
    ids_all = torch.cat([ids, past["ids"].to(ids)])
    # a current pair is never the copy of another one
    ids_of_past = torch.cat([torch.full_like(ids, NO_ID), past["ids"].to(ids)])
    R = N + M if past_are_terms else N
    counts = shares(M, dist.world_size())
    first, own_rows = N + sum(counts[: dist.rank()]), pairs.own_rows
    share = slice(first, first + counts[dist.rank()])

    def blocks(A: Tensor, A_all: Tensor, B_all: Tensor) -> list[Block]:
        """This rank's current rows, and its share of the past ones."""
        return [
            Block(A, B_all, own_rows.start, 0, (ids_all, ids_of_past)),
            Block(A_all[share], B_all[:R], share.start, 0, (ids_all, ids_all)),
        ]

    rows, cols = blocks(pairs.image, images, texts), blocks(pairs.text, texts, images)
    products = row_dots(images[:R], texts[:R])
    positive = products * scale
    softmaxes = Softmaxes.over(rows, cols, positive, scale, side, pairs.sum, deferred=deferred)
    weight, dtype = 1 / (2 * R), rows[0].dtype
    at_positive = (softmaxes.missing[own_rows, None] * -weight).to(dtype)  # [n, 1]
    d_image, d_text = pairs.text.to(dtype) * at_positive, pairs.image.to(dtype) * at_positive
    # for the scale's gradient alone: no past feature is changed
    d_past = torch.zeros_like(rows[1].A, dtype=dtype)
    softmaxes.add_gradient(d_image, None, rows[0], weight)
    softmaxes.add_gradient(d_past, None, rows[1], weight)
    softmaxes.add_gradient(d_text, None, cols[0], weight, transposed=True)
    # past rows and (where they are terms) positives included
    d_scale = row_dots(pairs.image, d_image).sum() + row_dots(rows[1].A, d_past).sum()
    d_scale -= (softmaxes.missing * products)[share].sum() * weight
    return LossOutput.scaled(
        softmaxes.loss(), d_image, d_text, d_scale, scale, unsafe=softmaxes.unsafe
    )
