"""InfoNCE with memory banks of past features: ContAccum (arXiv 2406.12356) on top of the exact global batch.

`N` pairs in the global batch, `M` in the banks (one of images, one of texts, equally long), `n` and `m` of them
on this rank. S is the (N + M) x (N + M) matrix of scaled products; gradient reaches the current features only.

    negatives    L = 1/(2N)     sum over current pairs of   [ lse_j(S_ij) - S_ii ] + [ lse_j(S_ji) - S_ii ]
    contaccum    L = 1/(2(N+M)) sum over all N + M pairs of the same: past pairs are rows too, as in the paper

The logarithm runs over all N + M columns in both. An entry whose row and column are the same sample by id is
left out unless both are current: the past copy of a sample is no negative of it. Flops on a rank beside the
exact loss: `negatives` 12 n M D; `contaccum` 6 m M D more, with m = M / W.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from clip_train import dist
from clip_train.contrastive.exchange import Pairs, Shares
from clip_train.contrastive.info_nce import info_nce
from clip_train.contrastive.objective import NO_CONTEXT, Context, LossOutput, Objective, refuse_bias
from clip_train.contrastive.softmax import Softmaxes
from clip_train.contrastive.tiles import AUTO_SIDE, Block, accumulation_dtype, add_softmax_gradient, row_dots
from clip_train.protocols import Features

NO_ID = -1  # of a sample that nobody named; equal to no sample's


def sample_ids(keys: Iterable[str]) -> Tensor:
    """Sample keys -> int64 [n], the same in every process: 63 bits of a hash."""
    digests = (hashlib.blake2b(key.encode(), digest_size=8).digest() for key in keys)
    return torch.tensor([int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=torch.int64)


@dataclass
class Bank:
    """Past pairs, the oldest first. A FIFO of at most `size`; the order makes a resumed sum the same to the bit."""

    size: int
    image: Tensor | None = None  # [M, D]
    text: Tensor | None = None  # [M, D]
    ids: Tensor | None = None  # int64 [M], NO_ID where unknown

    def __len__(self) -> int:
        return 0 if self.image is None else len(self.image)

    def push(self, image: Tensor, text: Tensor, ids: Tensor) -> None:
        """Add the global batch in sample order; the oldest leave."""
        self.image = self._pushed(self.image, image)
        self.text = self._pushed(self.text, text)
        self.ids = self._pushed(self.ids, ids)

    def _pushed(self, old: Tensor | None, new: Tensor) -> Tensor:
        both = new.detach() if old is None else torch.cat([old.to(new.device, new.dtype), new.detach()])
        return both[-self.size :].clone()  # a copy: neither the caller's memory nor the dropped rows stay alive


class MemoryBank(Objective):
    """The exact InfoNCE of the global batch with `size` past pairs on top.

    warmup_steps: optimizer steps before the banks count (they fill from the first). Until then, and while the
    banks are empty, this is `InfoNCE`. The banks change in `after_step` only, so that a loss may be computed twice.
    """

    def __init__(
        self,
        size: int,
        warmup_steps: int = 0,
        mode: Literal["negatives", "contaccum"] = "negatives",
        tile: int = AUTO_SIDE,
    ):
        self.bank = Bank(size)
        self.warmup_steps = warmup_steps
        self.mode = mode
        self.tile = tile
        self.steps = 0  # taken with this objective
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None  # the global batch, until the step is taken

    @torch.no_grad()
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        refuse_bias(features, "a memory bank")
        n, scale = len(features.image), features.logit_scale.item()
        shares = Shares.of(n, context.global_size)
        pairs = Pairs.gathered(features.image, features.text, shares)
        own_ids = sample_ids(context.keys) if context.keys else torch.full((n,), NO_ID)
        ids_all = shares.gather(own_ids.to(features.image.device))
        self._seen = pairs.image_all, pairs.text_all, ids_all
        exact = info_nce(pairs, scale, self.tile)
        counts = len(self.bank) > 0 and self.steps >= self.warmup_steps
        output = _Banked(self, pairs, scale, ids_all if context.keys else None).output() if counts else exact
        output.metrics = {"bank_entries": float(len(self.bank) if counts else 0), **_compared(output, exact)}
        return output

    def after_step(self) -> None:
        """The optimizer has stepped: this step's features become past ones. All ranks push the same."""
        assert self._seen is not None
        self.bank.push(*self._seen)
        self._seen = None
        self.steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        out = {"bank.steps": torch.tensor([self.steps])}
        if self.bank.image is not None and self.bank.text is not None and self.bank.ids is not None:
            out |= {"bank.image": self.bank.image, "bank.text": self.bank.text, "bank.ids": self.bank.ids}
        return out

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """From a checkpoint without banks: start with empty ones."""
        self.steps = int(tensors["bank.steps"].item()) if "bank.steps" in tensors else 0
        self.bank = Bank(self.bank.size)
        if "bank.image" in tensors:
            self.bank.push(*(tensors[f"bank.{name}"].to(device) for name in ("image", "text", "ids")))


