"""The DeepSpeed engine against plain full-batch torch, at every ZeRO stage, on one and two ranks."""

from __future__ import annotations

import json
import math

import pytest
import torch

from clip_train import dist
from clip_train.contrastive import InfoNCE
from clip_train.optim import OptimConfig, build_optimizer
from clip_train.protocols import FeatureGradients, Fragment, Wanted
from clip_train.step import train_step
from launcher.engines.config import EngineConfig
from launcher.engines.deepspeed.config import build_ds_config
from tests.covering import pairwise
from tests.processor import answer
from tests.ranks import run_ranks
from tests.toy import ToyCLIP, oracle_loss, share, toy_batch

pytestmark = pytest.mark.engine
N, LR, CLIP = 24, 0.3, 0.5
CPU = torch.device("cpu")


class Source:
    """A FragmentSource over whole tensors {name: {slot: tensor}}."""

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return {name: tuple(slots["param"].shape) for name, slots in self.tensors.items()}

    def slots(self):
        return set(next(iter(self.tensors.values())))

    def prepare(self, wanted):
        self.prepared = list(wanted)

    def read(self, name, slot, start, numel):
        assert Wanted(name, slot, start, numel) in self.prepared
        return self.tensors[name][slot].flatten()[start : start + numel]


def toy(dropout=0.0):
    torch.manual_seed(5)
    return ToyCLIP(dropout)


def weights(model) -> Source:
    return Source({name: {"param": p.detach().clone()} for name, p in model.named_parameters()})


def make(stage: int, precision="fp32", optim="sgd", offload="none", lr=LR, clip: float | None = CLIP, base=None):
    from launcher.engines.deepspeed.engine import build_engine

    if precision != "fp32":
        answer(True, precision)  # slow on some processors, but the numbers are the same
    config = EngineConfig(zero_stage=stage, precision=precision, offload=offload, ds_config=base)
    ds_config = build_ds_config(config, micro_size=8, world_size=dist.world_size(), grad_clip_norm=clip)
    optim_config = OptimConfig(name=optim, lr=lr, weight_decay=0.1)
    engine = build_engine(toy, lambda named: build_optimizer(optim_config, named), ds_config, device=CPU)
    engine.set_grad_clip(clip)
    engine.load_fragments(weights(toy()), {})
    return engine


def steps(engine, first: int, last: int, micro_size: int, kept: int, lr=LR):
    out = []
    for s in range(first, last):
        batch = share(toy_batch(N, seed=s), dist.rank(), dist.world_size())
        out.append(train_step(engine, batch, InfoNCE(), micro_size=micro_size, kept_graphs=kept, lr=lr))
    return [(r.loss, r.grad_norm) for r in out]


def pieces(engine) -> list[Fragment]:
    return [
        Fragment(f.name, f.shape, f.start, {k: v.clone() for k, v in f.tensors.items()})
        for f in engine.state_fragments()
    ]


