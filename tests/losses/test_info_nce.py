"""InfoNCE in closed form against textbook autograd in float64, which shares no code with it."""

from __future__ import annotations

import pytest
import torch

from clip_train import dist
from clip_train.batch import shares
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.tiles import AUTO_SIDE, Block, auto_side, tiles
from clip_train.task import Context, named_features
from tests.losses.oracle import autograd, features, relative
from tests.ranks import RankFailedError, run_ranks


@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])
@pytest.mark.parametrize("N, D, tile", [(64, 16, 2048), (50, 24, 16), (7, 8, 3), (2, 4, 1)])
def test_float64_equals_autograd(N, D, tile, scale):
    image, text = features(N, D, torch.float64)
    loss, *gradients = autograd(image, text, scale)
    outcome = InfoNCE(tile=tile)(
        named_features(image, text, torch.tensor([scale], dtype=torch.float64))
    )
    assert outcome.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    for ours, theirs in zip(
        (outcome.gradients["image"], outcome.gradients["text"], outcome.gradients["logit_scale"]),
        gradients,
        strict=True,
    ):
        assert relative(ours, theirs) < 1e-11


@pytest.mark.parametrize("aligned", [0.0, 1.0, 20.0])  # untrained, half trained, loss near zero
def test_float32_is_exact_to_rounding(aligned):
    image, text = features(256, 32, torch.float32, aligned)
    loss, *gradients = autograd(image, text, 60.0)
    outcome = InfoNCE(tile=100)(named_features(image, text, torch.tensor([60.0])))
    assert outcome.loss.item() == pytest.approx(loss.item(), rel=2e-5)
    for ours, theirs in zip(
        (outcome.gradients["image"], outcome.gradients["text"], outcome.gradients["logit_scale"]),
        gradients,
        strict=True,
    ):
        assert relative(ours, theirs) < 2e-5


def test_underflowing_logits_fall_back_to_a_running_maximum():
    """Unnormalised features of very different lengths: the Cauchy-Schwarz shift is far above most rows."""
    image, text = features(40, 8, torch.float32)
    image = image * torch.logspace(-2, 2, 40)[:, None]
    loss, *gradients = autograd(image, text, 30.0)
    given = named_features(image, text, torch.tensor([30.0]))
    outcome = InfoNCE(tile=16)(given)
    deferred = InfoNCE(tile=16)(given, Context(deferred=True)).unsafe
    assert deferred is not None and deferred.item()  # the fallback was needed
    assert outcome.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    for ours, theirs in zip(
        (outcome.gradients["image"], outcome.gradients["text"], outcome.gradients["logit_scale"]),
        gradients,
        strict=True,
    ):
        assert relative(ours, theirs) < 1e-4  # logits of 3,000 have no more digits in float32


def test_bfloat16_features_lose_nothing_more_in_the_loss():
    image, text = features(128, 32, torch.bfloat16, aligned=1.0)
    loss, d_image, *_ = autograd(image, text, 50.0)
    outcome = InfoNCE()(named_features(image, text, torch.tensor([50.0])))
    assert outcome.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert outcome.gradients["image"].dtype == torch.float32
    assert relative(outcome.gradients["image"], d_image) < 1e-5


def test_a_single_pair_has_no_loss_and_no_gradient():
    outcome = InfoNCE()(named_features(*features(1, 8, torch.float32), torch.tensor([10.0])))
    assert outcome.loss.item() == 0
    assert outcome.gradients["image"].abs().max() == 0


def test_a_bias_is_refused():
    with pytest.raises(ValueError, match="logit_bias"):
        InfoNCE()(named_features(*features(4, 8, torch.float32), torch.ones(1), torch.ones(1)))


def test_float32_keeps_the_digits_of_a_tiny_loss():
    """At 1e-4 the positive is nearly the whole softmax; torch's own float32 loses it in 1 - p."""
    image, text = features(512, 64, torch.float32, aligned=3.0)
    truth = autograd(image, text, 19.0)
    assert 5e-5 < truth[0].item() < 2e-4
    theirs = autograd(image, text, 19.0, dtype=torch.float32)
    outcome = InfoNCE(tile=100)(named_features(image, text, torch.tensor([19.0])))
    ours = (
        outcome.loss,
        outcome.gradients["image"],
        outcome.gradients["text"],
        outcome.gradients["logit_scale"],
    )
    for mine, other, exact in zip(ours, theirs, truth, strict=True):
        assert relative(mine, exact) < 3e-6
        assert relative(mine, exact) < relative(other, exact) / 100


