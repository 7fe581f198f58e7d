"""InfoNCE over the global batch: CLIP's loss (arXiv 2103.00020), in closed form over tiles.

    L = 1/(2N) sum_i [ lse_j(S_ij) - S_ii ] + [ lse_j(S_ji) - S_ii ],     S = s I T^T

Each rank computes the loss and the gradient of the *global mean* with respect to its own features:
OpenCLIP's `--local-loss --gather-with-grad`, without its reduce-scatter in the backward and without
an n x N matrix. Communication per step: 2 N D features in one all-gather, N row sums and N column
sums in one all-reduce.

`Softmaxes` has the softmaxes over rows and columns of S, from sums over tiles and ranks. Memory
banks and distillation need nothing else from the logits. The sums exclude the positive, so loss and
gradient stay precise when the loss is tiny.

There are two ways to compute the softmaxes. The fast one is factored: with one `shift` for all
logits, the softmax over row x is exp(S_xy - shift) * exp(shift - lse_x), and the softmax over
column y has the same first factor. If sums of exponentials underflow under that shift, the safe way
computes each softmax as exp(S_xy - lse).
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
    EntryIds,
    Values,
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
class Normalizers:
    """What turns the logits of a block into its softmaxes over rows and over columns."""

    rows: Tensor  # [r]: factors exp(shift - lse) if `factored`, else the log-sum-exps
    cols: Tensor  # [c]
    # [1], subtracted from the logits before their exponentials; None: 0. Always None if not
    # `factored`.
    shift: Tensor | None
    factored: bool

    @classmethod
    def of(
        cls, row_lse: Tensor, col_lse: Tensor, shift: Tensor | None, *, factored: bool
    ) -> "Normalizers":
        """The normalizers of rows and columns with these log-sum-exps."""
        if not factored:
            return cls(row_lse, col_lse, None, factored)
        subtracted = 0.0 if shift is None else shift
        return cls((subtracted - row_lse).exp(), (subtracted - col_lse).exp(), shift, factored)


@dataclass(frozen=True)
class Softmaxes:
    """Softmaxes of R rows and R columns. Row x and column x are a pair; vectors are float64 [R]."""

    scale: Tensor  # [1]
    tile_side: int
    positive: Tensor  # S_xx
    row_gap: Tensor  # log-sum-exp over the negatives of row x, minus S_xx: 1 - p_xx is its sigmoid
    col_gap: Tensor  # the same for column x
    # [1], subtracted from logits before their exponentials; None: 0
    shift: Tensor | None
    # the fast way of the module's docstring
    factored: bool
    # bool []: sums underflowed after all, and all results must be discarded; see `Context`
    unsafe: Tensor | None
    # rows and columns of S; those from R on are negatives only
    size: int

    @classmethod
    def over(
        cls,
        rows: list[Block],
        cols: list[Block],
        positive: Tensor,
        scale: Tensor,
        tile_side: int,
        sum_over_ranks: Callable[[Tensor], Tensor],
        *,
        deferred: bool,
        competing: Tensor | bool = True,
    ) -> "Softmaxes":
        """Compute the softmaxes. Collective.

        Args:
            rows: this rank's blocks of S. Over all ranks, they contain every negative of every pair
                once, and one block contains a whole row. B of every block is the same on all
                ranks.
            cols: the same for S^T.
            positive: [R]. S may have more rows and columns.
            sum_over_ranks: adds a tensor over the ranks that share the batch.
            deferred: see `Context`.
            competing: whether rows have negatives, as `have_negatives` returns it.
        """
        shift = _stabiliser(rows, cols, scale)
        R, size = len(positive), max(block.cols.stop for block in rows)
        sums = positive.new_zeros((2, size))
        for block in rows:
            row_sums, col_sums = exp_sums(block, scale, shift, tile_side)
            sums[0, block.rows] += row_sums
            sums[1, block.cols] += col_sums
        # one collective: a row's sum is zero on all ranks except its own
        sums = sum_over_ranks(sums)[:, :R]
        # the same on all ranks, because the sums are. Without negatives the sums are 0, and safe
        unsafe = (sums.min() <= SMALLEST_SUM) & competing
        factored = deferred or not unsafe.item()
        if factored:
            lse = sums.log()
            if shift is not None:
                lse = lse + shift
        else:
            lse, shift = positive.new_zeros((2, size)), None
            for direction, blocks in enumerate((rows, cols)):
                for block in blocks:
                    lse[direction, block.rows] = row_logsumexp(block, scale, tile_side).double()
            lse = sum_over_ranks(lse)[:, :R]
        return cls(
            scale=scale,
            tile_side=tile_side,
            positive=positive,
            row_gap=lse[0] - positive,
            col_gap=lse[1] - positive,
            shift=shift,
            factored=factored,
            unsafe=unsafe if deferred else None,
            size=size,
        )

    @classmethod
    def of(cls, pairs: Pairs, scale: Tensor, tile_side: int, *, deferred: bool) -> "Softmaxes":
        """Compute the softmaxes of a batch: every other sample is a negative. Collective."""
        positive = row_dots(pairs.image_all, pairs.text_all) * scale
        competing = have_negatives(pairs.ids_all, len(positive))
        return cls.over(
            [pairs.rows], [pairs.cols], positive, scale, tile_side, pairs.sum,
            deferred=deferred, competing=competing,
        )  # fmt: skip

    def loss(self) -> Tensor:
        """The mean cross-entropy of both directions, []."""
        return (softplus(self.row_gap) + softplus(self.col_gap)).mean() / 2

    @property
    def missing(self) -> Tensor:
        """2 - p_xx - p'_xx, [R]. The derivative of the loss with respect to S_xx is minus this,
        times 1 / (2 R)."""
        return self.row_gap.sigmoid() + self.col_gap.sigmoid()

    def _lse(self, gap: Tensor) -> Tensor:
        """The log-sum-exps [size] with positives. They are infinite for rows or columns without a
        positive, whose softmaxes are 0 then."""
        without_positive = gap.new_full((self.size - len(gap),), torch.inf)
        return torch.cat([self.positive + softplus(gap), without_positive])

    def add_gradient(
        self,
        dA: Tensor,
        dB: Tensor | None,
        block: Block,
        weight: float,
        *,
        transposed: bool = False,
        values: Values | None = None,
    ) -> None:
        """Add the gradient of a block: `dA += weight * G B`, and `dB += weight * G^T A` unless dB is
        None. `G = P + P'` on negatives, else 0.

        P and P' are the softmaxes over rows and columns. transposed: the block is one of S^T.
        values: used in place of A and B in the two products. If the softmaxes are `factored`, one
        exponential per entry serves both. Otherwise each is computed by itself, which is safe for
        any logits.
        """
        row_lse, col_lse = self._lse(self.row_gap), self._lse(self.col_gap)
        if transposed:
            row_lse, col_lse = col_lse, row_lse
        normalizers = Normalizers.of(
            row_lse[block.rows], col_lse[block.cols], self.shift, factored=self.factored
        )
        add_softmax_gradient(
            block,
            normalizers,
            scale=self.scale,
            tile_side=self.tile_side,
            weight=weight,
            dA=dA,
            dB=dB,
            values=values,
        )


def add_softmax_gradient(
    block: Block,
    normalizers: Normalizers,
    *,
    scale: Tensor,
    tile_side: int,
    weight: float,
    dA: Tensor,
    dB: Tensor | None,
    values: Values | None = None,
) -> None:
    """Add the gradient of a block as `Softmaxes.add_gradient` does, for the given normalizers."""
    of_rows = normalizers.rows.to(block.dtype)[:, None]
    of_cols = normalizers.cols.to(block.dtype)[None]
    for rows, cols, S, G in block.logits(scale, normalizers.shift, tile_side):
        if normalizers.factored:
            torch.add(of_rows[rows], of_cols[:, cols], out=G)
            G.mul_(S.exp_())
        else:
            torch.sub(S, of_rows[rows], out=G).exp_()
            G.add_(S.sub_(of_cols[:, cols]).exp_())
        block.fill(rows, cols, G, 0.0)
        block.add_products(rows, cols, G, weight=weight, dA=dA, dB=dB, values=values)


def _stabiliser(rows: list[Block], cols: list[Block], scale: Tensor) -> Tensor | None:
    """Choose the shift of the logits from |S_xy| <= s max|I| max|T|, which needs no pass over the
    logits. None: 0."""
    longest_text, longest_image = _longest(rows), _longest(cols)
    shift = (scale * longest_image * longest_text - HEADROOM).clamp_(min=0.0)
    # None saves a pass over the logits. On a GPU, `any` would wait for the device.
    return None if shift.device.type == "cpu" and not shift.any() else shift


def _longest(blocks: list[Block]) -> Tensor:
    """The largest norm of a row of B in these blocks, []."""
    norms = [torch.linalg.vector_norm(b.B, dim=1, dtype=accumulation_dtype(b.B)) for b in blocks]
    return torch.stack([norm.max() for norm in norms]).max()


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
    the features that replace I and T in the products; by default `pairs`.
    """
    if values is None:
        values = pairs
    # the gradient of each pair's own logit
    d_positive = (softmaxes.missing[pairs.own_rows, None] * -weight).to(d_image.dtype)  # [n, 1]
    d_image.addcmul_(values.text.to(d_image.dtype), d_positive)
    d_text.addcmul_(values.image.to(d_image.dtype), d_positive)
    add = softmaxes.add_gradient
    image, text = values.image, values.text
    if len(pairs.counts) <= 1:
        # the same tile serves images and texts, 8 N^2 D flops in all
        add(d_image, d_text, pairs.rows, weight, values=Values(image, text))
    else:
        # 10 n N D flops, and no collective
        texts, images = values.text_all, values.image_all
        add(d_image, None, pairs.rows, weight, values=Values(image, texts))
        add(d_text, None, pairs.cols, weight, values=Values(text, images), transposed=True)