def assemble(per_rank: list[list[Fragment]]) -> dict[str, dict[str, torch.Tensor]]:
    """Whole tensors from every rank's fragments; every element exactly once."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    seen: dict[str, torch.Tensor] = {}
    for fragment in (f for fragments in per_rank for f in fragments):
        size = torch.Size(fragment.shape).numel()
        count = seen.setdefault(fragment.name, torch.zeros(size, dtype=torch.int))
        for slot, value in fragment.tensors.items():
            whole = out.setdefault(fragment.name, {}).setdefault(slot, torch.full((size,), torch.nan))
            whole[fragment.start : fragment.start + len(value)] = value.float()
        count[fragment.start : fragment.start + len(value)] += 1
    assert all((count == 1).all() for count in seen.values())
    return out


def oracle(optim: str, num: int, lr=LR, clip=CLIP):
    model = toy().double()
    named = list(model.named_parameters())
    decay = [p for _, p in named if p.ndim >= 2]
    rest = [p for _, p in named if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if optim == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), eps=1e-6)
    else:
        optimizer = torch.optim.SGD(groups, lr=lr)
    told = []
    for s in range(num):
        batch = toy_batch(N, seed=s)
        loss = oracle_loss(*model(batch.images, batch.texts)[:3])
        optimizer.zero_grad()
        loss.backward()
        told.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item()))
        optimizer.step()
    return dict(named), told


def run_case(stage, precision, optim, micro_size, kept, offload="none", lr=LR):
    engine = make(stage, precision, optim, offload, lr)
    told = steps(engine, 0, 4, micro_size, kept, lr)
    out = told, pieces(engine), engine.extra_state()
    engine.close()
    return out


def relative_error(state, reference) -> float:
    ours = torch.cat([state[name]["param"].double() for name in reference])
    theirs = torch.cat([p.detach().flatten() for p in reference.values()])
    start = torch.cat([p.detach().flatten().double() for p in toy().parameters()])
    return ((ours - theirs).norm() / (theirs - start).norm()).item()  # of the update, not of the weights


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "world_size, micro_size, kept, optim", [(1, 7, 2, "sgd"), (2, 5, 1, "sgd"), (2, 4, 3, "adamw")]
)
def test_fp32_equals_plain_torch(stage, world_size, micro_size, kept, optim):
    lr = 1e-2 if optim == "adamw" else LR
    reference, expected = oracle(optim, 4, lr)
    results = run_ranks(run_case, world_size, stage, "fp32", optim, micro_size, kept, "none", lr)
    for told, _, extra in results:
        assert [t[0] for t in told] == pytest.approx([e[0] for e in expected], rel=2e-6)
        assert [t[1] for t in told] == pytest.approx([e[1] for e in expected], rel=1e-5)
        assert extra["optimizer_steps"] == 4
    # Adam divides by the root of a mean of squares: where a gradient is zero to rounding, so is its digit.
    assert relative_error(assemble([r[1] for r in results]), reference) < (2e-4 if optim == "adamw" else 5e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_is_near_and_keeps_fp32_masters(stage):
    reference, expected = oracle("sgd", 4)
    results = run_ranks(run_case, 2, stage, "bf16", "sgd", 5, 1)
    state = assemble([r[1] for r in results])
    assert [t[0] for t in results[0][0]] == pytest.approx([e[0] for e in expected], rel=2e-2)
    assert relative_error(state, reference) < 5e-2
    master = torch.cat([slots["param"] for slots in state.values()])
    assert not torch.equal(master, master.bfloat16().float())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_scales_the_loss_and_unscales_the_norm(stage):
    reference, expected = oracle("sgd", 4)
    (told, fragments, extra), *_ = run_ranks(run_case, 1, stage, "fp16", "sgd", 5, 1)
    assert relative_error(assemble([fragments]), reference) < 2e-2
    assert told[0][1] == pytest.approx(expected[0][1], rel=1e-2)
    assert extra["loss_scaler"]["cur_scale"] > 1


def growing_scale_case(stage, base, state=None, extra=None):
    """After three steps, and after six; with `state` from there on."""
    engine = make(stage, "fp16", lr=0.02, clip=None, base=base)
    out = []
    for first in (0, 3):
        if first == 3 and state is not None:
            engine.load_fragments(Source(state), extra)
        told = [] if first == 0 and state is not None else steps(engine, first, first + 3, 5, 1, 0.02)
        out.append((told, pieces(engine), engine.extra_state()))
    engine.close()
    return out


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_at_which_the_loss_scale_grows_is_a_whole_step(stage, tmp_path):
    base = tmp_path / "grows.json"
    base.write_text(json.dumps({"fp16": {"initial_scale_power": 8, "loss_scale_window": 3}}))
    reference, expected = oracle("sgd", 6, 0.02, math.inf)  # a clip would hide what is halved
    ((half, end),) = run_ranks(growing_scale_case, 1, stage, str(base))
    assert [extra["loss_scaler"]["cur_scale"] for *_, extra in (half, end)] == [256.0, 512.0]
    assert [t[1] for t in half[0] + end[0]] == pytest.approx([e[1] for e in expected], rel=1e-2)
    state = assemble([end[1]])
    assert relative_error(state, reference) < 1e-2
    ((_, (told, fragments, extra)),) = run_ranks(growing_scale_case, 1, stage, str(base), assemble([half[1]]), half[2])
    assert (told, extra) == (end[0], end[2])
    resumed = assemble([fragments])
    assert all(torch.equal(state[name]["param"], resumed[name]["param"]) for name in state)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimizer_gives_the_same(stage):
    reference, _ = oracle("adamw", 4, 1e-2)
    results = run_ranks(run_case, 2, stage, "fp32", "adamw", 5, 1, "optimizer", 1e-2)
    assert relative_error(assemble([r[1] for r in results]), reference) < 2e-4


def save_half(stage, precision):
    engine = make(stage, precision, "adamw", lr=1e-2)
    steps(engine, 0, 2, 5, 1, 1e-2)
    half = pieces(engine), engine.extra_state()
    told = steps(engine, 2, 4, 5, 1, 1e-2)
    out = half, told, pieces(engine)
    engine.close()
    return out


def go_on(stage, precision, state, extra):
    engine = make(stage, precision, "adamw", lr=1e-2)
    engine.load_fragments(Source(state), extra)
    told = steps(engine, 2, 4, 5, 1, 1e-2)
    out = told, pieces(engine)
    engine.close()
    return out


@pytest.mark.parametrize(
    "stage, precision", [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (3, "bf16")]
)
def test_resuming_is_bitwise_on_the_same_layout_and_close_on_another(stage, precision):
    saved = run_ranks(save_half, 2, stage, precision)
    state, extra = assemble([s[0][0] for s in saved]), saved[0][0][1]
    assert set(next(iter(state.values()))) == {"param", "exp_avg", "exp_avg_sq"}
    resumed = run_ranks(go_on, 2, stage, precision, state, extra)
    assert [r[0] for r in resumed] == [s[1] for s in saved]
    final, again = assemble([s[2] for s in saved]), assemble([r[1] for r in resumed])
    assert all(torch.equal(final[name][slot], again[name][slot]) for name in final for slot in final[name])
    other = {0: 3, 1: 2, 2: 1, 3: 1}[stage]
    (told, _), *_ = run_ranks(go_on, 1, other, precision, state, extra)
    assert [t[0] for t in told] == pytest.approx([t[0] for t in saved[0][1]], rel=1e-5 if precision == "fp32" else 5e-3)


def clamp_case(stage, precision):
    engine = make(stage, precision)
    engine.load_fragments(with_value("logit_scale", 4.9), {})
    seen = [engine.forward(toy_batch(4).micro_batches(4)[0]).logit_scale.item()]
    for s in range(3):
        steps(engine, s, s + 1, 5, 1, lr=1e-4)
        seen.append(engine.forward(toy_batch(4).micro_batches(4)[0]).logit_scale.item())
    engine.close()
    return seen


@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_the_clamp_of_logit_scale_survives_the_next_step(stage, precision):
    for before, *after in run_ranks(clamp_case, 2, stage, precision):
        assert before > 120
        assert all(95 < value < 101 for value in after)


def with_value(name, value) -> Source:
    """The toy's weights with one of them filled with `value`."""
    filled = {n: torch.full_like(p, value) if n == name else p.detach() for n, p in toy().named_parameters()}
    return Source({n: {"param": p} for n, p in filled.items()})


