"""InfoNCE on a ring against the textbook loss over full logits, by autograd in float64."""

from __future__ import annotations

import pytest
import torch

from clip_train import dist
from clip_train.batch import shares
from clip_train.losses.config import LossConfig
from clip_train.task import Context, named_features
from tests.losses.oracle import autograd, features, relative
from tests.losses.test_sigmoid import parts, scalars
from tests.ranks import run_ranks

CASES = [
    (1, 1, 14.3, torch.float64),
    (1, 50, 14.3, torch.float64),
    (2, 48, 14.3, torch.float64),
    (3, 49, 100.0, torch.float64),
    (3, 50, 2000.0, torch.float64),  # every exponential underflows: the slow and safe way
    (2, 47, 1.0, torch.float32),
    (3, 48, 2000.0, torch.float32),
]


def on_a_rank(N: int, scale: float, dtype: torch.dtype) -> list:
    """The parts of the loss with and without a delayed look at `unsafe`, and whether it is set."""
    image, text = features(N, 16, dtype, aligned=0.5)
    counts = shares(N, dist.world_size())
    first = sum(counts[: dist.rank()])
    own = slice(first, first + counts[dist.rank()])
    global_size = N if len(set(counts)) > 1 else None
    inputs = named_features(image[own], text[own], *scalars(scale, dtype=dtype))
    loss = LossConfig(exchange="ring", tile=7).build()
    checked = loss(inputs, Context(global_size=global_size))
    later = loss(inputs, Context(global_size=global_size, deferred=True))
    return [parts(checked), parts(later), bool(later.unsafe)]


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "N", "scale", "dtype"), CASES)
def test_ranks_hold_shares_of_the_gradient_of_the_global_mean(world_size, N, scale, dtype):
    truth = autograd(*features(N, 16, dtype, aligned=0.5), scale)
    alone = world_size == 1
    arguments = (N, scale, dtype)
    results = [on_a_rank(*arguments)] if alone else run_ranks(on_a_rank, world_size, *arguments)
    unsafe = [set_ for _, _, set_ in results]
    assert unsafe == [scale > 1000] * world_size
    limit = 1e-11 if dtype == torch.float64 else 5e-6 * max(1, scale / 100)
    for way in range(1 if any(unsafe) else 2):
        of_ranks = [result[way] for result in results]
        whole = [
            of_ranks[0][0],
            torch.cat([part[1] for part in of_ranks]),
            torch.cat([part[2] for part in of_ranks]),
            sum(part[3] for part in of_ranks),
        ]
        assert all(part[0] == of_ranks[0][0] for part in of_ranks)
        for ours, exact in zip(whole, truth, strict=True):
            error = relative(ours, exact) if exact.norm() > 0 else ours.abs().max()
            assert error < limit


def test_other_softmaxes_and_a_bias_are_refused():
    with pytest.raises(ValueError, match=r"loss\.exchange=gather"):
        LossConfig(kind="memory_bank", exchange="ring")
    with pytest.raises(ValueError, match="no logit_bias"):
        LossConfig(exchange="ring").build()(
            named_features(*features(4, 8, torch.float32), torch.ones(1), torch.ones(1))
        )
