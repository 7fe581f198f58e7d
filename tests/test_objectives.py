"""Whole steps with memory banks and with a teacher, against plain torch in float64."""

from __future__ import annotations

import functools

import pytest
import torch

from clip_train import dist
from clip_train.engines.base import PlainEngine
from clip_train.losses.distillation import Distillation
from clip_train.losses.memory_bank import MemoryBank
from clip_train.step import train_step
from clip_train.task import Features, named_features
from tests import tolerances
from tests.covering import pairwise
from tests.losses.oracles import banked_loss, distill_loss
from tests.ranks import run_ranks
from tests.toy import ToyCLIP, share, toy_batch

N, LR, STEPS, BANK = 48, 0.5, 5, 60
CASES = pairwise(
    ("negatives", "contaccum", "distill"), (1, 2, 3), (1, 3, 8)
)  # kind, ranks, micro-batches of each


def student() -> ToyCLIP:
    torch.manual_seed(3)
    return ToyCLIP().double()


class CountingTeacher:
    """With dropout, which eval mode must silence; counts the samples it was asked about."""

    def __init__(self):
        torch.manual_seed(4)
        self.model = ToyCLIP(dropout=0.5, logit_scale=3.0).double().eval()
        self.samples = 0

    def __call__(self, micro_batch) -> Features:
        assert not torch.is_grad_enabled()
        self.samples += len(micro_batch.images)
        return named_features(*self.model(micro_batch.images, micro_batch.texts))


def batch_at(step: int):
    return toy_batch(
        N, seed=step % 2
    )  # every second batch is the same: its past copies are no negatives


def objective(kind: str):
    match kind:
        case "negatives" | "contaccum":
            return MemoryBank(BANK, 1, kind, tile=10)
        case "distill":
            return Distillation([CountingTeacher()], tile=10)


def steps(engine, loss, micro_size: int, lr: float = LR, kept_graphs: int = 2):
    out = []
    for s in range(STEPS):
        batch = share(batch_at(s), dist.rank(), dist.world_size())
        out.append(
            train_step(engine, batch, loss, micro_size=micro_size, kept_graphs=kept_graphs, lr=lr)
        )
    return out


def on_a_rank(kind: str, micro_size: int):
    model, loss = student(), objective(kind)
    results = steps(
        PlainEngine(model, torch.optim.SGD(model.parameters(), lr=LR)), loss, micro_size
    )
    seen = loss.teachers[0].samples if kind == "distill" else 0
    return (
        torch.cat([p.detach().flatten() for p in model.parameters()]),
        [(r.loss, r.grad_norm) for r in results],
        seen,
    )


def oracle_step(kind, model, step, fifo):
    batch = batch_at(step)
    I, T, s, _ = model(batch.images, batch.texts)
    if kind == "distill":
        return sum(
            distill_loss(
                I,
                T,
                s,
                *[x.detach() for x in CountingTeacher().model(batch.images, batch.texts)[:3]],
            )
        )
    past = fifo[-BANK:] if step >= 1 else []
    past_I = torch.stack([p[0] for p in past]) if past else torch.zeros(0, I.shape[1]).double()
    past_T = torch.stack([p[1] for p in past]) if past else torch.zeros(0, I.shape[1]).double()
    names = sorted({*batch.keys, *(p[2] for p in past)})
    ids = torch.tensor([names.index(key) for key in batch.keys])
    past_ids = torch.tensor([names.index(p[2]) for p in past], dtype=torch.int64)
    fifo += [(I[i].detach(), T[i].detach(), batch.keys[i]) for i in range(N)]
    return banked_loss(I, T, s, past_I, past_T, ids, past_ids, kind)


def oracle(
    kind: str,
    lr: float = LR,
    decay: float = 0.0,
    clip=float("inf"),
):
    model, fifo = student(), []
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=lr)
    told = []
    for step in range(STEPS):
        loss = oracle_step(kind, model, step, fifo)
        optimizer.zero_grad()
        loss.backward()
        told.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item()))
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), told


def all_cases(cases):
    return [on_a_rank(*case) for case in cases]


@functools.cache
def computed(world_size: int):
    """(kind, micro size) -> every rank's answer. All cases of a world share its processes, which start slowly."""
    cases = [(kind, -(-N // (W * k))) for kind, W, k in CASES if world_size == W]
    per_rank = [all_cases(cases)] if world_size == 1 else run_ranks(all_cases, world_size, cases)
    return {case: [answers[i] for answers in per_rank] for i, case in enumerate(cases)}


@pytest.mark.distributed
@pytest.mark.parametrize("kind, world_size, k", CASES)
def test_micro_batches_and_ranks_are_invisible(kind, world_size, k):
    expected, told = oracle(kind)
    for ours, numbers, taught in computed(world_size)[kind, -(-N // (world_size * k))]:
        assert [x for pair in numbers for x in pair] == pytest.approx(
            [x for pair in told for x in pair], rel=1e-10
        )
        assert torch.allclose(ours, expected, rtol=1e-10, atol=1e-12)
        if kind == "distill":
            assert taught == STEPS * N // world_size  # once per sample and step, never in pass 2


def on_engine(kind: str, layout: str, micro_size: int):
    from clip_train.optim.config import OptimConfig
    from tests.engine.layouts import engine_at

    optim = OptimConfig(name="sgd", lr=0.3, weight_decay=0.1)
    engine = engine_at(layout, lambda: student().float(), optim, clip=0.5)
    loss = objective(kind)
    if kind == "distill":
        loss.teachers[0].model.float()
    told = [(r.loss, r.grad_norm) for r in steps(engine, loss, micro_size, lr=0.3)]
    engine.close()
    return told


@pytest.mark.engine
@pytest.mark.parametrize(
    "kind, layout",
    [("negatives", "zero 2"), ("contaccum", "fsdp 3"), ("distill", "zero 3")],
)
def test_on_an_engine(kind, layout):
    _, told = oracle(kind, lr=0.3, decay=0.1, clip=0.5)
    for ours in run_ranks(on_engine, 2, kind, layout, 8):
        assert [x for pair in ours for x in pair] == pytest.approx(
            [x for pair in told for x in pair], rel=tolerances.norm(STEPS, "sgd")
        )