def _compared(output: LossOutput, exact: LossOutput) -> dict[str, float]:
    """How the gradient with respect to the global batch's features differs from that of the exact loss."""

    def dot(a: LossOutput, b: LossOutput) -> float:
        pairs = ((a.d_image, b.d_image), (a.d_text, b.d_text))
        return sum((x.double() * y.double()).sum().item() for x, y in pairs)

    own, other, both = dist.sum_scalars(dot(output, output), dot(exact, exact), dot(output, exact))
    return {
        "exact_loss": exact.loss.item(),
        "feature_grad_norm": math.sqrt(own),
        "exact_feature_grad_norm": math.sqrt(other),
        "feature_grad_cosine": both / math.sqrt(own * other) if own * other > 0 else 1.0,
    }


class _Banked:
    """One evaluation with banks that count. Past pairs are divided among the ranks in contiguous shares.

    S has the N current pairs first, then the M past ones.
    """

    def __init__(self, loss: MemoryBank, pairs: Pairs, scale: float, ids: Tensor | None):
        bank = loss.bank
        assert bank.image is not None and bank.text is not None and bank.ids is not None
        self.pairs, self.scale, self.side = pairs, scale, loss.tile
        self.past_I, self.past_T = bank.image.to(pairs.image), bank.text.to(pairs.text)  # [M, D]
        self.past_are_terms = loss.mode == "contaccum"  # of the loss, not only negatives
        self.N, self.M = pairs.shares.total, len(bank)
        share = -(-self.M // dist.world_size())  # past pairs on each rank; fewer, or none, on the last
        self.share = slice(min(dist.rank() * share, self.M), min((dist.rank() + 1) * share, self.M))
        self.ids, self.past_ids = ids, bank.ids

    def output(self) -> LossOutput:
        pairs, own = self.pairs, self.pairs.shares.own
        I, T, dtype = pairs.image, pairs.text, accumulation_dtype(pairs.image, pairs.text)
        rows = self._blocks(I, pairs.text_all, self.past_I, self.past_T)
        cols = self._blocks(T, pairs.image_all, self.past_T, self.past_I)
        softmaxes = Softmaxes.over(rows, cols, self._positive(), self.scale, self.side, pairs.shares.sum)
        weight = 1 / (2 * len(softmaxes.positive))

        row_lse, col_lse = self._padded(softmaxes.row_lse), self._padded(softmaxes.col_lse)
        tiled_pass = partial(
            add_softmax_gradient, scale=self.scale, weight=weight * self.scale, shift=softmaxes.shift, side=self.side
        )
        at_positive = (softmaxes.missing[own, None] * (-weight * self.scale)).to(dtype)  # [n, 1]
        d_image, d_text = T.to(dtype) * at_positive, I.to(dtype) * at_positive
        from_past_images = torch.zeros_like(d_text)
        for d, block in ((d_image, rows[0]), (d_image, rows[1])):
            tiled_pass(d, None, block, row_lse=row_lse, col_lse=col_lse)
        for d, block in ((d_text, cols[0]), (from_past_images, cols[1])):
            tiled_pass(d, None, block, row_lse=col_lse, col_lse=row_lse)
        d_text += from_past_images

        # S is linear in the scale. <I, dI> counts current rows with all columns; past rows with current
        # columns are <T, what past images gave to dT>; past rows with past columns have no feature gradient.
        d_scale = row_dots(I, d_image).sum() + row_dots(T, from_past_images).sum()
        if self.past_are_terms:
            among = rows[3]
            unused = torch.zeros_like(among.A, dtype=dtype)
            tiled_pass(unused, None, among, row_lse=row_lse, col_lse=col_lse)
            at_positives = (softmaxes.missing * softmaxes.positive)[among.rows].sum() * weight
            d_scale += row_dots(among.A, unused).sum() - at_positives
        return LossOutput(softmaxes.loss(), d_image, d_text, d_scale.div(self.scale).to(dtype).reshape(1))

    def _blocks(self, A: Tensor, B_all: Tensor, past_A: Tensor, past_B: Tensor) -> list[Block]:
        """This rank's rows: its current ones, then its share of the past ones; A is its side [n, D]."""
        first, N, past = self.pairs.shares.first(), self.N, past_A[self.share]
        own_ids = None if self.ids is None else self.ids[self.pairs.shares.own]
        share_ids = self.past_ids[self.share]
        blocks = [
            Block(A, B_all, first),
            Block(A, past_B, first, N, None if own_ids is None else (own_ids, self.past_ids)),
            Block(past, B_all, N + self.share.start, 0, None if self.ids is None else (share_ids, self.ids)),
        ]
        if self.past_are_terms:
            among_ids = None if self.ids is None else (share_ids, self.past_ids)
            blocks.append(Block(past, past_B, N + self.share.start, N, among_ids))
        return blocks

    def _positive(self) -> Tensor:
        """S_xx of every pair that is a term of the loss."""
        positive = row_dots(self.pairs.image_all, self.pairs.text_all)
        if self.past_are_terms:
            positive = torch.cat([positive, row_dots(self.past_I, self.past_T)])
        return positive * self.scale

    def _padded(self, lse: Tensor) -> Tensor:
        """[N + M]: pairs that are no terms of the loss have no softmax."""
        return torch.cat([lse, lse.new_full((self.N + self.M - len(lse),), torch.inf)])