@pytest.mark.parametrize(
    "n, N", [(1, 1), (7, 7), (1000, 1000), (1025, 1025), (300, 9000), (16384, 16384), (3, 5000)]
)
def test_the_automatic_tile_cuts_the_matrix_nearly_equally(n, N):
    side = auto_side(n, N)
    pieces = list(tiles(n, N, AUTO_SIDE))
    widths = [cols.stop - cols.start for _, cols in pieces]
    assert (
        sum(
            (rows.stop - rows.start) * width
            for (rows, _), width in zip(pieces, widths, strict=True)
        )
        == n * N
    )
    area = max(rows.stop - rows.start for rows, _ in pieces) * max(widths)
    assert side <= 4096 and area <= side * (side + 15)  # widths are rounded to 16
    assert min(widths) > max(widths) - 16 * len(pieces)  # no thin strip at the edge
    _, _, S, spare = next(
        Block(torch.ones(n, 1), torch.ones(N, 1)).logits(torch.ones(1), None, AUTO_SIDE)
    )
    assert S.untyped_storage().nbytes() == 2 * 4 * area == spare.untyped_storage().nbytes()


def test_the_automatic_tile_gives_the_same_loss():
    n = 2049  # more than the side on any CPU, whatever its cores and caches
    image, text = features(n, 8, torch.float64)
    assert len(list(tiles(n, n))) > 1
    loss, d_image, *_ = autograd(image, text, 10.0)
    outcome = InfoNCE()(named_features(image, text, torch.tensor([10.0]).double()))
    assert outcome.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    assert relative(outcome.gradients["image"], d_image) < 1e-11


def on_a_rank(dtype, spread, N):
    image, text = features(N, 16, dtype, aligned=0.5)
    if spread:
        image = image * torch.logspace(-2, 2, N).to(dtype)[:, None]
    counts = shares(N, dist.world_size())
    first = sum(counts[: dist.rank()])
    own = slice(first, first + counts[dist.rank()])
    assert max(counts) - min(counts) <= 1
    calls = count_collectives()
    global_size = N if len(set(counts)) > 1 else None
    inputs = named_features(image[own], text[own], torch.tensor([20.0], dtype=dtype))
    outcome = InfoNCE(tile=7)(inputs, Context(global_size=global_size))
    return (
        outcome.loss,
        outcome.gradients["image"],
        outcome.gradients["text"],
        outcome.gradients["logit_scale"],
        calls,
    )


def count_collectives() -> list[str]:
    """The names of the collectives that torch.distributed is asked for from now on."""
    calls: list[str] = []

    def counted(name, real):
        def call(*args, **kwargs):
            calls.append(name)
            return real(*args, **kwargs)

        return call

    for name in (
        "all_gather_single",
        "all_gather_into_tensor",
        "all_reduce",
        "all_gather",
        "all_gather_object",
    ):
        if hasattr(torch.distributed, name):
            setattr(torch.distributed, name, counted(name, getattr(torch.distributed, name)))
    return calls


@pytest.mark.distributed
@pytest.mark.parametrize(
    "world_size, spread, N", [(2, False, 48), (2, True, 48), (2, False, 47), (3, False, 49)]
)
def test_ranks_hold_shares_of_the_gradient_of_the_global_mean(world_size, spread, N):
    image, text = features(N, 16, torch.float64, aligned=0.5)
    if spread:
        image = image * torch.logspace(-2, 2, N).double()[:, None]
    loss, d_image, d_text, d_scale = autograd(image, text, 20.0)
    results = run_ranks(on_a_rank, world_size, torch.float64, spread, N)
    assert all(r[0].item() == pytest.approx(loss.item(), rel=1e-12) for r in results)
    assert relative(torch.cat([r[1] for r in results]), d_image) < 1e-11
    assert relative(torch.cat([r[2] for r in results]), d_text) < 1e-11
    assert relative(sum(r[3] for r in results), d_scale) < 1e-11
    if not spread:  # the fallback adds one
        assert all(len(r[4]) == 2 and r[4][1] == "all_reduce" for r in results), results[0][4]


def with_the_wrong_size():
    n = 3 + dist.rank()  # rank 1 holds the extra sample
    InfoNCE()(named_features(*features(n, 8, torch.float32), torch.ones(1)), Context(global_size=7))


@pytest.mark.distributed
def test_wrong_shares_of_samples_are_refused_before_sending():
    with pytest.raises(
        RankFailedError, match="holds 3 samples of a global batch of 7, and must hold 4"
    ):
        run_ranks(with_the_wrong_size, 2)
