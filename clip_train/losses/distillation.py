"""CLIP's loss plus the cross-entropy with frozen teachers' softmaxes, in closed form.

    L = a InfoNCE + b sum_t w_t 1/(2N) sum_i [ -sum_j q_ij log p_ij ] + [ -sum_j q'_ji log p'_ji ]

p and p' are the softmaxes over rows and over columns of the student's logits `S = s I T^T`. q and
q' are those of teacher t's logits `Z = z U V^T`; each teacher has its own width and scale. The
weights w_t sum to 1: the teachers' softmaxes are averaged (arXiv 2311.17049). With a = b = 1 and
one teacher, this is OpenCLIP's `DistillClipLoss`.

    -sum_j q_ij log p_ij = (lse_i - S_ii) - sum_j (q_ij - 1_ij) S_ij

So the cross-entropy with a teacher is InfoNCE minus a sum that is linear in S. The gradient of that
sum is `add_cross_entropy_gradient` with the teacher's softmaxes and the student's features, and its
value is the product of that gradient with the features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from clip_train.losses.exchange import Pairs
from clip_train.losses.info_nce import Softmaxes, add_cross_entropy_gradient
from clip_train.losses.tiles import AUTO_SIDE, accumulation_dtype, row_dots
from clip_train.task import (
    NO_CONTEXT,
    Context,
    Features,
    LossOutput,
    MicroBatch,
    Objective,
    named_features,
)

Teacher = Callable[[MicroBatch], Features]


@dataclass(eq=False)
class Distillation(Objective):
    """CLIP's loss and the teachers' cross-entropies, as in the module's formula."""

    # Each returns normalized features of any width, and the logit scale, for a micro-batch of the
    # first pass.
    teachers: Sequence[Teacher]
    tile: int = AUTO_SIDE  # side of the largest piece of the logits that exists at once
    # proportional to the w_t; None: equal
    teacher_weights: Sequence[float] | None = None
    factors: Sequence[float] = (1.0, 1.0)  # a and b

    def prepare(self, micro_batch: MicroBatch) -> Features:
        return {
            f"{name} {t}": feature
            for t, teacher in enumerate(self.teachers)
            for name, feature in teacher(micro_batch).items()
        }

    @torch.no_grad()
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        prepared = context.prepared
        if prepared is None:
            raise ValueError(
                "distillation needs the teachers' features of the same samples (context.prepared)"
            )
        I, T, scale = features["image"], features["text"], features["logit_scale"]
        deferred = context.deferred
        dtype = accumulation_dtype(I, T)
        pairs = Pairs.of(features, context)
        student = Softmaxes.of(pairs, scale, self.tile, deferred=deferred)
        unsafe = [student.unsafe]

        # Until the student's softmaxes are added below, `d_image` and `d_text` are the gradient of
        #   -1/2N sum_t w_t sum_ij (q_ij + q'_ij - 2 1_ij) S_ij
        # without the factor s.
        weight = 1 / (2 * len(pairs.image_all))
        d_image, d_text = torch.zeros_like(I, dtype=dtype), torch.zeros_like(T, dtype=dtype)
        teacher_weights = self.teacher_weights or [1.0] * len(self.teachers)
        for t, teacher_weight in enumerate(teacher_weights):
            teacher_pairs = Pairs.gathered(
                prepared[f"image {t}"].to(dtype), prepared[f"text {t}"].to(dtype), pairs.counts
            )
            teacher = Softmaxes.of(
                teacher_pairs, prepared[f"logit_scale {t}"], self.tile, deferred=deferred
            )
            add_cross_entropy_gradient(
                d_image,
                d_text,
                teacher_pairs,
                teacher,
                weight=-weight * teacher_weight / sum(teacher_weights),
                values=pairs,
            )
            unsafe.append(teacher.unsafe)
        clip_loss = student.loss()
        # the sum is linear in S = s I T^T, so its value is s <I, d_image>, added over the ranks
        linear_sum = pairs.sum(row_dots(I, d_image).sum() * scale)[0]
        distill_loss = clip_loss + linear_sum
        clip_factor, distill_factor = self.factors
        d_image.mul_(distill_factor)
        d_text.mul_(distill_factor)
        # the InfoNCE part of both losses
        add_cross_entropy_gradient(
            d_image, d_text, pairs, student, weight=(clip_factor + distill_factor) * weight
        )
        flags = [flag for flag in unsafe if flag is not None]
        return LossOutput.scaled(
            clip_factor * clip_loss + distill_factor * distill_loss,
            d_image,
            d_text,
            d_scale=row_dots(I, d_image).sum(),
            scale=scale,
            metrics={"clip_loss": clip_loss, "distill_loss": distill_loss},
            unsafe=torch.stack(flags).any() if flags else None,
        )


def run_teacher(teacher: nn.Module, scale: float | None, micro_batch: MicroBatch) -> Features:
    """Compute a teacher's features. scale: the factor of its logits; None: the model's own."""
    # images and texts in two calls: with both, a CoCa would also write captions
    image, *_ = teacher(micro_batch.images, None)
    _, text, logit_scale = teacher(None, micro_batch.texts)[:3]
    if scale is not None:
        logit_scale = torch.full_like(logit_scale, scale)
    return named_features(image, text, logit_scale)


def stored_teacher(
    widths: Sequence[int], t: int, scale: float, micro_batch: MicroBatch
) -> Features:
    """Read the features of teacher t that the shards hold. widths: of all teachers' features."""
    stored = micro_batch.columns["teacher_features"]
    # the image and its T texts, with the features of all teachers beside each other
    rows = stored.unflatten(1, (-1, sum(widths)))  # [b, 1 + T, F]
    teacher_rows = rows.split([*widths], dim=2)[t]
    image, texts = teacher_rows[:, 0], teacher_rows[:, 1:]
    return named_features(image, texts.flatten(0, 1), image.new_full((1,), scale))
