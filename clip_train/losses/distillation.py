"""CLIP's loss plus the cross-entropy with frozen teachers' softmaxes, in closed form.

    L = a InfoNCE + b sum_t w_t 1/(2N) sum_i [ -sum_j q_ij log p_ij ] + [ -sum_j q'_ji log p'_ji ]

p, p' are the softmaxes over rows and over columns of the student's logits `S = s I T^T`, q, q'
those of teacher t's `Z = z U V^T`, with a width and a scale of its own. The weights w_t sum to 1:
the teachers' softmaxes are averaged (arXiv 2311.17049). a = b = 1 with one teacher is OpenCLIP's
`DistillClipLoss`.

`-sum_j q_ij log p_ij = (lse_i - S_ii) - sum_j (q_ij - 1_ij) S_ij`: the second half is InfoNCE
again, minus something linear in S. So its gradient is InfoNCE's with p in place of 1 and q in place
of p, and its value also follows from a product with features.
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
    """The loss of the formula above."""

    # Each: normalized features of any width, and the factor, for a micro-batch of the first pass.
    teachers: Sequence[Teacher]
    tile: int = AUTO_SIDE
    teacher_weights: Sequence[float] | None = None  # in proportion; None: equal
    factors: Sequence[float] = (1.0, 1.0)  # a and b

    def prepare(self, micro_batch: MicroBatch) -> Features:
        return {
            f"{name} {t}": feature
            for t, teacher in enumerate(self.teachers)
            for name, feature in teacher(micro_batch).items()
        }

    @torch.no_grad()
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        target = context.prepared
        if target is None:
            raise ValueError(
                "distillation needs the teachers' features of the same samples (context.prepared)"
            )
        I, T, scale = features["image"], features["text"], features["logit_scale"]
        side, deferred = self.tile, context.deferred
        dtype = accumulation_dtype(I, T)
        pairs = Pairs.of(features, context)
        student = Softmaxes.of(pairs, scale, side, deferred=deferred)
        unsafe = [] if student.unsafe is None else [student.unsafe]

        weight = 1 / (2 * len(pairs.image_all))
        d_image, d_text = torch.zeros_like(I, dtype=dtype), torch.zeros_like(T, dtype=dtype)
        parts = self.teacher_weights or [1.0] * len(self.teachers)
        for t, part in enumerate(parts):
            U, V = target[f"image {t}"].to(dtype), target[f"text {t}"].to(dtype)
            of_teacher = Pairs.gathered(U, V, pairs.counts)
            teacher = Softmaxes.of(of_teacher, target[f"logit_scale {t}"], side, deferred=deferred)
            share = -weight * part / sum(parts)
            add_cross_entropy_gradient(d_image, d_text, of_teacher, teacher, share, values=pairs)
            unsafe += [] if teacher.unsafe is None else [teacher.unsafe]
        clip_loss = student.loss()
        # - 1/2N sum (q + q' - 2) S is s <I, dI> so far, summed over ranks
        distill_loss = clip_loss + pairs.sum(row_dots(I, d_image).sum() * scale)[0]
        of_clip, of_teachers = self.factors
        d_image.mul_(of_teachers)
        d_text.mul_(of_teachers)
        both = of_clip + of_teachers
        add_cross_entropy_gradient(d_image, d_text, pairs, student, both * weight)
        d_scale = row_dots(I, d_image).sum()
        return LossOutput.scaled(
            of_clip * clip_loss + of_teachers * distill_loss,
            d_image,
            d_text,
            d_scale,
            scale,
            metrics={"clip_loss": clip_loss, "distill_loss": distill_loss},
            unsafe=torch.stack(unsafe).any() if unsafe else None,
        )


def run_teacher(teacher: nn.Module, scale: float | None, micro_batch: MicroBatch) -> Features:
    """scale: the factor of its logits; None: its own."""
    # each alone: a CoCa writes no captions then
    image, *_ = teacher(micro_batch.images, None)
    _, text, own = teacher(None, micro_batch.texts)[:3]
    return named_features(image, text, own if scale is None else torch.full_like(own, scale))


def stored_teacher(
    widths: Sequence[int], t: int, scale: float, micro_batch: MicroBatch
) -> Features:
    """The features of teacher t that the shards hold; of all: `widths`."""
    stored = micro_batch.columns["teacher_features"]
    rows = stored.unflatten(1, (-1, sum(widths)))  # [b, 1 + T, F]
    image, texts = rows[:, 0].split([*widths], 1)[t], rows[:, 1:].split([*widths], 2)[t]
    return named_features(image, texts.flatten(0, 1), image.new_full((1,), scale))
