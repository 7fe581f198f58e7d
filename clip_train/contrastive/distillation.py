"""CLIP's loss plus the cross-entropy with a frozen teacher's softmaxes, in closed form.

    L = InfoNCE + 1/(2N) sum_i [ -sum_j q_ij log p_ij ] + [ -sum_j q'_ji log p'_ji ]

p, p' are the softmaxes over rows and over columns of the student's logits `S = s I T^T`, q, q'
those of the teacher's `Z = z U V^T`. Both halves have weight 1, as in OpenCLIP's `DistillClipLoss`;
the teacher's width may differ from D.

`-sum_j q_ij log p_ij = (lse_i - S_ii) - sum_j (q_ij - 1_ij) S_ij`: the second half is InfoNCE
again, minus something linear in S. So its gradient is InfoNCE's with p in place of 1 and q in place
of p, and its value, too, falls out of a product with features.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from clip_train.contrastive.exchange import Pairs
from clip_train.contrastive.info_nce import Softmaxes, add_cross_entropy_gradient
from clip_train.contrastive.tiles import AUTO_SIDE, accumulation_dtype, row_dots
from clip_train.task import NO_CONTEXT, Context, Features, LossOutput, MicroBatch, Objective

Teacher = Callable[[MicroBatch], Features]


@dataclass(eq=False)
class Distillation(Objective):
    """The loss of the formula above."""

    # Normalized features of any width, and the factor, for a micro-batch of the first pass.
    teacher: Teacher
    tile: int = AUTO_SIDE

    def prepare(self, micro_batch: MicroBatch) -> Features:
        return self.teacher(micro_batch)

    @torch.no_grad()
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        target = context.prepared
        if target is None:
            raise ValueError(
                "distillation needs the teacher's features of the same samples (context.prepared)"
            )
        I, T, scale = features["image"], features["text"], features["logit_scale"]
        side, deferred = self.tile, context.deferred
        dtype = accumulation_dtype(I, T)
        pairs = Pairs.of(features, context)
        of_teacher = Pairs.gathered(
            target["image"].to(dtype), target["text"].to(dtype), pairs.counts
        )
        student = Softmaxes.of(pairs, scale, side, deferred=deferred)
        teacher = Softmaxes.of(of_teacher, target["logit_scale"], side, deferred=deferred)

        weight = 1 / (2 * len(pairs.image_all))
        d_image, d_text = torch.zeros_like(I, dtype=dtype), torch.zeros_like(T, dtype=dtype)
        add_cross_entropy_gradient(d_image, d_text, of_teacher, teacher, -weight, values=pairs)
        clip_loss = student.loss()
        # - 1/2N sum (q + q' - 2) S is s <I, dI> so far, summed over ranks
        distill_loss = clip_loss + pairs.sum(row_dots(I, d_image).sum() * scale)[0]
        add_cross_entropy_gradient(d_image, d_text, pairs, student, 2 * weight)  # of both halves
        d_scale, loss = row_dots(I, d_image).sum(), clip_loss + distill_loss
        either = [each.unsafe for each in (student, teacher) if each.unsafe is not None]
        unsafe = torch.stack(either).any() if either else None
        metrics = {"clip_loss": clip_loss, "distill_loss": distill_loss}
        return LossOutput.scaled(
            loss, d_image, d_text, d_scale, scale, metrics=metrics, unsafe=unsafe
        )