def info_nce(pairs: Pairs, scale: Tensor, tile_side: int, *, deferred: bool) -> LossOutput:
    """Compute the loss of one text for each image. Collective."""
    softmaxes = Softmaxes.of(pairs, scale, tile_side, deferred=deferred)
    dtype = accumulation_dtype(pairs.image, pairs.text)
    d_image = torch.zeros_like(pairs.image, dtype=dtype)
    d_text = torch.zeros_like(pairs.text, dtype=dtype)
    add_cross_entropy_gradient(d_image, d_text, pairs, softmaxes, 1 / (2 * len(pairs.image_all)))
    d_scale = row_dots(pairs.image, d_image).sum()
    return LossOutput.scaled(
        softmaxes.loss(), d_image, d_text, d_scale, scale, unsafe=softmaxes.unsafe
    )


def info_nce_with_negatives(
    pairs: Pairs, scale: Tensor, tile_side: int, *, deferred: bool
) -> LossOutput:
    """Compute the loss of m texts for each image. Collective.

    `pairs.text` is [n, m D]: each image's positive, then its m - 1 texts that are only negatives.

    S is [N, m N]. Its first N columns are the positives. Each image competes for its positive with
    all m N texts, and each positive for its image with all N images. The other columns have no
    softmax of their own.
    """
    n, D = pairs.image.shape
    N, own_rows = len(pairs.image_all), pairs.own_rows
    negatives = pairs.text[:, D:].reshape(-1, D)  # [n (m - 1), D]
    negatives_all = pairs.text_all[:, D:].reshape(-1, D)
    row_ids = col_ids = negative_ids = None
    if pairs.ids_all is not None:
        ids_by_image = pairs.ids_all.view(N, -1)
        of_positives, of_negatives = ids_by_image[:, 0], ids_by_image[:, 1:]
        all_ids = torch.cat([of_positives, of_negatives.flatten()])
        own_negatives = torch.cat([of_positives, of_negatives[own_rows].flatten()])
        row_ids = EntryIds(of_positives, all_ids)
        col_ids = EntryIds(of_positives, of_positives)
        negative_ids = EntryIds(own_negatives, of_positives)
    pairs = replace(pairs, text=pairs.text[:, :D], text_all=pairs.text_all[:, :D])
    texts_all = torch.cat([pairs.text_all, negatives_all])  # [m N, D]
    rows = Block(pairs.image, texts_all, row=pairs.first, ids=row_ids)
    cols = Block(pairs.text, pairs.image_all, row=pairs.first, ids=col_ids)
    # every rank numbers its negatives from N on: without softmaxes of their own, it does not matter
    # which rows of S^T they are
    negative_cols = Block(negatives, pairs.image_all, row=N, ids=negative_ids)
    positive = row_dots(pairs.image_all, pairs.text_all) * scale
    softmaxes = Softmaxes.over(
        [rows], [cols, negative_cols], positive, scale, tile_side, pairs.sum,
        deferred=deferred, competing=have_negatives(pairs.ids_all, len(rows.B)),
    )  # fmt: skip
    weight = 1 / (2 * N)
    # the gradient of each pair's own logit
    d_positive = (softmaxes.missing[own_rows, None] * -weight).to(rows.dtype)  # [n, 1]
    d_image = pairs.text.to(rows.dtype) * d_positive
    d_text = pairs.image.to(rows.dtype) * d_positive
    d_negatives = torch.zeros_like(negatives, dtype=rows.dtype)
    softmaxes.add_gradient(d_image, None, rows, weight)
    softmaxes.add_gradient(d_text, None, cols, weight, transposed=True)
    softmaxes.add_gradient(d_negatives, None, negative_cols, weight, transposed=True)
    d_texts = torch.cat([d_text, d_negatives.view(n, -1)], dim=1).view(-1, D)
    d_scale = row_dots(pairs.image, d_image).sum()
    return LossOutput.scaled(
        softmaxes.loss(), d_image, d_texts, d_scale, scale, unsafe=softmaxes.unsafe
    )


