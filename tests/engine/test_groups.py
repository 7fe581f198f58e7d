"""A learning rate and a decay of each parameter's own, and any optimizer, under every engine."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from clip_train import dist
from clip_train.losses.info_nce import InfoNCE
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step
from tests import tolerances
from tests.engine.layouts import ALL, engine_at
from tests.engine.test_engines import Source, assemble, pieces, toy
from tests.ranks import run_ranks
from tests.toy import oracle_loss, share, toy_batch

pytestmark = pytest.mark.engine
N, LR = 24, 0.3


def case(layout, optim, lr=LR, first=0, last=3, state=None, extra=None):
    engine = engine_at(layout, toy, optim, clip=0.5)
    if state is not None:
        engine.load_fragments(Source(state), extra)
    for s in range(first, last):
        batch = share(toy_batch(N, seed=s), dist.rank(), dist.world_size())
        train_step(engine, batch, InfoNCE(), micro_size=5, kept_graphs=1, lr=lr * 0.9**s)
    out = pieces(engine), engine.extra_state()
    engine.close()
    return out


def oracle(update, num=3, lr=LR):
    """Plain torch. update: (name, parameter, state dict, learning rate) -> nothing, from `parameter.grad`."""
    model = toy().double()
    states: dict[str, dict] = {name: {} for name, _ in model.named_parameters()}
    for s in range(num):
        batch = toy_batch(N, seed=s)
        model.zero_grad()
        oracle_loss(*model(batch.images, batch.texts)[:3]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with torch.no_grad():
            for name, p in model.named_parameters():
                update(name, p, states[name], lr * 0.9**s)
    return {name: p.detach().flatten() for name, p in model.named_parameters()}


def error(state, reference) -> float:
    """Relative, of the whole update."""
    start = dict(toy().named_parameters())
    ours, theirs = (torch.cat([whole[n].double() - start[n].detach().flatten() for n in start]) for whole in (
        {name: slots["param"] for name, slots in state.items()}, reference,
    ))  # fmt: skip
    return ((ours - theirs).norm() / theirs.norm()).item()


def sgd_in_groups(name, p, state, lr):
    lr = lr * (0.1 if name == "visual.out.weight" else 3 if name.startswith("visual.") else 1)
    decay = 0.1 if p.ndim == 2 and name != "text.into.weight" else 0
    p.sub_(lr * (p.grad + decay * p))


@pytest.mark.parametrize(
    "layout, world_size", [(layout, 1 + i % 2) for i, layout in enumerate(ALL)]
)
def test_each_parameter_has_its_own_rate_and_decay(layout, world_size):
    optim = OptimConfig(
        name="sgd",
        weight_decay=0.1,
        no_decay=["text.into.*"],
        lr_multipliers={"visual.out.w*": 0.1, "visual.*": 3},
    )
    results = run_ranks(case, world_size, layout, optim)
    assert (
        error(assemble([fragments for fragments, _ in results]), oracle(sgd_in_groups))
        < tolerances.UPDATE["sgd"]
    )


@pytest.mark.parametrize(
    "layout, other", [("zero 1", "fsdp 3"), ("zero 3", "zero 1"), ("fsdp 2", "zero 3")]
)
def test_groups_may_change_with_the_engine(layout, other):
    """And each parameter takes its moments along."""
    grouped = partial(OptimConfig, lr=1e-2, weight_decay=0.1)
    first, second = (
        grouped(lr_multipliers={"visual.*": 0.5}),
        grouped(lr_multipliers={"text.norm.*": 0.2}),
    )
    reference = run_ranks(both, 1, "fsdp 0", first, second, "fsdp 0")[0]
    saved = run_ranks(case, 2, layout, first, 1e-2, 0, 2)
    state, extra = assemble([fragments for fragments, _ in saved]), saved[0][1]
    ((fragments, _),) = run_ranks(case, 1, other, second, 1e-2, 2, 4, state, extra)
    assert (
        error(assemble([fragments]), {name: slots["param"] for name, slots in reference.items()})
        < tolerances.UPDATE["adamw"]
    )


def both(layout, first, second, other):
    fragments, extra = case(layout, first, 1e-2, 0, 2)
    return assemble([case(other, second, 1e-2, 2, 4, assemble([fragments]), extra)[0]])


def lion(name, p, state, lr):
    """arXiv 2302.06675, algorithm 2."""
    moment = state.setdefault("m", torch.zeros_like(p))
    update = (0.9 * moment + 0.1 * p.grad).sign()
    p.sub_(lr * (update + 0.1 * (p.ndim == 2) * p))
    moment.mul_(0.98).add_(0.02 * p.grad)


def rmsprop(name, p, state, lr):
    square = state.setdefault("v", torch.zeros_like(p))
    gradient = p.grad + 0.1 * (p.ndim == 2) * p
    square.mul_(0.5).add_(0.5 * gradient**2)
    p.sub_(lr * gradient / (square.sqrt() + 1e-8))


def muon(name, p, state, lr):
    """torch's own two, each over one parameter."""
    if not state:
        matrix = p.ndim == 2
        kind = (
            partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
            if matrix
            else torch.optim.AdamW
        )
        more = {} if matrix else {"betas": (0.9, 0.98), "eps": 1e-6}
        state["optimizer"] = kind([p], lr, weight_decay=0.1 * matrix, **more)
    state["optimizer"].param_groups[0]["lr"] = lr
    state["optimizer"].step()


LION = "lion_pytorch.Lion"
UPDATES = {LION: lion, "muon": muon, "torch.optim.RMSprop": rmsprop}
SLOTS = {
    LION: {"exp_avg"}, "torch.optim.RMSprop": {"square_avg"},
}  # fmt: skip


OPTIONS = {"torch.optim.RMSprop": {"alpha": 0.5}, LION: {"betas": [0.9, 0.98]}}


@pytest.mark.parametrize(
    "name, layout, world_size, other",
    [
        (LION, "zero 1", 2, "fsdp 3"), (LION, "zero 3", 2, "zero 0"), (LION, "fsdp 2", 2, "zero 2"),
        ("muon", "zero 0", 2, "fsdp 0"), ("muon", "fsdp 3", 2, "zero 3"), ("muon", "zero 2", 2, "fsdp 3"),
        ("torch.optim.RMSprop", "zero 2", 2, "fsdp 2"), ("torch.optim.RMSprop", "fsdp 3", 2, "zero 1"),
    ],
)  # fmt: skip
def test_every_optimizer_equals_its_definition_and_moves(name, layout, world_size, other):
    if name == LION:
        pytest.importorskip("lion_pytorch")
    options = OPTIONS.get(name, {})
    optim = OptimConfig(name=name, lr=1e-2, weight_decay=0.1, options=options)
    saved = run_ranks(case, world_size, layout, optim, 1e-2, 0, 2)
    state, extra = assemble([fragments for fragments, _ in saved]), saved[0][1]
    for parameter, slots in state.items():
        expected = (
            {"momentum_buffer"}
            if parameter.endswith(("into.weight", "out.weight"))
            else {"exp_avg", "exp_avg_sq"}
        )
        assert set(slots) - {"param"} == SLOTS.get(name, expected)
    ((fragments, _),) = run_ranks(case, 1, other, optim, 1e-2, 2, 4, state, extra)
    assert error(assemble([fragments]), oracle(UPDATES[name], 4, 1e-2)) < tolerances.UPDATE[name]
