"""InfoNCE over the global batch: CLIP's loss (arXiv 2103.00020), in closed form over tiles.

    L = 1/(2N) sum_i [ lse_j(S_ij) - S_ii ] + [ lse_j(S_ji) - S_ii ],     S = s I T^T

Each rank computes the loss and the gradient of the *global mean* with respect to its own features:
OpenCLIP's `--local-loss --gather-with-grad`, without its reduce-scatter in the backward and without
an n x N matrix. Communication per step: 2 N D features in one all-gather, N row sums and N column
sums in one all-reduce.

`Softmaxes` has the softmaxes over rows and columns of S, from sums over tiles and ranks. Memory
banks and distillation need nothing else from the logits. The sums exclude the positive, so loss and
gradient stay precise when the loss is tiny.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from clip_train.losses.exchange import (
    Pairs,
    group_places,
    grouped,
    have_negatives,
    texts_by_image,
)
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

# exponents may reach +60: e^60 times a million columns is still far below float32's e^88
HEADROOM = 60.0
SMALLEST_SUM = 1e-28  # of exponentials: below it, terms that matter may have underflowed


@dataclass(frozen=True)
class Softmaxes:
    """Softmaxes of R rows and R columns. Row x and column x are a pair; vectors are float64 [R]."""

    scale: Tensor  # [1]
    side: int  # of the tiles
    positive: Tensor  # S_xx
    row_gap: Tensor  # log-sum-exp over the negatives of row x, minus S_xx: 1 - p_xx is its sigmoid
    col_gap: Tensor  # of column x
    shift: Tensor | None  # [1], taken from logits before their exponentials; None: of 0
    # with `shift`, every sum of exponentials has its digits; else each takes a maximum of its own
    direct: bool
    # bool []: not so after all, and all that follows must be thrown away; see `Context`
    unsafe: Tensor | None
    size: int  # rows and columns of S: beyond R they are negatives only

    @classmethod
    def over(
        cls,
        rows: list[Block],
        cols: list[Block],
        positive: Tensor,
        scale: Tensor,
        side: int,
        sum_over_ranks: Callable[[Tensor], Tensor],
        *,
        deferred: bool,
        competing: Tensor | bool = True,
    ) -> "Softmaxes":
        """rows: this rank's blocks of S. Over all ranks, they contain every negative of every pair
        once, and one block contains a whole row. cols: the same for S^T.

        B of every block is the same on all ranks. S may have more rows and columns than `positive`
        has entries. competing: by `have_negatives`.
        """
        shift = _stabiliser(rows, cols, scale)
        R, size = len(positive), max(block.cols.stop for block in rows)
        sums = positive.new_zeros((2, size))
        for block in rows:
            row_sums, col_sums = exp_sums(block, scale, shift, side)
            sums[0, block.rows] += row_sums
            sums[1, block.cols] += col_sums
        # one collective: a row's sum is zero on all ranks except its own
        sums = sum_over_ranks(sums)[:, :R]
        # alike on all ranks: they see the same sums. Without negatives they are 0, and safe
        unsafe = (sums.min() <= SMALLEST_SUM) & competing
        direct = deferred or not unsafe.item()
        if direct:
            lse = sums.log() if shift is None else sums.log() + shift
        else:
            lse, shift = positive.new_zeros((2, size)), None
            for direction, blocks in enumerate((rows, cols)):
                for block in blocks:
                    lse[direction, block.rows] = row_logsumexp(block, scale, side).double()
            lse = sum_over_ranks(lse)[:, :R]
        row_gap, col_gap = lse[0] - positive, lse[1] - positive
        flag = unsafe if deferred else None
        return cls(scale, side, positive, row_gap, col_gap, shift, direct, flag, size)

    @classmethod
    def of(cls, pairs: Pairs, scale: Tensor, side: int, *, deferred: bool) -> "Softmaxes":
        """The softmaxes of a batch: every other sample is a negative."""
        positive = row_dots(pairs.image_all, pairs.text_all) * scale
        competing = have_negatives(pairs.ids_all, len(positive))
        return cls.over(
            [pairs.rows], [pairs.cols], positive, scale, side, pairs.sum,
            deferred=deferred, competing=competing,
        )  # fmt: skip

    def loss(self) -> Tensor:
        """The mean cross-entropy of both directions, []."""
        return (softplus(self.row_gap) + softplus(self.col_gap)).mean() / 2

    @property
    def missing(self) -> Tensor:
        """2 - p_xx - p'_xx: minus the loss's derivative with respect to S_xx, without its
        factor."""
        return self.row_gap.sigmoid() + self.col_gap.sigmoid()

    def _lse(self, gap: Tensor) -> Tensor:
        """[size], positives included; a row or column that has no positive has no softmax."""
        beyond = gap.new_full((self.size - len(gap),), torch.inf)
        return torch.cat([self.positive + softplus(gap), beyond])

    def add_gradient(
        self,
        dA: Tensor,
        dB: Tensor | None,
        block: Block,
        weight: float,
        *,
        transposed: bool = False,
        values: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`dA += weight * G B`, if asked `dB += weight * G^T A`; `G = P + P'` on negatives, else 0.

        P and P' are the softmaxes over rows and columns. transposed: the block is one of S^T.
        values: stand for A and B in the two products, as in attention. If both are `direct`, one
        exponential per entry serves both terms. Otherwise each term computes its own, which is safe
        for any logits.
        """
        row_lse, col_lse = self._lse(self.row_gap), self._lse(self.col_gap)
        if transposed:
            row_lse, col_lse = col_lse, row_lse
        of = (row_lse[block.rows], col_lse[block.cols])
        if self.direct:
            shift = 0.0 if self.shift is None else self.shift
            of = ((shift - of[0]).exp(), (shift - of[1]).exp())
        add_softmax_gradient(
            block, of, self.scale, self.shift, self.side, weight, dA, dB, values, direct=self.direct
        )