def add_group_targets(output: LossOutput, pairs: Pairs, ids: Tensor, scale: Tensor) -> None:
    """Spread the target of each softmax over the samples of its pair's id, in place (SupCon's
    "out", arXiv 2004.11362). Collective.

    Cross-entropy is linear in its targets. Let A_i and B_i be the means of the images and of the
    texts whose id is i's. The loss grows by s/N sum_i <I_i, T_i - B_i>, which equals
    s/N sum_i <T_i, I_i - A_i>.

    ids: int64 [N]. Raises ValueError for several texts of an image.
    """
    if len(ids) != len(pairs.image_all):
        raise ValueError("group_role (positives) takes one text for each image; give leave_out")
    groups, sizes = group_places(ids)
    N, own_groups, own_sizes = len(ids), groups[pairs.own_rows], sizes[pairs.own_rows, None]

    def excess(x: Tensor, x_all: Tensor, dtype: torch.dtype) -> Tensor:
        """(T_i - B_i) / N for the texts of this rank, or (I_i - A_i) / N for its images."""
        sums = x_all.new_zeros(x_all.shape, dtype=dtype).index_add_(0, groups, x_all.to(dtype))
        return (x - sums[own_groups] / own_sizes) / N

    d_image, d_text = output.gradients["image"], output.gradients["text"]
    d_image += excess(pairs.text, pairs.text_all, d_image.dtype) * scale
    excess_of_images = excess(pairs.image, pairs.image_all, d_text.dtype)
    d_text += excess_of_images * scale
    products = row_dots(pairs.text, excess_of_images).sum()
    output.gradients["logit_scale"] += products
    output.loss = output.loss + pairs.sum(products * scale)[0]


@dataclass(eq=False)
class InfoNCE(Objective):
    """The symmetric InfoNCE loss. If an image has several texts, the first is its positive.

    group_role: texts with equal "ids" (`Context.columns`) are either left out of the negatives of
    each other's images, or are all positives.
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
