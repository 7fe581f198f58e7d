"""Against scikit-learn, and on two ranks against one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from clip_train import dist
from clip_train.errors import EvaluationStopped, UserError
from clip_train.evaluate.features import Encoded, never
from clip_train.evaluate.linear_probe import (
    STRENGTHS,
    VALIDATION_SHARE,
    fit,
    labeled,
    linear_probe_metrics,
    with_constant,
)
from tests.ranks import run_ranks

NUM_CLASSES, WIDTH = 5, 12


def clusters(num: int, seed: int, noise: float = 0.6) -> Encoded:
    """Unit features around a direction for each class; a tenth of the samples has no label."""
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(NUM_CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, NUM_CLASSES, (num,), generator=g)
    features = F.normalize(centers[labels] + noise * 3 * torch.randn(num, WIDTH, generator=g))
    labels[torch.rand(num, generator=g) < 0.1] = -1
    nothing = torch.empty(0)
    return Encoded(features, nothing, nothing, nothing, labels, nothing)


def by_scikit_learn(features: Tensor, labels: Tensor, strength: float) -> LogisticRegression:
    """The same objective: C is of the summed loss."""
    model = LogisticRegression(C=1 / (strength * len(labels)), tol=1e-10, max_iter=100_000)
    return model.fit(features.double().numpy(), labels.numpy())


@pytest.mark.parametrize("strength", [1e-4, 1e-2, 1.0])
def test_a_fit_equals_scikit_learns(strength: float):
    features, labels = labeled(clusters(400, seed=1))
    start = torch.zeros(NUM_CLASSES, WIDTH + 1, dtype=torch.float64)
    weights = fit(with_constant(features), labels, NUM_CLASSES, never, strength, start)
    expected = by_scikit_learn(features, labels, strength)
    scale = np.abs(expected.coef_).max()
    assert weights[:, :-1].numpy() == pytest.approx(expected.coef_, abs=2e-4 * scale)
    # a constant that is added to all biases changes nothing
    bias = weights[:, -1] - weights[:, -1].mean()
    assert bias.numpy() == pytest.approx(
        expected.intercept_ - expected.intercept_.mean(), abs=1e-3 * max(1, scale)
    )


def test_the_chosen_strength_has_the_scores_that_scikit_learn_has_with_it():
    train, test = clusters(600, seed=1), clusters(300, seed=2)
    scores = linear_probe_metrics(train, test, NUM_CLASSES)
    strength = scores["linear_probe_l2"]
    assert strength in STRENGTHS
    model = by_scikit_learn(*labeled(train), strength)
    features, labels = labeled(test)
    logits = model.decision_function(features.double().numpy())
    ranks = [int((row > row[label]).sum()) for row, label in zip(logits, labels, strict=True)]
    assert scores["linear_probe_top1"] == pytest.approx(np.mean(np.array(ranks) < 1), abs=0.01)
    assert 0.5 < scores["linear_probe_top1"] < 1 and scores["linear_probe_top5"] == 1


def test_the_strength_is_the_best_of_a_search_on_the_validation_samples():
    """By scikit-learn on the same split: no strength of the grid is much better than the chosen."""
    train = clusters(600, seed=3, noise=0.9)
    features, labels = labeled(train)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    validates = torch.zeros(len(labels), dtype=torch.bool)
    validates[order[: len(labels) // VALIDATION_SHARE]] = True

    def score(strength: float) -> float:
        model = by_scikit_learn(features[~validates], labels[~validates], strength)
        return model.score(features[validates].double().numpy(), labels[validates].numpy())

    chosen = linear_probe_metrics(train, clusters(50, seed=4), NUM_CLASSES)["linear_probe_l2"]
    best = max(score(strength) for strength in STRENGTHS[24::8])
    assert score(chosen) >= best - 0.02
    assert score(chosen) > score(STRENGTHS[-1])


def _on_rank(cut: int) -> tuple[dict[str, float], dict[str, float]]:
    """With the samples in two unequal parts, twice."""
    parts = []
    for whole in (clusters(300, seed=1), clusters(100, seed=2)):
        rows = slice(0, cut) if dist.rank() == 0 else slice(cut, None)
        if dist.world_size() == 1:
            rows = slice(None)
        none = torch.empty(0)
        parts.append(Encoded(whole.image[rows], none, none, none, whole.labels[rows], none))
    first = linear_probe_metrics(*parts, NUM_CLASSES)
    return first, linear_probe_metrics(*parts, NUM_CLASSES)


@pytest.mark.distributed
@pytest.mark.parametrize("cut", [70, 0])
def test_two_ranks_have_the_scores_of_one(cut: int):
    one, again = _on_rank(cut)
    assert one == again
    for scores in run_ranks(_on_rank, 2, cut):
        assert scores[0] == scores[1] == pytest.approx(one, abs=0.011)


def _stopped() -> None:
    asked = iter([False] * 3 + [dist.rank() == 1] * 1000)
    with pytest.raises(EvaluationStopped):
        linear_probe_metrics(
            clusters(50, seed=1), clusters(50, seed=2), NUM_CLASSES, lambda: next(asked)
        )


@pytest.mark.distributed
def test_all_ranks_stop_within_a_fit():
    run_ranks(_stopped, 2)


def test_images_without_labels():
    train = clusters(50, seed=1)
    train.labels.fill_(-1)
    with pytest.raises(UserError, match="--linear-probe: 0 of the training images have a label"):
        linear_probe_metrics(train, clusters(50, seed=2), NUM_CLASSES)
