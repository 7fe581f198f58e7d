"""The sigmoid loss in closed form against SigLIP's own pseudo-code under float64 autograd."""

from __future__ import annotations

import pytest
import torch

from clip_train import dist
from clip_train.batch import shares
from clip_train.losses.config import LossConfig
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.task import Context, named_features
from tests.losses.oracle import autograd, features, relative
from tests.ranks import run_ranks


def scalars(*values: float, dtype: torch.dtype = torch.float32):
    return [torch.tensor([v], dtype=dtype) for v in values]


def parts(outcome):
    return (
        outcome.loss,
        outcome.gradients["image"],
        outcome.gradients["text"],
        outcome.gradients["logit_scale"],
        outcome.gradients.get("logit_bias"),
    )


@pytest.mark.parametrize("scale, bias", [(10.0, -10.0), (1.0, 0.0), (100.0, -13.0), (100.0, 5.0)])
@pytest.mark.parametrize(
    "N, D, tile", [(64, 16, 2048), (50, 24, 17), (7, 8, 3), (2, 4, 1), (1, 4, 0)]
)
def test_float64_equals_autograd(N, D, tile, scale, bias):
    image, text = features(N, D, torch.float64, aligned=0.3)
    outcome = SigmoidLoss(tile=tile)(
        named_features(image, text, *scalars(scale, bias, dtype=torch.float64))
    )
    for ours, theirs in zip(parts(outcome), autograd(image, text, scale, bias), strict=True):
        assert ours.dtype == torch.float64
        assert relative(ours, theirs) < 1e-11


@pytest.mark.parametrize("scale, bias", [(10.0, -10.0), (100.0, -13.0)])
@pytest.mark.parametrize("aligned", [0.0, 1.0, 20.0])
def test_float32_is_exact_to_rounding(aligned, scale, bias):
    image, text = features(256, 32, torch.float32, aligned)
    outcome = SigmoidLoss(tile=100)(named_features(image, text, *scalars(scale, bias)))
    for ours, theirs in zip(parts(outcome), autograd(image, text, scale, bias), strict=True):
        assert relative(ours, theirs) < 5e-6


def test_float32_keeps_the_digits_of_a_tiny_loss():
    image, text = features(512, 64, torch.float32, aligned=3.0)
    truth = autograd(image, text, 45.0, -29.0)
    assert 5e-5 < truth[0].item() < 5e-4
    outcome = SigmoidLoss(tile=100)(named_features(image, text, *scalars(45.0, -29.0)))
    for ours, exact in zip(parts(outcome), truth, strict=True):
        assert relative(ours, exact) < 3e-6


def test_bfloat16_features_are_multiplied_in_float32():
    image, text = features(128, 32, torch.bfloat16, aligned=1.0)
    outcome = SigmoidLoss(tile=33)(named_features(image, text, *scalars(50.0, -10.0)))
    assert outcome.gradients["image"].dtype == outcome.gradients["text"].dtype == torch.float32
    for ours, theirs in zip(parts(outcome), autograd(image, text, 50.0, -10.0), strict=True):
        assert relative(ours, theirs) < 1e-5


def test_a_model_without_a_bias_is_told_what_to_set():
    with pytest.raises(
        ValueError, match=r"model\.init_logit_bias=-10 model\.init_logit_scale=2\.3026"
    ):
        SigmoidLoss()(named_features(*features(4, 8, torch.float32), torch.ones(1)))


def test_the_recipe_chooses_the_loss():
    loss = LossConfig.model_validate({"kind": "sigmoid", "exchange": "ring", "tile": 64}).build()
    assert isinstance(loss, SigmoidLoss) and (loss.exchange, loss.tile) == ("ring", 64)
    assert LossConfig(tile="auto").model_dump(mode="json")["tile"] == "auto"
    with pytest.raises(ValueError, match=r"loss\.exchange=gather"):
        LossConfig(kind="memory_bank", exchange="ring")
    with pytest.raises(ValueError, match="tile"):
        LossConfig(tile="large")


def on_a_rank(N, exchange, dtype):
    image, text = features(N, 16, dtype, aligned=0.5)
    counts = shares(N, dist.world_size())
    first = sum(counts[: dist.rank()])
    own = slice(first, first + counts[dist.rank()])
    loss, global_size = SigmoidLoss(tile=7, exchange=exchange), N if len(set(counts)) > 1 else None
    inputs = named_features(image[own], text[own], *scalars(20.0, -5.0, dtype=dtype))
    return parts(loss(inputs, Context(global_size=global_size)))


@pytest.mark.distributed
@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("world_size, N", [(2, 48), (3, 48), (2, 47), (3, 49), (3, 50)])
def test_ranks_hold_shares_of_the_gradient_of_the_global_mean(world_size, N, exchange):
    image, text = features(N, 16, torch.float64, aligned=0.5)
    loss, d_image, d_text, d_scale, d_bias = autograd(image, text, 20.0, -5.0)
    results = run_ranks(on_a_rank, world_size, N, exchange, torch.float64)
    assert all(r[0].item() == pytest.approx(loss.item(), rel=1e-12) for r in results)
    assert relative(torch.cat([r[1] for r in results]), d_image) < 1e-11
    assert relative(torch.cat([r[2] for r in results]), d_text) < 1e-11
    assert relative(sum(r[3] for r in results), d_scale) < 1e-11
    assert relative(sum(r[4] for r in results), d_bias) < 1e-11
