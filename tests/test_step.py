"""The two-pass step on the plain engine: micro-batches, retained graphs and ranks are invisible."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch

from clip_train import dist
from clip_train.engines.base import PlainEngine
from clip_train.errors import DivergedError
from clip_train.losses.info_nce import InfoNCE
from clip_train.step import restore_rng, rng_state, train_step
from clip_train.task import Flags
from tests.ranks import run_ranks
from tests.toy import ToyCLIP, oracle_loss, share, toy_batch

LR = 0.5


def parameters_after(
    model,
    steps: int,
    *,
    micro_size: int,
    kept_graphs: int,
    N: int = 20,
    clip: float | None = None,
    objective=None,
):
    engine = PlainEngine(model, torch.optim.SGD(model.parameters(), lr=LR), clip)
    results = []
    for s in range(steps):
        batch = share(toy_batch(N, seed=s), dist.rank(), dist.world_size())
        loss = objective or InfoNCE()
        results.append(
            train_step(engine, batch, loss, micro_size=micro_size, kept_graphs=kept_graphs, lr=LR)
        )
    return torch.cat([p.detach().flatten() for p in model.parameters()]), results


def oracle(model, steps: int, N: int = 20, clip: float = float("inf")):
    """Plain full-batch torch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, norms = [], []
    for s in range(steps):
        batch = toy_batch(N, seed=s)
        loss = oracle_loss(*model(batch.images, batch.texts)[:3])
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        losses.append(loss.item())
    return torch.cat([p.detach().flatten() for p in model.parameters()]), losses, norms


def toy(dropout: float = 0.0) -> ToyCLIP:
    torch.manual_seed(3)
    return ToyCLIP(dropout).double()


@pytest.mark.parametrize(
    "micro_size, kept", [(20, 1), (20, 5), (7, 1), (7, 2), (7, 3), (1, 1), (5, 4), (8, 9)]
)
def test_micro_batches_and_kept_graphs_are_invisible(micro_size, kept):
    expected, losses, norms = oracle(toy(), 4, clip=0.05)
    ours, results = parameters_after(toy(), 4, micro_size=micro_size, kept_graphs=kept, clip=0.05)
    assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-14)
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-12)
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=1e-12)


class Underflowing(InfoNCE):
    """Of no use until it is asked to be sure."""

    def __call__(self, features, context):
        out = super().__call__(features, replace(context, deferred=False))
        if context.deferred:
            out.gradients["image"].mul_(7)
            out.unsafe = torch.tensor(True)
        return out


@pytest.mark.parametrize("micro_size, kept", [(20, 1), (7, 1), (7, 2)])
def test_a_loss_that_turns_out_unsafe_is_computed_again(micro_size, kept):
    expected, losses, norms = oracle(toy(), 3, clip=0.05)
    ours, results = parameters_after(
        toy(), 3, micro_size=micro_size, kept_graphs=kept, clip=0.05, objective=Underflowing()
    )
    assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-14)
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-12)
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=1e-12)


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_the_second_forward_draws_the_same_dropout_as_the_first(kept):
    """The oracle: one graph over the same chunks, drawn in the same order. Without replay this is off by 40%."""
    model = toy(dropout=0.3)
    reference = copy.deepcopy(model)
    batch = toy_batch(20)
    torch.manual_seed(11)
    parts = [reference(m.images, m.texts) for m in batch.micro_batches(5)]
    after = torch.rand(3)
    loss = oracle_loss(
        torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), parts[-1][2]
    )
    loss.backward()
    with torch.no_grad():
        for p in reference.parameters():
            p.sub_(p.grad, alpha=LR)

    torch.manual_seed(11)
    engine = PlainEngine(model, torch.optim.SGD(model.parameters(), lr=LR))
    result = train_step(engine, batch, InfoNCE(), micro_size=5, kept_graphs=kept, lr=LR)
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    assert torch.equal(torch.rand(3), after)  # and the random state goes on as after one forward


def on_a_rank(micro_size, kept):
    flat, results = parameters_after(toy(), 3, micro_size=micro_size, kept_graphs=kept)
    return flat, [r.loss for r in results], [r.grad_norm for r in results]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size, micro_size, kept", [(2, 3, 2), (4, 5, 1)])
def test_ranks_are_invisible(world_size, micro_size, kept):
    expected, losses, norms = oracle(toy(), 3)
    for flat, rank_losses, rank_norms in run_ranks(on_a_rank, world_size, micro_size, kept):
        assert torch.allclose(flat, expected, rtol=1e-12, atol=1e-14)
        assert rank_losses == pytest.approx(losses, rel=1e-12)
        assert rank_norms == pytest.approx(norms, rel=1e-12)


def test_logit_scale_stays_at_most_100():
    model = toy()
    with torch.no_grad():
        model.logit_scale.fill_(4.7)
    parameters_after(model, 1, micro_size=20, kept_graphs=1)
    assert model.logit_scale.item() <= torch.log(torch.tensor(100.0)).item() + 1e-6


def test_a_loss_that_is_not_finite_stops_before_the_update():
    model = toy()
    with torch.no_grad():
        model.visual.out.bias.fill_(float("nan"))
    before = model.text.into.weight.detach().clone()
    with pytest.raises(DivergedError, match="loss is nan"):
        parameters_after(model, 1, micro_size=10, kept_graphs=1)
    assert torch.equal(model.text.into.weight, before)


def test_rng_state_survives_a_checkpoint():
    state = rng_state(torch.device("cpu"))
    drawn = torch.rand(4)
    restore_rng(state, torch.device("cpu"))
    assert torch.equal(torch.rand(4), drawn)


@pytest.mark.parametrize("world_size", [1, 3, 8191])
def test_flags_of_all_ranks_survive_their_sum(world_size):
    """Each flag is set by no rank, one, some, or all, in all combinations."""
    setters = [0, 1, world_size // 2, world_size]
    for numbers in itertools.product(setters, repeat=4):
        ranks = [Flags(*(rank < count for count in numbers)) for rank in {0, 1, world_size - 1}]
        assert all(Flags.unpacked(rank.packed()) == rank for rank in ranks)
        one_each = [Flags(*(place == number for place in range(4))) for number in range(4)]
        total = torch.tensor(
            [count * flag.packed() for count, flag in zip(numbers, one_each, strict=True)],
            dtype=torch.float64,
        )
        assert Flags.unpacked(total.sum().item()) == Flags(*(count > 0 for count in numbers))