def add_softmax_gradient(
    block: Block,
    of: tuple[Tensor, Tensor],
    scale: Tensor,
    shift: Tensor | None,
    side: int,
    weight: float,
    dA: Tensor,
    dB: Tensor | None,
    values: tuple[Tensor, Tensor] | None = None,
    *,
    direct: bool,
) -> None:
    """As `Softmaxes.add_gradient`, of a block whose rows and columns have the log-sum-exps `of`.

    of: [r] and [c]; where `direct`, exp(shift - them), so that they are factors.
    """
    of_rows, of_cols = of[0].to(block.dtype)[:, None], of[1].to(block.dtype)[None]
    for rows, cols, S, G in block.logits(scale, shift, side):
        if direct:
            torch.add(of_rows[rows], of_cols[:, cols], out=G)
            G.mul_(S.exp_())
        else:
            torch.sub(S, of_rows[rows], out=G).exp_()
            G.add_(S.sub_(of_cols[:, cols]).exp_())
        block.fill(rows, cols, G, 0.0)
        block.add_products(rows, cols, G, weight, dA, dB, values)


def _stabiliser(rows: list[Block], cols: list[Block], scale: Tensor) -> Tensor | None:
    """From |S_xy| <= s max|I| max|T|: no pass over the logits is needed for a maximum. None: 0."""
    longest = []  # text, image
    for blocks in (rows, cols):
        norms = [
            torch.linalg.vector_norm(b.B, dim=1, dtype=accumulation_dtype(b.B)) for b in blocks
        ]
        longest.append(torch.stack([norm.max() for norm in norms]).max())
    shift = (scale * longest[1] * longest[0] - HEADROOM).clamp_(min=0.0)
    # saves a pass over the logits if the answer needs no wait
    return None if shift.device.type == "cpu" and not shift.any() else shift


def add_cross_entropy_gradient(
    d_image: Tensor,
    d_text: Tensor,
    pairs: Pairs,
    softmaxes: Softmaxes,
    weight: float,
    values: Pairs | None = None,
) -> None:
    """Add `weight * (P + P' - 2) T`, and the same for the texts.

    P and P' are the softmaxes over rows and over columns.

    With weight = 1 / 2N, this is the gradient of `softmaxes.loss()` without the factor s. values:
    whose features stand for I and T in the products; by default `pairs`.
    """
    of, own_rows = values or pairs, pairs.own_rows
    along = (softmaxes.missing[own_rows, None] * -weight).to(d_image.dtype)  # [n, 1]
    d_image.addcmul_(of.text.to(d_image.dtype), along)
    d_text.addcmul_(of.image.to(d_image.dtype), along)
    add = softmaxes.add_gradient
    if len(pairs.counts) <= 1:  # the same tile serves both sides, 8 N^2 D flops in all
        add(d_image, d_text, pairs.rows, weight, values=(of.image, of.text))
    else:  # 10 n N D flops, and no collective
        add(d_image, None, pairs.rows, weight, values=(of.image, of.text_all))
        add(d_text, None, pairs.cols, weight, values=(of.text, of.image_all), transposed=True)


def info_nce(pairs: Pairs, scale: Tensor, side: int, *, deferred: bool) -> LossOutput:
    softmaxes = Softmaxes.of(pairs, scale, side, deferred=deferred)
    dtype = accumulation_dtype(pairs.image, pairs.text)
    d_image, d_text = (torch.zeros_like(x, dtype=dtype) for x in (pairs.image, pairs.text))
    add_cross_entropy_gradient(d_image, d_text, pairs, softmaxes, 1 / (2 * len(pairs.image_all)))
    d_scale = row_dots(pairs.image, d_image).sum()
    return LossOutput.scaled(
        softmaxes.loss(), d_image, d_text, d_scale, scale, unsafe=softmaxes.unsafe
    )


