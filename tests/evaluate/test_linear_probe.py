"""Against scikit-learn's logistic regression; on several ranks against one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from clip_train import dist
from clip_train.errors import UserError
from clip_train.evaluate.config import EvaluateConfig
from clip_train.evaluate.features import Encoded
from clip_train.evaluate.linear_probe import STRENGTHS, fit, linear_probe
from clip_train.evaluate.loop import evaluate
from tests.evaluate.fake import Batch, FakeEngine, tokenize
from tests.ranks import run_ranks

CLASSES, WIDTH = 5, 12


def blobs(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Classes that overlap: [n, D] float32 of length 1, int64 [n]."""
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (num,), generator=g)
    return F.normalize(centres[labels] + 1.2 * torch.randn(num, WIDTH, generator=g), dim=1), labels


def encoded(image: Tensor, labels: Tensor) -> Encoded:
    nothing = torch.zeros(0, dtype=torch.int64)
    return Encoded(image, image[:0], nothing[:, None], nothing, labels, torch.ones(1))


@pytest.mark.parametrize("strength", [1e-4, 1e-2, 1.0])
def test_it_is_scikit_learns(strength: float):
    x, y = blobs(300, 1)
    weights = fit(x.double(), y, CLASSES, strength).numpy()
    theirs = LogisticRegression(C=1 / (len(x) * strength), tol=1e-10, max_iter=10_000).fit(
        x.double().numpy(), y.numpy()
    )
    np.testing.assert_allclose(weights[:-1].T, theirs.coef_, rtol=1e-3, atol=1e-3)
    bias = weights[-1] - weights[-1].mean()  # a constant more in all changes nothing
    np.testing.assert_allclose(
        bias, theirs.intercept_ - theirs.intercept_.mean(), rtol=1e-3, atol=1e-3
    )


def _best(x: Tensor, y: Tensor, strength: float, held: np.ndarray) -> float:
    model = LogisticRegression(C=1 / ((~held).sum() * strength), tol=1e-8, max_iter=10_000)
    model.fit(x.double().numpy()[~held], y.numpy()[~held])
    return float((model.predict(x.double().numpy()[held]) == y.numpy()[held]).mean())


def test_accuracy_and_the_strength_that_the_held_out_tenth_chooses():
    (x, y), (u, v) = blobs(300, 1), blobs(200, 2)
    y[::7] = -1  # of no label
    found = linear_probe(encoded(x, y), encoded(u, v))
    strength, known = found["linear_probe_l2"], (y >= 0).numpy()
    assert strength in STRENGTHS
    theirs = LogisticRegression(C=1 / (known.sum() * strength), tol=1e-8, max_iter=10_000)
    theirs.fit(x.double().numpy()[known], y.numpy()[known])
    expected = (theirs.predict(u.double().numpy()) == v.numpy()).mean()
    assert 0.4 < expected < 0.95 and found["linear_probe_top1"] == pytest.approx(expected, abs=1e-9)
    held = (np.arange(300) % 10 == 9)[known]
    scores = [_best(x[known], y[known], each, held) for each in (1e-8, 1e-6, 1e-4, 1e-2, 1)]
    assert _best(x[known], y[known], strength, held) >= max(scores)


def _share(ends: tuple[int, ...]) -> dict[str, float]:
    (x, y), (u, v) = blobs(300, 1), blobs(200, 2)
    start, end = (0, *ends)[dist.rank()], ends[dist.rank()]
    half = slice(0, 100) if dist.rank() else slice(100, 200)
    return linear_probe(encoded(x[start:end], y[start:end]), encoded(u[half], v[half]))


@pytest.mark.distributed
@pytest.mark.parametrize("ends", [(123, 300), (300, 300)])
def test_ranks_are_invisible(ends: tuple[int, ...]):
    (x, y), (u, v) = blobs(300, 1), blobs(200, 2)
    alone = linear_probe(encoded(x, y), encoded(u, v))
    first, second = run_ranks(_share, 2, ends)
    assert first == second == pytest.approx(alone, abs=1e-9)


def test_it_is_measured_on_the_labelled_images():
    """Through `evaluate`: pixels of a class are alike, so that it is learned; without classes labels are numbers."""
    g = torch.Generator().manual_seed(3)
    colour = torch.randint(0, 256, (4, 3, 1, 1), generator=g)

    def images(num: int) -> Batch:
        labels = [i % 4 for i in range(num)]
        pixels = (
            (colour[labels] + torch.randint(-9, 10, (num, 3, 4, 4), generator=g))
            .clamp(0, 255)
            .to(torch.uint8)
        )
        return Batch(
            pixels,
            torch.zeros(0, 32, dtype=torch.int64),
            [[] for _ in labels],
            [{"cls": f"{i}"} for i in labels],
        )

    engine: Any = FakeEngine()
    found = evaluate(engine, None, EvaluateConfig(), tokenize, [images(20)], [images(80)])
    assert (
        found == {"linear_probe_top1": 1.0, "linear_probe_l2": found["linear_probe_l2"]}
        and engine.training
    )
    unlabelled = images(5)
    unlabelled.metadata = [{} for _ in range(5)]
    with pytest.raises(UserError, match=r"evaluate\.linear_probe has no labelled image"):
        evaluate(engine, None, EvaluateConfig(), tokenize, [images(20)], [unlabelled])
