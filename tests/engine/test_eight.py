"""Eight ranks, global batches that they cannot share evenly, both engines, copies in groups of four."""

from __future__ import annotations

import functools

import pytest
import torch

from clip_train import dist
from clip_train.losses.info_nce import InfoNCE
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step
from tests import tolerances
from tests.engine.layouts import ALL, engine_at
from tests.engine.test_engines import assemble, pieces, relative_error, toy
from tests.ranks import run_ranks
from tests.toy import oracle_loss, share, toy_batch

pytestmark = pytest.mark.engine
SIZES = (32, 33, 9, 20, 31)
LR, CLIP, DECAY = 0.3, 0.5, 0.1
LAYOUTS = [(layout, None) for layout in ALL] + [("fsdp 2", 4), ("fsdp 3", 2)]


def on_a_rank():
    out = []
    for layout, shard_ranks in LAYOUTS:
        optim = OptimConfig(name="sgd", lr=LR, weight_decay=DECAY)
        engine = engine_at(layout, toy, optim, clip=CLIP, shard_ranks=shard_ranks)
        told = []
        for step, size in enumerate(SIZES):
            batch = share(toy_batch(size, seed=step), dist.rank(), dist.world_size())
            result = train_step(engine, batch, InfoNCE(), micro_size=2, kept_graphs=1, lr=LR)
            told += [result.loss, result.grad_norm]
        out.append((told, pieces(engine)))
        engine.close()
    return out


@functools.cache
def on_eight_ranks():
    return run_ranks(on_a_rank, 8)


@functools.cache
def oracle():
    """The whole batch at once, in float64, without any code of the trainer."""
    model, told = toy().double(), []
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=LR)
    for step, size in enumerate(SIZES):
        batch = toy_batch(size, seed=step)
        loss = oracle_loss(*model(batch.images, batch.texts)[:3])
        optimizer.zero_grad()
        loss.backward()
        told += [loss.item(), torch.nn.utils.clip_grad_norm_(parameters, CLIP).item()]
        optimizer.step()
    return dict(model.named_parameters()), told


@pytest.mark.parametrize(
    "case", range(len(LAYOUTS)), ids=[f"{name}, groups of {ranks}" for name, ranks in LAYOUTS]
)
def test_equals_the_whole_batch(case):
    expected, numbers = oracle()
    results = [rank[case] for rank in on_eight_ranks()]
    for told, _ in results:
        assert told == pytest.approx(numbers, rel=tolerances.norm(len(SIZES), "sgd"))
    found = assemble([fragments for _, fragments in results])
    assert relative_error(found, expected) < tolerances.UPDATE["sgd"]
