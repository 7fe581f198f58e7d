"""Steps whose global batches vary in size and divide by nothing, against one process and plain torch in float64."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from clip_train import dist
from clip_train.engines.base import PlainEngine
from clip_train.losses.distillation import Distillation
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.memory_bank import MemoryBank
from clip_train.losses.ring import RingInfoNCE
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step
from tests import tolerances
from tests.covering import pairwise
from tests.engine.layouts import ALL, engine_at
from tests.engine.test_engines import assemble, pieces, relative_error
from tests.engine.test_engines import toy as float_toy
from tests.losses.oracles import banked_loss, distill_loss
from tests.ranks import run_ranks
from tests.test_objectives import CountingTeacher
from tests.toy import ToyCLIP, oracle_loss, share, toy_batch

SIZES = (32, 33, 7, 20, 31)
LR, BANK = 0.5, 41
KINDS = ("info_nce", "softmax ring", "gather", "ring", "negatives", "contaccum", "distill")
CASES = pairwise(KINDS, (2, 1, 3, 4), (5, 1, 64))  # kind, ranks, micro-batch size


class Biased(ToyCLIP):
    def __init__(self):
        super().__init__()
        self.logit_bias = torch.nn.Parameter(torch.tensor([-3.0]))

    def forward(self, *inputs):
        image, text, scale, _ = super().forward(*inputs)
        return image, text, scale, self.logit_bias.to(scale.dtype)


def student(kind: str) -> ToyCLIP:
    torch.manual_seed(3)
    return (Biased() if kind in ("gather", "ring") else ToyCLIP()).double()


def objective(kind: str):
    match kind:
        case "gather" | "ring":
            return SigmoidLoss(tile=7, exchange=kind)
        case "negatives" | "contaccum":
            return MemoryBank(BANK, 1, kind, tile=7)
        case "distill":
            return Distillation([CountingTeacher()], tile=7)
        case "softmax ring":
            return RingInfoNCE(tile=7)
    return InfoNCE(tile=7)


def steps(engine, loss, micro_size: int, kept: int, lr: float = LR):
    out = []
    for step, size in enumerate(SIZES):
        batch = share(toy_batch(size, seed=step), dist.rank(), dist.world_size())
        result = train_step(engine, batch, loss, micro_size=micro_size, kept_graphs=kept, lr=lr)
        out += [result.loss, result.grad_norm]
    return out


def oracle_step(kind: str, model, step: int, past: list):
    size = SIZES[step]
    batch = toy_batch(size, seed=step)
    I, T, s, b = model(batch.images, batch.texts)
    if kind in ("gather", "ring"):
        return -F.logsigmoid((2 * torch.eye(size) - 1) * (s * I @ T.T + b)).sum() / size
    if kind == "distill":
        return sum(
            distill_loss(
                I,
                T,
                s,
                *[x.detach() for x in CountingTeacher().model(batch.images, batch.texts)[:3]],
            )
        )
    if kind in ("info_nce", "softmax ring"):
        return oracle_loss(I, T, s)
    known = past[-BANK:] if step >= 1 else []
    past_I, past_T = (
        torch.stack([p[i] for p in known]) if known else torch.zeros(0, I.shape[1]).double()
        for i in (0, 1)
    )
    past += [(I[i].detach(), T[i].detach()) for i in range(size)]
    ids = torch.arange(size)
    return banked_loss(I, T, s, past_I, past_T, ids, torch.arange(len(known)) + 1000, kind)


def oracle(kind: str):
    model, past, told = student(kind), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(len(SIZES)):
        loss = oracle_step(kind, model, step, past)
        optimizer.zero_grad()
        loss.backward()
        told += [
            loss.item(),
            torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item(),
        ]
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), told


def on_ranks(cases: list[tuple[str, int]]):
    out = []
    for kind, micro_size in cases:
        model = student(kind)
        engine = PlainEngine(model, torch.optim.SGD(model.parameters(), lr=LR))
        told = steps(engine, objective(kind), micro_size, kept=2)
        out.append((torch.cat([p.detach().flatten() for p in model.parameters()]), told))
    return out


@functools.cache
def computed(world_size: int):
    """(kind, micro-batch size) -> every rank's answer. All cases of a world share its processes."""
    cases = [(kind, micro_size) for kind, W, micro_size in CASES if world_size == W]
    ranks = [on_ranks(cases)] if world_size == 1 else run_ranks(on_ranks, world_size, cases)
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("kind, world_size, micro_size", CASES)
def test_uneven_ranks_and_micro_batches_are_invisible(kind, world_size, micro_size):
    expected, told = oracle(kind)
    for ours, numbers in computed(world_size)[kind, micro_size]:
        assert numbers == pytest.approx(told, rel=1e-10)
        assert torch.allclose(ours, expected, rtol=1e-10, atol=1e-12)


def on_engine(layout: str, reduce_gradients: str, micro_size: int, kept: int):
    optim = OptimConfig(name="sgd", lr=0.3, weight_decay=0.1)
    engine = engine_at(layout, float_toy, optim, clip=0.5, reduce_gradients=reduce_gradients)
    told = steps(engine, InfoNCE(), micro_size, kept, lr=0.3)
    out = told, pieces(engine)
    engine.close()
    return out


@pytest.mark.engine
@pytest.mark.parametrize(
    "layout, reduce_gradients, world_size, micro_size",
    pairwise(
        ALL, ("once", "each_backward"), (2, 3), (5, 1),
        keep=lambda case: case[0][-1] in "23" or case[1] == "once",
    ),
)  # fmt: skip
def test_on_an_engine(layout, reduce_gradients, world_size, micro_size):
    model, expected = float_toy().double(), []
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.3)
    for step, size in enumerate(SIZES):
        batch = toy_batch(size, seed=step)
        loss = oracle_loss(*model(batch.images, batch.texts)[:3])
        optimizer.zero_grad()
        loss.backward()
        expected += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
        optimizer.step()
    results = run_ranks(
        on_engine, world_size, layout, reduce_gradients, micro_size, min(2, micro_size)
    )
    assert all(
        told == pytest.approx(expected, rel=tolerances.norm(len(SIZES), "sgd"))
        for told, _ in results
    )
    assert (
        relative_error(
            assemble([fragments for _, fragments in results]), dict(model.named_parameters())
        )
        < tolerances.UPDATE["sgd"]
    )