def info_nce_with_negatives(
    pairs: Pairs, scale: Tensor, side: int, *, deferred: bool
) -> LossOutput:
    """`pairs.text` is [n, m D]: of each image its text, then m - 1 texts that are negatives.

    S is [N, m N], the N positives' columns first: each image competes for its text with all m N,
    and each positive for its image with all N. A column beyond them has no softmax of its own.
    """
    n, D = pairs.image.shape
    N, own_rows, ids, ids_beyond = len(pairs.image_all), pairs.own_rows, pairs.ids, None
    negatives, negatives_all = (x[:, D:].reshape(-1, D) for x in (pairs.text, pairs.text_all))
    if pairs.ids_all is not None:
        by_image = pairs.ids_all.view(N, -1)
        first, beyond = by_image[:, 0], by_image[:, 1:]
        ids = (first, torch.cat([first, beyond.flatten()]))
        ids_beyond = (torch.cat([first, beyond[own_rows].flatten()]), first)
    pairs = replace(pairs, text=pairs.text[:, :D], text_all=pairs.text_all[:, :D])
    rows = Block(pairs.image, torch.cat([pairs.text_all, negatives_all]), pairs.first, ids=ids)
    cols = Block(pairs.text, pairs.image_all, pairs.first, ids=ids and (ids[0], ids[0]))
    # no softmax needs to know which ones
    further = Block(negatives, pairs.image_all, N, ids=ids_beyond)
    positive = row_dots(pairs.image_all, pairs.text_all) * scale
    softmaxes = Softmaxes.over(
        [rows], [cols, further], positive, scale, side, pairs.sum,
        deferred=deferred, competing=have_negatives(pairs.ids_all, len(rows.B)),
    )  # fmt: skip
    weight = 1 / (2 * N)
    along = (softmaxes.missing[own_rows, None] * -weight).to(rows.dtype)  # [n, 1]
    d_image, d_text = pairs.text.to(rows.dtype) * along, pairs.image.to(rows.dtype) * along
    d_negatives = torch.zeros_like(negatives, dtype=rows.dtype)
    softmaxes.add_gradient(d_image, None, rows, weight)
    softmaxes.add_gradient(d_text, None, cols, weight, transposed=True)
    softmaxes.add_gradient(d_negatives, None, further, weight, transposed=True)
    d_texts = torch.cat([d_text, d_negatives.view(n, -1)], dim=1).view(-1, D)
    d_scale = row_dots(pairs.image, d_image).sum()
    return LossOutput.scaled(
        softmaxes.loss(), d_image, d_texts, d_scale, scale, unsafe=softmaxes.unsafe
    )


def add_group_targets(output: LossOutput, pairs: Pairs, ids: Tensor, scale: Tensor) -> None:
    """Spread the target of each softmax over the samples of its pair's id, in place (SupCon's
    "out", arXiv 2004.11362). Collective.

    Cross-entropy is linear in its targets. With A_i and B_i the means of the images and texts of
    i's id, the loss grows by s/N sum_i <I_i, T_i - B_i>, which equals s/N sum_i <T_i, I_i - A_i>.
    ids: int64 [N]. ValueError for several texts of an image.
    """
    if len(ids) != len(pairs.image_all):
        raise ValueError("group_role (positives) takes one text for each image; give leave_out")
    place, size = group_places(ids)
    N, of = len(ids), place[pairs.own_rows]
    sides = {"image": (pairs.text, pairs.text_all), "text": (pairs.image, pairs.image_all)}
    for name, (x, x_all) in sides.items():
        gradient = output.gradients[name]
        sums = x_all.new_zeros(x_all.shape, dtype=gradient.dtype).index_add_(
            0, place, x_all.to(gradient.dtype)
        )
        away = (x - sums[of] / size[pairs.own_rows, None]) / N
        gradient += away * scale
    products = row_dots(pairs.text, away).sum()
    output.gradients["logit_scale"] += products
    output.loss = output.loss + pairs.sum(products * scale)[0]


@dataclass(eq=False)
class InfoNCE(Objective):
    """The symmetric InfoNCE loss. With m texts for each image the first is its positive.

    group_role: for texts with equal "ids" (`Context.columns`), whether they are left out as
    negatives of each other's images, or are all positives.
    """

    tile: int = AUTO_SIDE  # side of the largest piece of the logits that exists at once
    group_role: Literal["leave_out", "positives"] = "leave_out"
    takes_ids = True

    @torch.no_grad()
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        image, text = features["image"], features["text"]
        by_image = {**features, "text": texts_by_image(image, text)}
        pairs, scale = Pairs.of(by_image, context), features["logit_scale"]
        ids = pairs.ids_all
        if self.group_role == "positives":
            pairs = replace(pairs, ids_all=None)
        loss = info_nce if len(text) == len(image) else info_nce_with_negatives
        output = loss(pairs, scale, self.tile, deferred=context.deferred)
        output.metrics |= grouped(ids)
        if ids is not None and self.group_role == "positives":
            add_group_targets(output, pairs, ids, scale)
        return output
