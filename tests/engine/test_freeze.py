"""Parameters that are not trained, under every engine: no gradient, no moments, one copy in a checkpoint, unchanged."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from clip_train import dist
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.config import ModelConfig
from clip_train.models.freeze import freeze
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step
from tests import tolerances
from tests.engine.layouts import ALL, engine_at
from tests.engine.test_engines import Source, assemble, pieces
from tests.ranks import run_ranks
from tests.toy import ToyCLIP, oracle_loss, share, toy_batch

pytestmark = pytest.mark.engine
N, LR = 24, 1e-2
TOWER, PARTS = ("visual.*",), ("visual.into.*", "text.norm.*", "logit_scale")


def toy(frozen) -> ToyCLIP:
    torch.manual_seed(5)
    model = ToyCLIP()
    freeze(model, ModelConfig(freeze=[*frozen]))
    return model


def oracle(frozen, num):
    """Plain torch, whose optimizer is given nothing but the trained ones."""
    model = toy(frozen).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    decay = [
        {"params": [p for p in trained if (p.ndim >= 2) == d], "weight_decay": 0.1 * d}
        for d in (True, False)
    ]
    optimizer = torch.optim.AdamW(decay, lr=LR, betas=(0.9, 0.98), eps=1e-6)
    told = []
    for s in range(num):
        batch = toy_batch(N, seed=s)
        loss = oracle_loss(*model(batch.images, batch.texts)[:3])
        optimizer.zero_grad()
        loss.backward()
        told.append((loss.item(), torch.nn.utils.clip_grad_norm_(trained, 0.5).item()))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, told


def case(layout, frozen, precision, first, last, state=None, extra=None, **more):
    config = OptimConfig(lr=LR, weight_decay=0.1)
    engine = engine_at(layout, lambda: toy(frozen), config, clip=0.5, precision=precision, **more)
    if state is not None:
        engine.load_fragments(Source(state), extra)
    told = []
    for s in range(first, last):
        batch = share(toy_batch(N, seed=s), dist.rank(), dist.world_size())
        result = train_step(engine, batch, InfoNCE(), micro_size=5, kept_graphs=1, lr=LR)
        told.append((result.loss, result.grad_norm))
    out = told, pieces(engine), engine.extra_state()
    engine.close()
    return out


def check(state, frozen, reference):
    """Frozen ones are what they were, bit for bit, without moments; the others those of plain torch."""
    named = dict(toy(frozen).named_parameters())
    for name, p in named.items():
        slots = {"param", "exp_avg", "exp_avg_sq"} if p.requires_grad else {"param"}
        assert set(state[name]) == slots, name
        if not p.requires_grad:
            assert torch.equal(state[name]["param"], p.flatten()), name
    ours, theirs, start = (
        torch.cat(
            [
                whole[name].detach().flatten().double()
                for name, p in named.items()
                if p.requires_grad
            ]
        )
        for whole in ({name: slots["param"] for name, slots in state.items()}, reference, named)
    )
    return ((ours - theirs).norm() / (theirs - start).norm()).item()


@pytest.mark.parametrize("world_size, frozen", [(1, PARTS), (2, PARTS), (2, TOWER)])
@pytest.mark.parametrize("layout", ALL)
def test_what_is_frozen_stays_and_the_rest_equals_plain_torch(layout, world_size, frozen):
    reference, expected = oracle(frozen, 3)
    results = run_ranks(case, world_size, layout, frozen, "fp32", 0, 3)
    for told, *_ in results:
        assert [t[0] for t in told] == pytest.approx(
            [e[0] for e in expected], rel=tolerances.loss(3, "adamw")
        )
        assert [t[1] for t in told] == pytest.approx(
            [e[1] for e in expected], rel=tolerances.norm(3, "adamw")
        )
    assert (
        check(assemble([fragments for _, fragments, _ in results]), frozen, reference)
        < tolerances.UPDATE["adamw"]
    )


@pytest.mark.parametrize(
    "layout, precision, other",
    [
        ("zero 1", "bf16", "fsdp 2"), ("zero 2", "fp32", "zero 3"), ("zero 3", "bf16", "zero 1"),
        ("fsdp 3", "bf16", "zero 2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("frozen", [TOWER, PARTS])
def test_frozen_parameters_go_on_under_another_engine(layout, precision, other, frozen):
    """And are saved as they were loaded, where the model itself computes with rounded copies."""
    reference, _ = oracle(frozen, 4)
    saved = run_ranks(case, 2, layout, frozen, precision, 0, 2)
    state, extra = assemble([fragments for _, fragments, _ in saved]), saved[0][2]
    (resumed,) = run_ranks(case, 1, other, frozen, precision, 2, 4, state, extra)
    assert check(assemble([resumed[1]]), frozen, reference) < (
        tolerances.UPDATE["adamw"] if precision == "fp32" else 0.2
    )


@pytest.mark.parametrize("more", [{"reduce_gradients": "once"}, {"offload": "optimizer"}], ids=str)
@pytest.mark.parametrize("layout", ["zero 2", "zero 3", "fsdp 2"])
def test_other_ways_to_compute_a_step_know_frozen_parameters(layout, more):
    reference, _ = oracle(TOWER, 3)
    results = run_ranks(partial(case, **more), 2, layout, TOWER, "fp32", 0, 3)
    assert (
        check(assemble([fragments for _, fragments, _ in results]), TOWER, reference)
        < tolerances.UPDATE["adamw"]
    )


@pytest.mark.parametrize("world_size, frozen", [(2, TOWER), (3, PARTS)])
def test_small_frozen_parameters_that_stage_3_shares_out(world_size, frozen, tmp_path):
    """By default it keeps them gathered."""
    base = tmp_path / "shared.json"
    base.write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
    reference, _ = oracle(frozen, 3)
    results = run_ranks(
        partial(case, ds_config=str(base)), world_size, "zero 3", frozen, "bf16", 0, 3
    )
    assert check(assemble([fragments for _, fragments, _ in results]), frozen, reference) < 0.2
