"""InfoNCE with memory banks of past features: ContAccum (arXiv 2406.12356) on top of the exact global batch.

`N` pairs in the global batch, `M` in the banks (one of images, one of texts, equally long), `n` and `m` of them
on this rank. S is the (N + M) x (N + M) matrix of scaled products; gradient reaches the current features only.

    negatives    L = 1/(2N)     sum over current pairs of   [ lse_j(S_ij) - S_ii ] + [ lse_j(S_ji) - S_ii ]
    contaccum    L = 1/(2(N+M)) sum over all N + M pairs of the same: past pairs are rows too, as in the paper

The logarithm runs over all N + M columns in both. An entry whose row and column are the same sample by id is
left out unless both are current: the past copy of a sample is no negative of it. Flops on a rank beside the
exact loss: `negatives` 8 n M D; `contaccum` 8 n M D + 4 m N D + 8 m M D, with m = M / W.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from clip_train import dist
from clip_train.contrastive.exchange import Shares
from clip_train.contrastive.info_nce import InfoNCE, softplus
from clip_train.contrastive.seam import LossOutcome
from clip_train.contrastive.tiles import (
    Tile,
    TileBuffer,
    accumulation_dtype,
    add_softmax_gradient,
    row_logsumexp,
    tiles,
)

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


class MemoryBank:
    """The exact InfoNCE of the global batch with `size` past pairs on top; see `ContrastiveLoss`.

    warmup_steps: optimizer steps before the banks count (they fill from the first). Until then, and while the
    banks are empty, this is `InfoNCE`. The banks change in `after_step` only, so that a loss may be computed twice.
    """

    def __init__(
        self,
        size: int,
        warmup_steps: int = 0,
        mode: Literal["negatives", "contaccum"] = "negatives",
        tile: int = 2048,
    ):
        self.bank = Bank(size)
        self.warmup_steps = warmup_steps
        self.mode = mode
        self.tile = tile
        self.steps = 0  # taken with this objective
        self._exact = InfoNCE(tile=tile)
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None  # the global batch, until the step is taken

    @torch.no_grad()
    def __call__(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        global_size: int | None = None,
    ) -> LossOutcome:
        """ids: int64 [n] from `sample_ids`; without them nothing is known to be the same sample."""
        I, T = image_features, text_features
        shares = Shares.of(len(I), global_size)
        exact = self._exact(I, T, logit_scale, logit_bias, global_size=global_size)
        known = ids is not None
        own_ids = torch.full((len(I),), NO_ID) if ids is None else ids
        own_ids = own_ids.to(I.device)
        I_all, T_all, ids_all = (dist.gather_rows(x, shares.counts) for x in (I, T, own_ids))
        self._seen = I_all, T_all, ids_all
        counts = len(self.bank) > 0 and self.steps >= self.warmup_steps
        outcome = exact
        if counts:
            outcome = _Banked(
                self, I, T, I_all, T_all, logit_scale.item(), ids_all if known else None, shares
            ).outcome()
        outcome.extra = {"bank_entries": float(len(self.bank) if counts else 0), **_compared(outcome, exact)}
        return outcome

    def after_step(self) -> None:
        """The optimizer has stepped: this step's features become past ones. All ranks push the same."""
        assert self._seen is not None
        self.bank.push(*self._seen)
        self._seen = None
        self.steps += 1

    def state_tensors(self) -> dict[str, Tensor]:
        """For a checkpoint; the same on all ranks, and good on any number of them."""
        out = {"bank.steps": torch.tensor([self.steps])}
        if self.bank.image is not None and self.bank.text is not None and self.bank.ids is not None:
            out |= {"bank.image": self.bank.image, "bank.text": self.bank.text, "bank.ids": self.bank.ids}
        return out

    def load_state_tensors(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Take over what `state_tensors` gave; from a checkpoint without it, start with empty banks."""
        self.steps = int(tensors["bank.steps"].item()) if "bank.steps" in tensors else 0
        self.bank = Bank(self.bank.size)
        if "bank.image" in tensors:
            self.bank.push(*(tensors[f"bank.{name}"].to(device) for name in ("image", "text", "ids")))


def _compared(outcome: LossOutcome, exact: LossOutcome) -> dict[str, float]:
    """How the gradient with respect to the global batch's features differs from that of the exact loss."""

    def dot(a: LossOutcome, b: LossOutcome) -> float:
        pairs = ((a.d_image, b.d_image), (a.d_text, b.d_text))
        return sum((x.double() * y.double()).sum().item() for x, y in pairs)

    own, other, both = dist.sum_scalars(dot(outcome, outcome), dot(exact, exact), dot(outcome, exact))
    return {
        "exact_loss": exact.loss.item(),
        "feature_grad_norm": math.sqrt(own),
        "exact_feature_grad_norm": math.sqrt(other),
        "feature_grad_cosine": both / math.sqrt(own * other) if own * other > 0 else 1.0,
    }


@dataclass(frozen=True)
class Excluded:
    """Which entries of a block are no negatives."""

    row_ids: Tensor | None  # int64 [rows]; None: ids are not known
    col_ids: Tensor | None  # int64 [cols]
    first: int | None = None  # row i's own pair is column `first + i`; None: not in this block

    def fill(self, S: Tensor, t: Tile, value: float) -> None:
        if self.first is not None:
            t.fill_positives(S, self.first, value)
        if self.row_ids is not None and self.col_ids is not None:
            rows, cols = self.row_ids[t.i0 : t.i1, None], self.col_ids[None, t.j0 : t.j1]
            S.masked_fill_((rows == cols) & (cols != NO_ID), value)


def masked_logsumexp(A: Tensor, B: Tensor, scale: float, excluded: Excluded, side: int) -> Tensor:
    """log of the row sums [rows] of `exp(scale A B^T)` without the excluded entries; any logits are safe."""
    dtype = accumulation_dtype(A, B)
    total = A.new_full((len(A),), -torch.inf, dtype=dtype)
    buffer = TileBuffer(len(A), len(B), side, A, dtype)
    for t in tiles(len(A), len(B), side):
        S = buffer.view(t).zero_()
        S.addmm_(A[t.i0 : t.i1].to(dtype), B[t.j0 : t.j1].to(dtype).t(), alpha=scale)
        excluded.fill(S, t, -torch.inf)
        total[t.i0 : t.i1] = torch.logaddexp(total[t.i0 : t.i1], S.logsumexp(1))
    return total


def masked_gradient(
    A: Tensor,
    B: Tensor,
    *,
    scale: float,
    weight: float,
    row_lse: Tensor | None,
    col_lse: Tensor | None,
    excluded: Excluded,
    side: int,
) -> Tensor:
    """`weight * scale * G B` [rows, D] with `G = exp(S - row_lse) + exp(S - col_lse)`, zero where excluded.

    A side whose pairs are no terms of the loss has no LSE (None), and no term in G.
    """
    dtype = accumulation_dtype(A, B)
    dA = A.new_zeros(A.shape, dtype=dtype)
    buffer, spare = (TileBuffer(len(A), len(B), side, A, dtype) for _ in range(2))
    for t in tiles(len(A), len(B), side):
        b = B[t.j0 : t.j1].to(dtype)
        S, G = buffer.view(t), spare.view(t).zero_()
        S.zero_().addmm_(A[t.i0 : t.i1].to(dtype), b.t(), alpha=scale)
        excluded.fill(S, t, -torch.inf)
        if row_lse is not None:
            G.add_((S - row_lse[t.i0 : t.i1, None]).exp_())
        if col_lse is not None:
            G.add_(S.sub_(col_lse[None, t.j0 : t.j1]).exp_())
        dA[t.i0 : t.i1].addmm_(G, b, alpha=weight * scale)
    return dA


@dataclass
class _Terms:
    """Pairs that are terms of the loss: the N current ones, or the M past ones. Each [N] or [M]."""

    positive: Tensor  # S_ii
    row_gap: Tensor  # log-sum-exp over the negatives of row i, minus S_ii
    col_gap: Tensor  # of column i

    def total(self) -> Tensor:
        """Sum of both cross-entropies, in float64."""
        return (softplus(self.row_gap.double()) + softplus(self.col_gap.double())).sum()

    def missing(self) -> Tensor:
        """2 - p_ii - p'_ii: minus the gradient at the positives, but for its factor."""
        return self.row_gap.sigmoid() + self.col_gap.sigmoid()

    @property
    def row_lse(self) -> Tensor:
        return self.positive + softplus(self.row_gap)

    @property
    def col_lse(self) -> Tensor:
        return self.positive + softplus(self.col_gap)


class _Banked:
    """One evaluation with banks that count. Past pairs are dealt to the ranks in contiguous shares."""

    def __init__(
        self,
        loss: MemoryBank,
        I: Tensor,
        T: Tensor,
        I_all: Tensor,
        T_all: Tensor,
        scale: float,
        ids: Tensor | None,
        shares: Shares,
    ):
        bank = loss.bank
        assert bank.image is not None and bank.text is not None and bank.ids is not None
        self.I, self.T, self.I_all, self.T_all, self.scale = I, T, I_all, T_all, scale
        self.past_I, self.past_T = bank.image.to(I), bank.text.to(T)  # [M, D]
        self.rows = loss.mode == "contaccum"  # are past pairs terms of the loss?
        self.side = loss.tile
        self.dtype = accumulation_dtype(I, T)
        M = len(bank)
        self.N, self.M, self.first = shares.total, M, shares.first
        self.counts, self.own = shares.counts, shares.own
        self.share = -(-M // dist.world_size())  # past pairs on each rank; fewer, or none, on the last
        self.past = slice(min(dist.rank() * self.share, M), min((dist.rank() + 1) * self.share, M))
        self.ids, self.past_ids = ids, None if ids is None else bank.ids

    def outcome(self) -> LossOutcome:
        positive = self._positive(self.I_all, self.T_all)
        current = _Terms(
            positive,
            self._current_negatives(self.I, self.T_all, self.past_T) - positive,
            self._current_negatives(self.T, self.I_all, self.past_I) - positive,
        )
        past = self._past_terms() if self.rows else None
        pairs = self.N + (self.M if past else 0)
        total = current.total() + (past.total() if past else 0)
        weight = 1 / (2 * pairs)

        row_lse, col_lse = current.row_lse, current.col_lse
        at_positive = -current.missing()[self.own, None] * (weight * self.scale)  # [n, 1]
        d_image, d_text = self.T.to(self.dtype) * at_positive, self.I.to(self.dtype) * at_positive
        for d, A, B, own_lse, other_lse in (
            (d_image, self.I, self.T_all, row_lse, col_lse),
            (d_text, self.T, self.I_all, col_lse, row_lse),
        ):
            add_softmax_gradient(
                d, None, A, B, scale=self.scale, weight=weight, row_lse=own_lse[self.own], col_lse=other_lse,
                shift=None, first=self.first, side=self.side,
            )  # fmt: skip
        d_image += self._from_past(self.I, self.past_T, row_lse, past.col_lse if past else None, weight)
        from_past_images = self._from_past(self.T, self.past_I, col_lse, past.row_lse if past else None, weight)
        d_text += from_past_images

        # S is linear in the scale. <I, dI> counts current rows with all columns; past rows with current
        # columns are <T, what past images gave to dT>; past rows with past columns have no feature gradient.
        d_scale = (self.I.double() * d_image.double()).sum() + (self.T.double() * from_past_images.double()).sum()
        if past is not None:
            d_scale = d_scale + self._scale_among_past(past, weight)
        return LossOutcome(total * weight, d_image, d_text, d_scale.div(self.scale).to(self.dtype).reshape(1))

    def _past_terms(self) -> _Terms:
        positive = self._positive(self.past_I, self.past_T)
        return _Terms(
            positive,
            self._past_negatives(self.past_I, self.T_all, self.past_T) - positive,
            self._past_negatives(self.past_T, self.I_all, self.past_I) - positive,
        )

    def _scale_among_past(self, past: _Terms, weight: float) -> Tensor:
        """`sum dL/dS S` over this rank's share of the past rows and all past columns, [] float64."""
        own = self.past_I[self.past]
        d_own = masked_gradient(
            own, self.past_T, scale=self.scale, weight=weight, row_lse=past.row_lse[self.past], col_lse=past.col_lse,
            excluded=self._among_past(), side=self.side,
        )  # fmt: skip
        at_positives = (past.missing() * past.positive)[self.past].double().sum() * weight
        return (own.double() * d_own.double()).sum() - at_positives

    def _positive(self, A: Tensor, B: Tensor) -> Tensor:
        return (A.to(self.dtype) * B.to(self.dtype)).sum(1) * self.scale

    def _against_past(self) -> Excluded:
        """This rank's current pairs against all past ones."""
        return Excluded(None if self.ids is None else self.ids[self.own], self.past_ids)

    def _among_past(self) -> Excluded:
        """This rank's share of the past pairs against all past ones."""
        return Excluded(None if self.past_ids is None else self.past_ids[self.past], self.past_ids, self.past.start)

    def _current_negatives(self, A: Tensor, B_all: Tensor, past_B: Tensor) -> Tensor:
        """log-sum-exp over the negatives of every current row [N]; A is this rank's side [n, D]."""
        current = row_logsumexp(A, B_all, self.scale, self.first, self.side)
        past = masked_logsumexp(A, past_B, self.scale, self._against_past(), self.side)
        return dist.gather_rows(torch.logaddexp(current, past), self.counts)

    def _past_negatives(self, past_A: Tensor, B_all: Tensor, past_B: Tensor) -> Tensor:
        """The same for every past row [M]; each rank sums its share."""
        A = past_A[self.past]
        with_current = Excluded(None if self.past_ids is None else self.past_ids[self.past], self.ids)
        lse = torch.logaddexp(
            masked_logsumexp(A, B_all, self.scale, with_current, self.side),
            masked_logsumexp(A, past_B, self.scale, self._among_past(), self.side),
        )
        padded = lse.new_zeros(self.share)
        padded[: len(lse)] = lse
        return dist.all_gather(padded)[: self.M]

    def _from_past(self, A: Tensor, past_B: Tensor, lse: Tensor, past_lse: Tensor | None, weight: float) -> Tensor:
        """What the past side's features give to the gradient of this rank's current ones [n, D]."""
        return masked_gradient(
            A, past_B, scale=self.scale, weight=weight, row_lse=lse[self.own], col_lse=past_lse,
            excluded=self._against_past(), side=self.side,
        )  # fmt: skip
