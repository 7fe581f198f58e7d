"""CLIP's loss and a frozen teacher's opinion of the same batch: OpenCLIP's `DistillClipLoss`, in closed form.

    L = InfoNCE + 1/(2N) sum_i [ -sum_j q_ij log p_ij ] + [ -sum_j q'_ji log p'_ji ]

p, p' are the softmaxes over rows and over columns of the student's logits `S = s I T^T`, q, q' those of the
teacher's `Z = z U V^T`. Both halves have weight 1, as in OpenCLIP; the teacher's width may differ from D.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clip_train import dist
from clip_train.contrastive.exchange import Shares
from clip_train.contrastive.info_nce import softplus
from clip_train.contrastive.seam import LossOutcome
from clip_train.contrastive.tiles import TileBuffer, accumulation_dtype, row_logsumexp, tiles
from clip_train.protocols import Features, MicroBatch

Teacher = Callable[[MicroBatch], Features]


class _Logits:
    """One model's logits: this rank's two sides, everybody's, and the log-sum-exp over the negatives."""

    def __init__(self, image: Tensor, text: Tensor, scale: float, tile: int, shares: Shares):
        self.sides = image, text  # [n, D]
        self.all = dist.gather_rows(image, shares.counts), dist.gather_rows(text, shares.counts)  # [N, D]
        self.scale, self.dtype = scale, accumulation_dtype(image, text)
        I_all, T_all = self.all
        self.positive = (I_all.to(self.dtype) * T_all.to(self.dtype)).sum(1) * scale  # [N]
        negatives = [
            dist.gather_rows(row_logsumexp(A, B, scale, shares.first, tile), shares.counts)
            for A, B in ((image, T_all), (text, I_all))
        ]
        self.gaps = [lse - self.positive for lse in negatives]  # rows', columns'; 1 - p_ii is their sigmoid
        self.lses = [self.positive + softplus(gap) for gap in self.gaps]


class Distillation:
    """See `ContrastiveLoss`; `teacher` is run once per micro-batch in pass 1, and never in pass 2."""

    def __init__(self, teacher: Teacher, tile: int = 2048):
        self.teacher = teacher
        self.tile = tile

    @torch.no_grad()
    def __call__(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        *,
        taught: Features | None = None,
        global_size: int | None = None,
    ) -> LossOutcome:
        """taught: the teacher's features of the same samples, and its factor."""
        if logit_bias is not None:
            raise ValueError("distillation has no logit_bias: its softmax would cancel it")
        if taught is None:
            raise ValueError("distillation needs the teacher's features of the same samples (taught)")
        shares = Shares.of(len(image_features), global_size)
        student = _Logits(image_features, text_features, logit_scale.item(), self.tile, shares)
        teacher = _Logits(taught.image, taught.text, taught.logit_scale.item(), self.tile, shares)
        N, own, scale = shares.total, shares.own, student.scale
        weight = 1 / (2 * N)

        clip_loss = softplus(torch.cat(student.gaps).double()).mean()
        distilled = image_features.new_zeros((), dtype=torch.float64)
        gradients = []
        for side in (0, 1):  # rows of S, then rows of S^T
            value, gradient = self._sweep(student, teacher, side, own)
            distilled += value  # this rank's
            gradients.append(gradient)
        # On the positives: 2 (p - 1) of the loss and of its like, and 1 - q of the teacher, without their ones.
        missing = [gap.sigmoid() for gap in student.gaps]  # 1 - p_ii, of rows and of columns
        missing_taught = [gap.sigmoid().to(student.dtype) for gap in teacher.gaps]
        at_positive = missing_taught[0] + missing_taught[1] - 2 * (missing[0] + missing[1])
        at_positive = (at_positive[own] * (weight * scale))[:, None]  # [n, 1]
        d_image, d_text = (
            gradient.mul_(weight * scale).addcmul_(at_positive, student.sides[1 - side].to(student.dtype))
            for side, gradient in enumerate(gradients)
        )
        on_positives = torch.stack([(-gap).sigmoid() for gap in teacher.gaps]).double()  # q_ii
        on_positives = (on_positives * softplus(torch.stack(student.gaps).double())).sum()  # -q_ii log p_ii
        distill_loss = (on_positives + dist.all_reduce_sum(distilled)) * weight
        d_scale = (image_features.double() * d_image.double()).sum().div(scale).to(student.dtype).reshape(1)
        extra = {"clip_loss": clip_loss.item(), "distill_loss": distill_loss.item()}
        return LossOutcome(clip_loss + distill_loss, d_image, d_text, d_scale, extra=extra)

    def _sweep(self, student: _Logits, teacher: _Logits, side: int, own: slice) -> tuple[Tensor, Tensor]:
        """Off the positives, for this rank's rows of side 0 (images) or 1 (texts):

        `sum q (lse - S)`, and `(2 p + 2 p' - q - q') B` [n, D], which is the gradient but for its factor.
        """
        A, B = student.sides[side], student.all[1 - side]
        U, V = teacher.sides[side], teacher.all[1 - side]
        row_lse, col_lse = student.lses[side][own], student.lses[1 - side]
        row_taught, col_taught = teacher.lses[side][own], teacher.lses[1 - side]
        value, gradient = A.new_zeros((), dtype=torch.float64), A.new_zeros(A.shape, dtype=student.dtype)
        buffers = [TileBuffer(len(A), len(B), self.tile, A, student.dtype) for _ in range(3)]
        for t in tiles(len(A), len(B), self.tile):
            rows, cols = slice(t.i0, t.i1), slice(t.j0, t.j1)
            b = B[cols].to(student.dtype)
            S, Z, G = (buffer.view(t) for buffer in buffers)
            S.zero_().addmm_(A[rows].to(student.dtype), b.t(), alpha=student.scale)
            Z.zero_().addmm_(U[rows].to(student.dtype), V[cols].to(student.dtype).t(), alpha=teacher.scale)
            torch.sub(Z, col_taught[None, cols], out=G).exp_()
            Z.sub_(row_taught[rows, None]).exp_()  # q
            t.fill_positives(Z, own.start, 0.0)
            value += (Z * (row_lse[rows, None] - S)).sum(dtype=torch.float64)
            G.add_(Z).neg_()
            G.add_((S - row_lse[rows, None]).exp_(), alpha=2)
            G.add_(S.sub_(col_lse[None, cols]).exp_(), alpha=2)
            t.fill_positives(G, own.start, 0.0)
            gradient[rows].addmm_(G, b)
        return value, gradient
