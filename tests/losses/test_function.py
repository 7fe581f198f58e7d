"""A plain function as the loss: those of examples/, and one that only this file knows."""

from __future__ import annotations

import pytest
import torch

from clip_train.batch import shares
from clip_train.errors import UserError
from clip_train.losses.config import LossConfig
from clip_train.task import Context
from tests.losses.oracle import features
from tests.losses.oracles import own_loss, relative
from tests.ranks import run_ranks

EXAMPLES = ("nt_xent", "decoupled", "hard_negatives", "siglip")
N, SCALE, BIAS = 22, 7.0, -2.0


def uniformity(image, text, scale, bias, rows):
    """Alignment and uniformity (arXiv 2005.10242): the logarithm of a sum over all pairs of samples.

    It is no sum over samples, so every rank computes all of it.
    """
    others = ~torch.eye(len(image), dtype=torch.bool, device=image.device)
    loss = (image - text).square().sum(1).mean()
    for x in (image, text):
        squares = x.square().sum(1)
        potentials = (scale * (2 * x @ x.T - squares - squares[:, None]))[others]
        loss = loss + potentials.logsumexp(0) / 2
    return loss


def mean_of_rows(image, text, scale, bias, rows):
    """Wrong: over the rows that it is asked for, not over the batch."""
    return (image[rows] - text[rows]).square().mean()


mean_of_rows.sums_over_rows = True


def no_gradient(image, text, scale, bias, rows):
    return (image.detach() * text).sum()


def loss_named(name: str, tile: int | str):
    module = "examples.losses" if name in EXAMPLES else __name__
    return LossConfig(kind=f"{module}.{name}", tile=tile).build()


def scalars(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {"logit_scale": torch.tensor([SCALE], dtype=dtype)}
    return found | ({"logit_bias": torch.tensor([BIAS], dtype=dtype)} if name == "siglip" else {})


def on_a_rank(name: str, dtype: torch.dtype, tile: int | str):
    from clip_train import dist

    counts = shares(N, dist.world_size())
    start = sum(counts[: dist.rank()])
    own = slice(start, start + counts[dist.rank()])
    image, text = (x[own] for x in features(N, 16, dtype, aligned=0.5))
    given = {"image": image, "text": text, **scalars(name, dtype)}
    out = loss_named(name, tile)(given, Context(N))
    return out.loss, out.gradients


def on_ranks(names: list[str]):
    return {
        (name, tile): on_a_rank(name, torch.float32, tile) for name in names for tile in ("auto", 8)
    }


def truth(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    image, text = features(N, 16, torch.float64, aligned=0.5)
    leaves = {"image": image, "text": text, **scalars(name, torch.float64)}
    leaves = {key: x.requires_grad_() for key, x in leaves.items()}
    loss = own_loss(name, *leaves.values())
    loss.backward()
    return loss.detach(), {
        key: torch.zeros_like(x) if x.grad is None else x.grad for key, x in leaves.items()
    }


NAMES = [*EXAMPLES, "uniformity"]


@pytest.mark.parametrize("name", NAMES)
def test_float64_equals_the_textbook(name):
    loss, gradients = truth(name)
    ours, ours_gradients = on_a_rank(name, torch.float64, 8)
    assert relative(ours, loss) < 1e-10
    for key, gradient in gradients.items():
        assert (ours_gradients[key] - gradient).norm() <= 1e-10 * (gradient.norm() + 1), key


@pytest.mark.parametrize("W", [2, 3])
def test_ranks_share_the_gradient(W):
    """W = 3 does not divide the samples.

    The gradient of a scalar is a sum over all pairs. Their absolute values add up to about 1 and
    mostly cancel, so its rounding does not shrink with it.
    """
    outcomes = run_ranks(on_ranks, W, NAMES)
    for name in NAMES:
        loss, gradients = truth(name)
        for tile in ("auto", 8):
            of_ranks = [outcome[name, tile] for outcome in outcomes]
            assert all(relative(each, loss) < 1e-6 for each, _ in of_ranks), name
            for key, gradient in gradients.items():
                parts = [found[key] for _, found in of_ranks]
                whole = torch.cat(parts) if gradient.ndim == 2 else sum(parts)
                error = (whole.double() - gradient).norm()
                rounding = 1e-8 if gradient.ndim == 2 else 1e-7
                assert error <= 1e-6 * gradient.norm() + rounding, (name, tile, key)


@pytest.mark.parametrize(
    "name, message",
    [
        ("mean_of_rows", "do not add up to those of 0:4"),
        ("no_gradient", "has no finite gradient by image and text"),
        ("scalars", "failed on four samples: TypeError"),
        ("nothing", "cannot be imported"),
    ],
)
def test_a_function_that_is_no_loss_is_refused(name, message):
    with pytest.raises(UserError, match=message) as error:
        loss_named(name, "auto")
    assert f"loss.kind ({__name__}.{name})" in str(error.value)


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(
        UserError, match=r"loss.options.temperature \(1\): no such key; .*takes none"
    ):
        LossConfig(kind="examples.losses.nt_xent", options={"temperature": 1}).build()
