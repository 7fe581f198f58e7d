"""The moving average of the weights against a textbook loop in float64, under every engine."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from clip_train import dist
from clip_train.engines.base import MovingAverage, PlainEngine
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.config import ModelConfig
from clip_train.models.freeze import freeze
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer, moment_bytes
from clip_train.step import train_step
from clip_train.task import Batch
from tests import tolerances
from tests.engine.layouts import ALL, engine_at
from tests.engine.test_engines import Source, assemble, pieces
from tests.models.convolutional import convolutional_clip
from tests.models.small import inputs
from tests.ranks import run_ranks
from tests.toy import ToyCLIP, columns_of, oracle_loss, share, toy_batch

pytestmark = pytest.mark.engine
N, LR, CLIP_NORM = 24, 0.3, 0.5
FROZEN = ("visual.into.*", "text.norm.weight")
KINDS = {"constant": (0.7, False), "warm-up": (0.6, True)}


def toy(frozen=()) -> ToyCLIP:
    torch.manual_seed(5)
    model = ToyCLIP()
    freeze(model, ModelConfig(freeze=[*frozen]))
    return model


def sgd(kind: str | None = "constant") -> OptimConfig:
    decay, warmup = KINDS[kind] if kind else (None, False)
    return OptimConfig(name="sgd", lr=LR, weight_decay=0.0, ema_decay=decay, ema_warmup=warmup)


def oracle(kind: str, num: int, frozen=(), start: int = 0) -> dict[str, torch.Tensor]:
    """start: the step behind which the average begins."""
    decay, warmup = KINDS[kind]
    model = toy(frozen).double()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    average = {name: p.detach().clone() for name, p in trained.items()}
    for s in range(num):
        batch = toy_batch(N, seed=s)
        model.zero_grad()
        oracle_loss(*model(batch.images, batch.texts)[:3]).backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), CLIP_NORM)
        for name, p in trained.items():
            with torch.no_grad():
                p.sub_(LR * p.grad)
            d = min(decay, 1 - 1 / (s + 1) ** (2 / 3)) if warmup else decay
            d = 0.0 if s < start else d
            average[name] = d * average[name] + (1 - d) * p.detach()
    return average


def case(layout, kind, first, last, frozen=(), state=None, extra=None, **more):
    engine = engine_at(layout, partial(toy, frozen), sgd(kind), clip=CLIP_NORM, **more)
    if state is not None:
        engine.load_fragments(Source(state), extra)
    skipped = train(engine, first, last)
    out = pieces(engine), engine.extra_state(), skipped
    engine.close()
    return out


def train(engine, first: int, last: int) -> list[bool]:
    skipped = []
    for s in range(first, last):
        batch = share(toy_batch(N, seed=s), dist.rank(), dist.world_size())
        skipped.append(
            train_step(engine, batch, InfoNCE(), micro_size=5, kept_graphs=1, lr=LR).skipped
        )
    return skipped


def joined(results) -> dict[str, dict[str, torch.Tensor]]:
    return assemble([fragments for fragments, *_ in results])


def error(state, reference) -> float:
    """Relative, of all by which the average has moved; those of frozen parameters are not there."""
    assert {name for name, slots in state.items() if "param_ema" in slots} == set(reference)
    start = dict(toy().named_parameters())
    moved = [
        torch.cat(
            [x[name].flatten().double() - start[name].detach().flatten() for name in reference]
        )
        for x in ({name: slots.get("param_ema") for name, slots in state.items()}, reference)
    ]
    return ((moved[0] - moved[1]).norm() / moved[1].norm()).item()


@pytest.mark.parametrize(
    "layout, world_size",
    [("zero 1", 1), ("zero 3", 1), ("fsdp 3", 1), *((layout, 2) for layout in ALL)],
)
def test_it_equals_its_definition(layout, world_size):
    kind = "warm-up" if layout.endswith("3") else "constant"
    state = joined(run_ranks(case, world_size, layout, kind, 0, 4, FROZEN))
    assert error(state, oracle(kind, 4, FROZEN)) < tolerances.UPDATE["sgd"]
    assert all(value.dtype == torch.float32 for slots in state.values() for value in slots.values())


@pytest.mark.parametrize("layout", ["zero 2", "zero 3", "fsdp 3"])
def test_offloaded_it_is_the_same(layout):
    state = joined(run_ranks(partial(case, offload="optimizer"), 2, layout, "constant", 0, 3))
    assert error(state, oracle("constant", 3)) < tolerances.UPDATE["sgd"]


@pytest.mark.parametrize(
    "layout, other, world_size",
    [("zero 1", "fsdp 3", 1), ("zero 3", "zero 1", 3), ("fsdp 2", "zero 3", 2)],
)
def test_it_goes_on_under_another_engine(layout, other, world_size):
    saved = run_ranks(case, 2, layout, "warm-up", 0, 2, FROZEN)
    state, extra = joined(saved), saved[0][1]
    resumed = run_ranks(case, world_size, other, "warm-up", 2, 4, FROZEN, state, extra)
    assert error(joined(resumed), oracle("warm-up", 4, FROZEN)) < tolerances.UPDATE["sgd"]


@pytest.mark.parametrize("layout", ["zero 1", "fsdp 3"])
def test_it_may_begin_and_end_with_any_checkpoint(layout):
    (without,) = run_ranks(case, 1, "zero 0", None, 0, 2)
    state = joined([without])
    assert not any("param_ema" in slots for slots in state.values())
    begun = run_ranks(case, 2, layout, "constant", 2, 4, (), state, without[1])
    assert error(joined(begun), oracle("constant", 4, start=2)) < tolerances.UPDATE["sgd"]
    (ended,) = run_ranks(case, 1, layout, None, 4, 5, (), joined(begun), begun[0][1])
    assert not any("param_ema" in slots for slots in joined([ended]).values())


@pytest.mark.parametrize("layout", ["zero 1", "zero 3"])
def test_a_skipped_step_leaves_it_alone(layout, tmp_path):
    base = tmp_path / "huge.json"
    base.write_text(json.dumps({"fp16": {"initial_scale_power": 32, "hysteresis": 1}}))
    saved = run_ranks(case, 1, "zero 0", "constant", 0, 2)
    before, more = joined(saved), {"precision": "fp16", "ds_config": str(base)}
    extra = {"optimizer_steps": 2}  # without a loss scale
    (after,) = run_ranks(partial(case, **more), 1, layout, "constant", 2, 3, (), before, extra)
    assert after[2] == [True] and after[1]["optimizer_steps"] == 2
    state = joined([after])
    assert all(
        torch.equal(state[name][slot], before[name][slot])
        for name in before
        for slot in before[name]
    )
    assert any(not torch.equal(slots["param"], slots["param_ema"]) for slots in before.values())


def evaluating_case(layout, precision):
    """Two steps, features of the average and then of the weights, and two more steps."""
    engine = engine_at(layout, toy, sgd(), clip=CLIP_NORM, precision=precision)
    train(engine, 0, 2)
    before, seen = pieces(engine), []
    batch = toy_batch(8, seed=9)
    engine.train(False)
    with torch.no_grad():
        seen.append(
            engine.encode("image", batch.images)
        )  # what is whole from here on must not be taken for the average
        with engine.averaged():
            seen += [engine.encode("image", batch.images), engine.encode("text", batch.texts)]
        seen.append(engine.encode("image", batch.images))
    after = pieces(engine)
    train(engine, 2, 4)
    out = before, after, seen, pieces(engine)
    engine.close()
    return out


@pytest.mark.parametrize(
    "layout, precision",
    [
        ("zero 0", "fp32"), ("zero 1", "bf16"), ("zero 2", "fp32"), ("zero 3", "fp32"), ("zero 3", "bf16"),
        ("fsdp 0", "bf16"), ("fsdp 2", "fp32"), ("fsdp 3", "fp32"), ("fsdp 3", "bf16"),
    ],
)  # fmt: skip
def test_an_evaluation_of_it_leaves_no_trace(layout, precision):
    results = run_ranks(evaluating_case, 2, layout, precision)
    before, after, final = (assemble([r[i] for r in results]) for i in (0, 1, 3))
    assert all(
        torch.equal(before[name][slot], after[name][slot])
        for name in before
        for slot in before[name]
    )
    model, batch = toy().double(), toy_batch(8, seed=9)
    model.load_state_dict(
        {n: slots["param_ema"].view_as(model.get_parameter(n)) for n, slots in before.items()}
    )
    image, text, *_ = model(batch.images, batch.texts)
    allowed = 1e-5 if precision == "fp32" else 2e-2
    for _, _, (weights, averaged, averaged_text, weights_again), _ in results:
        assert (averaged - image).abs().max() < allowed and (
            averaged_text - text
        ).abs().max() < allowed
        assert torch.equal(weights, weights_again) and (weights - image).abs().max() > 2 * allowed
    if precision == "fp32":
        assert error(final, oracle("constant", 4)) < tolerances.UPDATE["sgd"]


def test_running_statistics_have_one_too():
    torch.manual_seed(5)
    model = convolutional_clip()
    engine = PlainEngine(model, build_optimizer(sgd(), model.named_parameters()))
    engine.ema = MovingAverage(*KINDS["constant"])
    engine.load_fragments(WholeState(model.state_dict()), {})
    average = {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}
    assert any(name.endswith("running_mean") for name in average)
    for seed in range(2):
        batch = Batch(columns_of(*inputs(8, seed=seed), [str(i) for i in range(8)]))
        train_step(engine, batch, InfoNCE(), micro_size=8, kept_graphs=1, lr=0.01)
        average = {
            name: 0.7 * before + 0.3 * model.get_buffer(name) for name, before in average.items()
        }
    found = {f.name: f.tensors["param_ema"] for f in engine.state_fragments() if f.name in average}
    for name, expected in average.items():
        torch.testing.assert_close(found[name], expected.flatten(), rtol=1e-6, atol=1e-7)


def test_it_takes_four_bytes_of_each_trained_element():
    for name in ("adamw", "sgd", "torch.optim.RMSprop"):
        assert (
            moment_bytes(OptimConfig(name=name, ema_decay=0.9))
            == moment_bytes(OptimConfig(name=name)) + 4
        )