def inf_case(stage, precision):
    engine = make(stage, precision)
    features = engine.forward(toy_batch(4).micro_batches(4)[0])
    gradients = FeatureGradients(torch.full_like(features.image, torch.inf), features.text.detach(), torch.ones(1))
    engine.backward(features, gradients, True)
    report = engine.step(1e-3)
    engine.close()
    return report.grad_norm, report.skipped


@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (1, "fp32"), (1, "bf16"), (3, "fp32")])
def test_a_gradient_that_is_not_finite_is_no_skipped_step(stage, precision):
    ((norm, skipped),) = run_ranks(inf_case, 1, stage, precision)
    assert not skipped and not math.isfinite(norm)


def scale_case(stage):
    engine = make(stage, "bf16")
    engine.load_fragments(with_value("logit_scale", math.log(99)), {})
    scale = engine.forward(toy_batch(4).micro_batches(4)[0]).logit_scale
    gradient = torch.autograd.grad(scale.sum(), engine.engine.module.logit_scale)[0].item() if stage == 1 else 99.0
    engine.close()
    return scale.item(), gradient


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_loss_sees_the_fp32_master_of_logit_scale(stage):
    """The bf16 copy of the parameter would give 98.5 or 101.5."""
    for value, gradient in run_ranks(scale_case, 2, stage):
        assert value == pytest.approx(99.0, rel=1e-5)
        assert gradient == pytest.approx(99.0, rel=5e-3)


def varying_case(stage, precision, reduce_gradients):
    """k and the kept graphs change from step to step."""
    from launcher.engines.deepspeed.engine import build_engine

    if precision != "fp32":
        answer(True, precision)
    config = EngineConfig(zero_stage=stage, precision=precision, reduce_gradients=reduce_gradients)
    ds_config = build_ds_config(config, micro_size=8, world_size=dist.world_size(), grad_clip_norm=CLIP)
    optim_config = OptimConfig(name="sgd", lr=LR, weight_decay=0.1)
    engine = build_engine(toy, lambda named: build_optimizer(optim_config, named), ds_config, device=CPU)
    engine.load_fragments(weights(toy()), {})
    for s, (micro_size, kept) in enumerate([(12, 1), (5, 1), (3, 4), (2, 2)]):
        steps(engine, s, s + 1, micro_size, kept)
    out = pieces(engine)
    engine.close()
    return out


@pytest.mark.parametrize(
    "world_size, stage, precision, reduce_gradients",
    pairwise((2, 1), (2, 3), ("fp32", "bf16"), ("each_backward", "once")),
)
def test_k_and_the_reduction_are_invisible(world_size, stage, precision, reduce_gradients):
    reference, _ = oracle("sgd", 4)
    state = assemble(run_ranks(varying_case, world_size, stage, precision, reduce_gradients))
    assert relative_error(state, reference) < (5e-6 if precision == "fp32" else 5e-2)
