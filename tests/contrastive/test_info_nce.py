"""InfoNCE in closed form against textbook autograd in float64, which shares no code with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clip_train import dist
from clip_train.contrastive import InfoNCE
from tests.ranks import run_ranks
from tests.toy import oracle_loss


def features(N: int, D: int, dtype: torch.dtype, aligned: float = 0.0, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    image = torch.randn(N, D, generator=g, dtype=torch.float64)
    text = torch.randn(N, D, generator=g, dtype=torch.float64) + aligned * image
    return F.normalize(image, dim=1).to(dtype), F.normalize(text, dim=1).to(dtype)


def autograd(image, text, scale: float):
    leaves = [
        image.double().requires_grad_(),
        text.double().requires_grad_(),
        torch.tensor([scale]).double().requires_grad_(),
    ]
    loss = oracle_loss(*leaves)
    loss.backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)


def relative(x, y) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])
@pytest.mark.parametrize("N, D, tile", [(64, 16, 2048), (50, 24, 16), (7, 8, 3), (2, 4, 1)])
def test_float64_equals_autograd(N, D, tile, scale):
    image, text = features(N, D, torch.float64)
    loss, *gradients = autograd(image, text, scale)
    outcome = InfoNCE(tile=tile)(image, text, torch.tensor([scale]).double())
    assert outcome.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    for ours, theirs in zip((outcome.d_image, outcome.d_text, outcome.d_logit_scale), gradients, strict=True):
        assert relative(ours, theirs) < 1e-11


@pytest.mark.parametrize("aligned", [0.0, 1.0, 20.0])  # untrained, half trained, loss near zero
def test_float32_is_exact_to_rounding(aligned):
    image, text = features(256, 32, torch.float32, aligned)
    loss, *gradients = autograd(image, text, 60.0)
    outcome = InfoNCE(tile=100)(image, text, torch.tensor([60.0]))
    assert outcome.loss.item() == pytest.approx(loss.item(), rel=2e-5)
    for ours, theirs in zip((outcome.d_image, outcome.d_text, outcome.d_logit_scale), gradients, strict=True):
        assert relative(ours, theirs) < 2e-5


def test_logits_so_spread_that_every_exponential_underflows_fall_back_to_a_running_maximum():
    """Unnormalised features of very different lengths: the Cauchy-Schwarz shift is far above most rows."""
    image, text = features(40, 8, torch.float32)
    image = image * torch.logspace(-2, 2, 40)[:, None]
    loss, *gradients = autograd(image, text, 30.0)
    outcome = InfoNCE(tile=16)(image, text, torch.tensor([30.0]))
    assert InfoNCE(tile=16)._negatives(image, text, image, text, 30.0, 0)[2] is None  # the fallback was taken
    assert outcome.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    for ours, theirs in zip((outcome.d_image, outcome.d_text, outcome.d_logit_scale), gradients, strict=True):
        assert relative(ours, theirs) < 1e-4  # logits of 3,000 have no more digits in float32


def test_bfloat16_features_lose_nothing_more_in_the_loss():
    image, text = features(128, 32, torch.bfloat16, aligned=1.0)
    loss, d_image, *_ = autograd(image, text, 50.0)
    outcome = InfoNCE()(image, text, torch.tensor([50.0]))
    assert outcome.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert outcome.d_image.dtype == torch.float32
    assert relative(outcome.d_image, d_image) < 1e-5


def test_a_single_pair_has_no_loss_and_no_gradient():
    outcome = InfoNCE()(*features(1, 8, torch.float32), torch.tensor([10.0]))
    assert outcome.loss.item() == 0
    assert outcome.d_image.abs().max() == 0


def test_a_bias_is_refused():
    with pytest.raises(ValueError, match="logit_bias"):
        InfoNCE()(*features(4, 8, torch.float32), torch.ones(1), torch.ones(1))


def on_a_rank(dtype, spread):
    image, text = features(48, 16, dtype, aligned=0.5)
    if spread:
        image = image * torch.logspace(-2, 2, 48).to(dtype)[:, None]
    n = 48 // dist.world_size()
    own = slice(dist.rank() * n, (dist.rank() + 1) * n)
    outcome = InfoNCE(tile=10)(image[own], text[own], torch.tensor([20.0], dtype=dtype))
    return outcome.loss, outcome.d_image, outcome.d_text, outcome.d_logit_scale


@pytest.mark.distributed
@pytest.mark.parametrize("world_size, spread", [(2, False), (3, False), (2, True)])
def test_ranks_hold_shares_of_the_gradient_of_the_global_mean(world_size, spread):
    image, text = features(48, 16, torch.float64, aligned=0.5)
    if spread:
        image = image * torch.logspace(-2, 2, 48).double()[:, None]
    loss, d_image, d_text, d_scale = autograd(image, text, 20.0)
    results = run_ranks(on_a_rank, world_size, torch.float64, spread)
    assert all(r[0].item() == pytest.approx(loss.item(), rel=1e-12) for r in results)
    assert relative(torch.cat([r[1] for r in results]), d_image) < 1e-11
    assert relative(torch.cat([r[2] for r in results]), d_text) < 1e-11
    assert relative(sum(r[3] for r in results), d_scale) < 1e-11
