"""Distillation in closed form against OpenCLIP's definition under float64 autograd."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from clip_train import dist
from clip_train.losses.config import LossConfig
from clip_train.losses.distillation import Distillation, stored_teacher
from clip_train.task import Context, MicroBatch, named_features
from tests.losses.oracles import averaged_teachers_loss, distill_loss, leaves, pairs, relative
from tests.ranks import run_ranks
from tests.toy import columns_of

N, D = 36, 16


def ours(scale, z, tile=10, aligned=0.5, dtype=torch.float64):
    n = N // dist.world_size()
    own = slice(dist.rank() * n, (dist.rank() + 1) * n)
    image, text = pairs(N, D, 1, aligned)
    U, V = pairs(N, 2 * D, 2, 1.0)
    teacher = named_features(U[own].to(dtype), V[own].to(dtype), torch.tensor([z], dtype=dtype))
    student = named_features(
        image[own].to(dtype), text[own].to(dtype), torch.tensor([scale], dtype=dtype)
    )
    loss = Distillation([lambda _: teacher], tile=tile)
    out = loss(student, Context(prepared=loss.prepare(None)))
    return (
        out.loss,
        out.gradients["image"],
        out.gradients["text"],
        out.gradients["logit_scale"],
        out.metrics,
    )


def check(results, scale, z, aligned=0.5, tolerance=1e-11):
    image, text = pairs(N, D, 1, aligned)
    U, V = pairs(N, 2 * D, 2, 1.0)
    I, T, s = leaves(image, text, scale)
    clip, distilled = distill_loss(I, T, s, U, V, z)
    (clip + distilled).backward()
    for r in results:
        assert r[0].item() == pytest.approx((clip + distilled).item(), rel=tolerance)
        assert r[4]["clip_loss"] == pytest.approx(clip.item(), rel=tolerance)
        assert r[4]["distill_loss"] == pytest.approx(distilled.item(), rel=tolerance)
    assert relative(torch.cat([r[1] for r in results]), I.grad) < tolerance
    assert relative(torch.cat([r[2] for r in results]), T.grad) < tolerance
    assert relative(sum(r[3] for r in results), s.grad) < tolerance


@pytest.mark.parametrize("scale, z", [(1.0, 100.0), (14.3, 30.0), (100.0, 5.0)])
@pytest.mark.parametrize("tile", [2048, 10, 1])
def test_float64_equals_autograd(scale, z, tile):
    check([ours(scale, z, tile)], scale, z)


@pytest.mark.parametrize("aligned", [0.0, 1.0, 20.0])  # untrained, half trained, loss near zero
def test_float32_is_exact_to_rounding(aligned):
    check([ours(60.0, 60.0, aligned=aligned, dtype=torch.float32)], 60.0, 60.0, aligned, 5e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_hold_shares_of_the_gradient(world_size):
    check(run_ranks(ours, world_size, 14.3, 30.0), 14.3, 30.0)


def of_two(dtype=torch.float64):
    n = N // dist.world_size()
    own = slice(dist.rank() * n, (dist.rank() + 1) * n)
    image, text = (x[own].to(dtype) for x in pairs(N, D, 1, 0.5))

    def taught(width, seed, scale):
        U, V = (x[own].to(dtype) for x in pairs(N, width, seed, 1.0))
        return lambda _: named_features(U, V, torch.tensor([scale], dtype=dtype))

    loss = Distillation([taught(24, 2, 70.0), taught(10, 3, 20.0)], 10, [2.0, 1.0], (0.3, 0.7))
    student = named_features(image, text, torch.tensor([14.3], dtype=dtype))
    out = loss(student, Context(prepared=loss.prepare(None)))
    return out.loss, *(out.gradients[name] for name in ("image", "text", "logit_scale"))


@pytest.mark.parametrize(
    "world_size", [1, *(pytest.param(n, marks=pytest.mark.distributed) for n in (2, 3))]
)
def test_several_teachers_are_averaged_after_their_softmaxes(world_size):
    results = [of_two()] if world_size == 1 else run_ranks(of_two, world_size)
    I, T, s = leaves(*pairs(N, D, 1, 0.5), 14.3)
    teachers = [(*pairs(N, 24, 2, 1.0), 70.0, 2.0), (*pairs(N, 10, 3, 1.0), 20.0, 1.0)]
    loss = sum(averaged_teachers_loss(I, T, s, teachers, (0.3, 0.7)))
    loss.backward()
    for r in results:
        assert r[0].item() == pytest.approx(loss.item(), rel=1e-12)
    assert relative(torch.cat([r[1] for r in results]), I.grad) < 1e-11
    assert relative(torch.cat([r[2] for r in results]), T.grad) < 1e-11
    assert relative(sum(r[3] for r in results), s.grad) < 1e-11


def test_it_says_what_is_missing():
    image, text = pairs(4, 8)
    with pytest.raises(ValueError, match="teachers' features"):
        Distillation([])(named_features(image, text, torch.ones(1)))


def test_features_from_shards_are_split_by_teacher_and_text():
    """Two teachers and two texts of an image: the mean of the halves, each against its own text's features."""
    n, texts, widths, scales = 12, 2, [5, 9], [30.0, 12.0]
    image, _ = pairs(n, D, 1)
    of_texts = [pairs(n, D, 2 + t)[1] for t in range(texts)]
    U = [pairs(n, width, 5)[0] for width in widths]
    V = [[pairs(n, width, 6 + t)[1] for width in widths] for t in range(texts)]
    rows = torch.cat([*U, *(x for of_text in V for x in of_text)], dim=1)
    batch = MicroBatch(columns_of(rows, rows, rows, teacher_features=rows))
    config = LossConfig(distill_weights=(0.0, 1.0))
    teachers = [partial(stored_teacher, widths, t, scale) for t, scale in enumerate(scales)]
    loss = config.build(teachers, texts)
    both = torch.stack(of_texts, dim=1).flatten(0, 1)  # an image's texts beside each other
    student = named_features(image, both, torch.tensor([9.0]).double())
    out = loss(student, Context(prepared=loss.prepare(batch)))
    expected = []
    for t in range(texts):
        teachers = [(*each, 1.0) for each in zip(U, V[t], scales, strict=True)]
        expected.append(averaged_teachers_loss(image, of_texts[t], 9.0, teachers, (0, 1))[1])
    assert out.loss.item() == pytest.approx(sum(expected).item() / texts, rel=1e-12)
