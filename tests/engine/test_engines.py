"""Both engines against plain full-batch torch, at every stage, on one, two and three ranks."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch

from clip_train import dist
from clip_train.engines.config import EngineConfig
from clip_train.errors import UserError
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import train_step
from clip_train.task import Fragment, MicroBatch, StateRange, named_features
from tests import tolerances
from tests.covering import pairwise
from tests.engine.layouts import ALL, FSDP, PLAIN, ZERO, engine_at
from tests.ranks import device, run_ranks
from tests.test_step import Underflowing
from tests.toy import ToyCLIP, columns_of, oracle_loss, share, toy_batch

pytestmark = pytest.mark.engine
N, LR, MAX_NORM = 24, 0.3, 0.5
CPU = torch.device("cpu")


class Source:
    """A FragmentSource over whole tensors {name: {slot: tensor}}."""

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return {name: tuple(slots["param"].shape) for name, slots in self.tensors.items()}

    def slots(self, name):
        return set(self.tensors[name])

    def prepare(self, wanted):
        self.prepared = list(wanted)

    def read(self, name, slot, start, numel):
        assert StateRange(name, slot, start, numel) in self.prepared
        return self.tensors[name][slot].flatten()[start : start + numel]


def toy(dropout=0.0):
    torch.manual_seed(5)
    return ToyCLIP(dropout)


def weights(model) -> Source:
    return Source({name: {"param": p.detach().clone()} for name, p in model.named_parameters()})


def make(layout: str, precision="fp32", optim="sgd", lr=LR, clip: float | None = MAX_NORM, **more):
    config = OptimConfig(name=optim, lr=lr, weight_decay=0.1)
    return engine_at(layout, toy, config, clip=clip, precision=precision, **more)


def steps(engine, first: int, last: int, micro_size: int, kept: int, lr=LR):
    out = []
    for s in range(first, last):
        batch = share(toy_batch(N, seed=s), dist.rank(), dist.world_size())
        out.append(
            train_step(engine, batch, InfoNCE(), micro_size=micro_size, kept_graphs=kept, lr=lr)
        )
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
            whole = out.setdefault(fragment.name, {}).setdefault(
                slot, torch.full((size,), torch.nan)
            )
            whole[fragment.start : fragment.start + len(value)] = value.float()
        count[fragment.start : fragment.start + len(value)] += 1
    assert all((count == 1).all() for count in seen.values())
    return out


def oracle(optim: str, num: int, lr=LR, clip=MAX_NORM):
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


def redone(layout, micro_size, kept):
    """Each step's loss is of no use at first, and the step is made again from where it began."""
    engine, out = make(layout), []
    for s in range(3):
        batch = share(toy_batch(N, seed=s), dist.rank(), dist.world_size())
        result = train_step(
            engine, batch, Underflowing(), micro_size=micro_size, kept_graphs=kept, lr=LR
        )
        out.append((result.loss, result.grad_norm))
    fragments = pieces(engine)
    engine.close()
    return out, fragments


@pytest.mark.parametrize("world_size, micro_size, kept", [(1, 7, 2), (2, 5, 1)])
@pytest.mark.parametrize("layout", ALL)
def test_a_step_whose_loss_was_unsafe_is_made_again(layout, world_size, micro_size, kept):
    reference, expected = oracle("sgd", 3)
    results = run_ranks(redone, world_size, layout, micro_size, kept)
    for told, _ in results:
        assert told == [pytest.approx(each, rel=tolerances.norm(3, "sgd")) for each in expected]
    weights = assemble([fragments for _, fragments in results])
    assert relative_error(weights, reference) < tolerances.UPDATE["sgd"]


def run_case(layout, precision, optim, micro_size, kept, offload="none", lr=LR, **more):
    engine = make(layout, precision, optim, lr, offload=offload, **more)
    told = steps(engine, 0, 4, micro_size, kept, lr)
    out = told, pieces(engine), engine.extra_state()
    engine.close()
    return out


def relative_error(state, reference) -> float:
    ours = torch.cat([state[name]["param"].double() for name in reference])
    theirs = torch.cat([p.detach().flatten() for p in reference.values()])
    start = torch.cat([p.detach().flatten().double() for p in toy().parameters()])
    return (
        (ours - theirs).norm() / (theirs - start).norm()
    ).item()  # of the update, not of the weights


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize(
    "world_size, micro_size, kept, optim", [(1, 7, 2, "sgd"), (2, 5, 1, "sgd"), (2, 4, 3, "adamw")]
)
def test_fp32_equals_plain_torch(layout, world_size, micro_size, kept, optim):
    lr = 1e-2 if optim == "adamw" else LR
    reference, expected = oracle(optim, 4, lr)
    results = run_ranks(run_case, world_size, layout, "fp32", optim, micro_size, kept, "none", lr)
    for told, _, extra in results:
        assert [t[0] for t in told] == pytest.approx(
            [e[0] for e in expected], rel=tolerances.loss(4, optim)
        )
        assert [t[1] for t in told] == pytest.approx(
            [e[1] for e in expected], rel=tolerances.norm(4, optim)
        )
        assert extra["optimizer_steps"] == 4
    assert relative_error(assemble([r[1] for r in results]), reference) < tolerances.UPDATE[optim]


@pytest.mark.parametrize("layout", [*ZERO[1:], *FSDP, *PLAIN])
def test_bf16_is_near_and_keeps_fp32_masters(layout):
    reference, expected = oracle("sgd", 4)
    results = run_ranks(run_case, 2, layout, "bf16", "sgd", 5, 1)
    state = assemble([r[1] for r in results])
    assert [t[0] for t in results[0][0]] == pytest.approx([e[0] for e in expected], rel=2e-2)
    assert relative_error(state, reference) < 5e-2
    master = torch.cat([slots["param"] for slots in state.values()])
    assert not torch.equal(master, master.bfloat16().float())


@pytest.mark.parametrize("layout", ZERO[1:])
def test_fp16_scales_the_loss_and_unscales_the_norm(layout):
    reference, expected = oracle("sgd", 4)
    (told, fragments, extra), *_ = run_ranks(run_case, 1, layout, "fp16", "sgd", 5, 1)
    assert relative_error(assemble([fragments]), reference) < 2e-2
    assert told[0][1] == pytest.approx(expected[0][1], rel=1e-2)
    assert extra["loss_scaler"]["cur_scale"] > 1


def growing_scale_case(layout, base, state=None, extra=None):
    """After three steps, and after six; with `state` from there on."""
    engine = make(layout, "fp16", lr=0.02, clip=None, ds_config=base)
    out = []
    for first in (0, 3):
        if first == 3 and state is not None:
            engine.load_fragments(Source(state), extra)
        told = (
            [] if first == 0 and state is not None else steps(engine, first, first + 3, 5, 1, 0.02)
        )
        out.append((told, pieces(engine), engine.extra_state()))
    engine.close()
    return out


@pytest.mark.parametrize("layout", ZERO[1:])
def test_a_step_at_which_the_loss_scale_grows_is_a_whole_step(layout, tmp_path):
    base = tmp_path / "grows.json"
    base.write_text(json.dumps({"fp16": {"initial_scale_power": 8, "loss_scale_window": 3}}))
    reference, expected = oracle("sgd", 6, 0.02, math.inf)  # a clip would hide what is halved
    ((half, end),) = run_ranks(growing_scale_case, 1, layout, str(base))
    assert [extra["loss_scaler"]["cur_scale"] for *_, extra in (half, end)] == [256.0, 512.0]
    assert [t[1] for t in half[0] + end[0]] == pytest.approx([e[1] for e in expected], rel=1e-2)
    state = assemble([end[1]])
    assert relative_error(state, reference) < 1e-2
    ((_, (told, fragments, extra)),) = run_ranks(
        growing_scale_case, 1, layout, str(base), assemble([half[1]]), half[2]
    )
    assert (told, extra) == (end[0], end[2])
    resumed = assemble([fragments])
    assert all(torch.equal(state[name]["param"], resumed[name]["param"]) for name in state)


@pytest.mark.parametrize("layout", [*ZERO[1:], *FSDP[1:]])
def test_an_offloaded_optimizer_gives_the_same(layout):
    reference, _ = oracle("adamw", 4, 1e-2)
    results = run_ranks(run_case, 2, layout, "fp32", "adamw", 5, 1, "optimizer", 1e-2)
    assert relative_error(assemble([r[1] for r in results]), reference) < tolerances.UPDATE["adamw"]


def save_half(layout, precision):
    engine = make(layout, precision, "adamw", lr=1e-2)
    steps(engine, 0, 2, 5, 1, 1e-2)
    half = pieces(engine), engine.extra_state()
    told = steps(engine, 2, 4, 5, 1, 1e-2)
    out = half, told, pieces(engine)
    engine.close()
    return out


def go_on(layout, precision, state, extra):
    engine = make(layout, precision, "adamw", lr=1e-2)
    engine.load_fragments(Source(state), extra)
    told = steps(engine, 2, 4, 5, 1, 1e-2)
    out = told, pieces(engine)
    engine.close()
    return out


@pytest.mark.parametrize(
    "layout, precision, other",
    [
        ("zero 0", "fp32", "fsdp 3"), ("zero 1", "fp32", "zero 2"), ("zero 2", "fp32", "zero 1"),
        ("zero 3", "fp32", "zero 1"), ("zero 1", "bf16", "zero 2"), ("zero 3", "bf16", "fsdp 2"),
        ("fsdp 0", "fp32", "zero 1"), ("fsdp 2", "fp32", "zero 3"), ("fsdp 3", "bf16", "zero 1"),
    ],
)  # fmt: skip
def test_resume_is_bitwise_on_the_same_layout_close_on_another(layout, precision, other):
    saved = run_ranks(save_half, 2, layout, precision)
    state, extra = assemble([s[0][0] for s in saved]), saved[0][0][1]
    assert set(next(iter(state.values()))) == {"param", "exp_avg", "exp_avg_sq"}
    resumed = run_ranks(go_on, 2, layout, precision, state, extra)
    assert [r[0] for r in resumed] == [s[1] for s in saved]
    final, again = assemble([s[2] for s in saved]), assemble([r[1] for r in resumed])
    assert all(
        torch.equal(final[name][slot], again[name][slot]) for name in final for slot in final[name]
    )
    (told, _), *_ = run_ranks(go_on, 1, other, precision, state, extra)
    assert [t[0] for t in told] == pytest.approx(
        [t[0] for t in saved[0][1]], rel=tolerances.loss(4, "adamw", precision)
    )


def clamp_case(layout, precision):
    engine = make(layout, precision)
    engine.load_fragments(with_value("logit_scale", 4.9), {})
    seen = [engine.forward(toy_batch(4).micro_batches(4)[0])["logit_scale"].item()]
    for s in range(3):
        steps(engine, s, s + 1, 5, 1, lr=1e-4)
        seen.append(engine.forward(toy_batch(4).micro_batches(4)[0])["logit_scale"].item())
    engine.close()
    return seen


@pytest.mark.parametrize(
    "layout, precision",
    [
        ("zero 0", "fp32"), ("zero 1", "fp32"), ("zero 2", "bf16"), ("zero 3", "fp32"), ("zero 3", "bf16"),
        ("fsdp 0", "fp32"), ("fsdp 2", "bf16"), ("fsdp 3", "fp32"),
    ],
)  # fmt: skip
def test_the_clamp_of_logit_scale_survives_the_next_step(layout, precision):
    for before, *after in run_ranks(clamp_case, 2, layout, precision):
        assert before > 120
        assert all(95 < value < 101 for value in after)


def load_case(layout):
    engine = make(layout)
    micro_batch = toy_batch(4).micro_batches(4)[0]
    engine.train(False)
    with torch.no_grad():
        engine.forward(micro_batch)  # as an evaluation before a resume
    engine.load_fragments(with_value("logit_scale", 1.5), {})
    with torch.no_grad():
        scale = engine.forward(micro_batch)["logit_scale"].item()
    engine.close()
    return scale


@pytest.mark.parametrize("layout", ["zero 1", "zero 3", "fsdp 0", "fsdp 2", "fsdp 3"])
def test_a_load_reaches_the_next_forward(layout):
    assert run_ranks(load_case, 2, layout) == pytest.approx([math.exp(1.5)] * 2)


def bias_case(layout):
    tower = {"layers": 1, "width": 16}
    vision = {**tower, "image_size": 16, "head_width": 16, "patch_size": 8}
    text = {**tower, "context_length": 8, "vocab_size": 32, "heads": 2}
    sections = {"embed_dim": 8, "vision_cfg": vision, "text_cfg": text, "init_logit_bias": -10.0}
    architecture = Architecture.model_validate(sections)
    engine = engine_at(layout, lambda: CLIP(architecture), OptimConfig())
    texts = torch.randint(1, 32, (2, 8))
    features = engine.forward(
        MicroBatch(columns_of(torch.zeros(2, 3, 16, 16, dtype=torch.uint8), texts, torch.arange(2)))
    )
    bias = features["logit_bias"].item()
    engine.close()
    return bias


@pytest.mark.parametrize("layout", ALL)
def test_the_bias_of_a_sigmoid_loss_outlives_the_forward(layout):
    assert run_ranks(bias_case, 2, layout) == [-10.0, -10.0]


def with_value(name, value) -> Source:
    """The toy's weights with one of them filled with `value`."""
    filled = {
        n: torch.full_like(p, value) if n == name else p.detach()
        for n, p in toy().named_parameters()
    }
    return Source({n: {"param": p} for n, p in filled.items()})


def inf_case(layout, precision):
    engine = make(layout, precision)
    features = engine.forward(toy_batch(4).to(device()).micro_batches(4)[0])
    one = torch.ones(1, device=device())
    gradients = named_features(
        torch.full_like(features["image"], torch.inf), features["text"].detach(), one
    )
    engine.backward(features, gradients, True)
    report = engine.step(1e-3, engine.reduce()[0].tolist())
    engine.close()
    return report.grad_norm, report.skipped


@pytest.mark.parametrize(
    "layout, precision",
    [
        ("zero 0", "fp32"),
        ("zero 1", "fp32"),
        ("zero 1", "bf16"),
        ("zero 3", "fp32"),
        ("fsdp 2", "bf16"),
    ],
)
def test_a_gradient_that_is_not_finite_is_no_skipped_step(layout, precision):
    ((norm, skipped),) = run_ranks(inf_case, 1, layout, precision)
    assert not skipped and not math.isfinite(norm)


def scale_case(layout):
    engine = make(layout, "bf16")
    engine.load_fragments(with_value("logit_scale", math.log(99)), {})
    scale = engine.forward(toy_batch(4).micro_batches(4)[0])["logit_scale"]
    gradient = (
        torch.autograd.grad(scale.sum(), engine.engine.module.logit_scale)[0].item()
        if layout == "zero 1"
        else 99
    )
    engine.close()
    return scale.item(), gradient


@pytest.mark.parametrize("layout", [*ZERO[1:], *FSDP, *PLAIN])
def test_the_loss_sees_the_fp32_master_of_logit_scale(layout):
    """The bf16 copy of the parameter would give 98.5 or 101.5."""
    for value, gradient in run_ranks(scale_case, 2, layout):
        assert value == pytest.approx(99.0, rel=1e-5)
        assert gradient == pytest.approx(99.0, rel=5e-3)


def varying_case(layout, precision, **more):
    """k and the retained graphs change from step to step."""
    engine = make(layout, precision, **more)
    for s, (micro_size, kept) in enumerate([(12, 1), (5, 1), (3, 4), (2, 2)]):
        steps(engine, s, s + 1, micro_size, kept)
    out = pieces(engine)
    engine.close()
    return out


@pytest.mark.parametrize(
    "world_size, layout, precision, reduce_gradients",
    pairwise(
        (2, 1, 3),
        ("zero 2", "zero 3", "fsdp 2", "fsdp 3"),
        ("fp32", "bf16"),
        ("each_backward", "once"),
    ),
)
def test_k_and_the_reduction_are_invisible(world_size, layout, precision, reduce_gradients):
    reference, _ = oracle("sgd", 4)
    state = assemble(
        run_ranks(
            partial(varying_case, reduce_gradients=reduce_gradients), world_size, layout, precision
        )
    )
    assert relative_error(state, reference) < (
        tolerances.UPDATE["sgd"] if precision == "fp32" else 5e-2
    )


@pytest.mark.parametrize("layout, ranks", [("fsdp 2", 2), ("fsdp 3", 2), ("fsdp 3", 1)])
def test_copies_of_the_model_each_shared_out_among_some_ranks(layout, ranks):
    """The norm and its clip are those of the whole gradient; what the copies save is each element once."""
    reference, expected = oracle("sgd", 4)
    results = run_ranks(partial(run_case, shard_ranks=ranks), 4, layout, "fp32", "sgd", 4, 2)
    for told, _, _ in results:
        assert [t[0] for t in told] == pytest.approx(
            [e[0] for e in expected], rel=tolerances.loss(4, "sgd")
        )
        assert [t[1] for t in told] == pytest.approx(
            [e[1] for e in expected], rel=tolerances.norm(4, "sgd")
        )
    assert relative_error(assemble([r[1] for r in results]), reference) < tolerances.UPDATE["sgd"]


def unreduced_case(layout):
    engine = make(layout)
    for micro_batch in toy_batch(8).micro_batches(4):
        features = engine.forward(micro_batch)
        gradients = named_features(
            torch.ones_like(features["image"]), torch.ones_like(features["text"]), torch.ones(1)
        )
        engine.backward(features, gradients, False)
    try:
        engine.reduce()
    except RuntimeError as e:
        return str(e)
    finally:
        engine.close()


@pytest.mark.parametrize("layout", ["zero 1", "zero 3", "fsdp 0", "fsdp 3"])
def test_a_step_without_a_last_backward_is_refused(layout):
    for message in run_ranks(unreduced_case, 2, layout):
        assert "a gradient was not reduced" in message


class Unusual(ToyCLIP):
    def __init__(self, what: str):
        super().__init__()
        if what == "0-d":
            self.text.gain = torch.nn.Parameter(torch.tensor(1.0))
        else:
            self.text.out.weight = self.visual.out.weight


def unusual_case(kind, what):
    optim = OptimConfig(name="sgd", lr=LR, weight_decay=0.1)
    config = EngineConfig(kind=kind)
    try:
        config.build(lambda: Unusual(what), lambda named: build_optimizer(optim, named), device=CPU)
    except UserError as e:
        return str(e)


@pytest.mark.parametrize(
    "kind, what, remedy",
    [
        ("fsdp", "0-d", "text.gain: it is 0-d; give it shape [1]"),
        ("fsdp", "shared", "text.out.weight; set engine.kind=deepspeed"),
        ("deepspeed", "0-d", "text.gain: it is 0-d or not contiguous; give it shape [1]"),
    ],
)
def test_a_parameter_that_cannot_be_held_is_refused_by_name(kind, what, remedy):
    for message in run_ranks(unusual_case, 2, kind, what):
        assert message is not None and remedy in message


def with_another_optimizer(layout: str, before: str, after: str, saved: dict) -> tuple:
    """Three steps by `after` from weights, and from a checkpoint that `before` wrote."""
    out = []
    for new_optimizer in (True, False):
        engine = make(layout, optim=after, lr=1e-2)
        slots = saved if new_optimizer else {k: {"param": v["param"]} for k, v in saved.items()}
        extra = {"optimizer_steps": 5} if new_optimizer else {}
        engine.load_fragments(Source(slots), extra, new_optimizer=new_optimizer)
        told = steps(engine, 0, 3, 7, 1, lr=1e-2)
        state = engine.extra_state()
        out.append((told, pieces(engine), state["optimizer_steps"], state["updates"]))
        engine.close()
    return tuple(out)


@pytest.mark.parametrize(
    "before, after", [("sgd", "adamw"), ("adamw", "lion_pytorch.Lion"), ("adamw", "sgd")]
)
@pytest.mark.parametrize("layout", ["zero 1", "fsdp 2", "plain 0"])
def test_another_optimizer_starts_its_state_anew(layout, before, after):
    if "." in after:
        pytest.importorskip("lion_pytorch")
    first = run_ranks(run_case, 1, layout, "fp32", before, 7, 1, "none", 1e-2)
    saved = assemble([first[0][1]])
    resumed, fresh = run_ranks(with_another_optimizer, 1, layout, before, after, saved)[0]
    assert resumed[0] == fresh[0]
    left, right = assemble([resumed[1]]), assemble([fresh[1]])
    assert {name: set(slots) for name, slots in left.items()} == {
        name: set(slots) for name, slots in right.items()
    }
    for name, slots in left.items():
        for slot, value in slots.items():
            assert torch.equal(value, right[name][slot]), (name, slot)
    assert (resumed[2], resumed[3]) == (3, 8)
    assert (fresh[2], fresh[3]) == (3, 3)


def frozen_scale() -> ToyCLIP:
    torch.manual_seed(5)
    model = ToyCLIP(logit_scale=4.7215)  # above the ceiling, ln 100
    model.logit_scale.requires_grad_(False)
    return model


def scale_after_a_step(layout: str) -> tuple[float, float]:
    """The factor that the loss sees in the next step, and the parameter in a checkpoint."""
    engine = engine_at(layout, frozen_scale, OptimConfig(name="sgd", lr=LR), clip=None)
    steps(engine, 0, 1, 12, 1)
    batch = share(toy_batch(N), dist.rank(), dist.world_size())
    with torch.no_grad():
        features = engine.forward(batch.micro_batches(N)[0])
    saved = {
        f.name: f.tensors["param"] for f in engine.state_fragments() if f.name == "logit_scale"
    }
    out = features["logit_scale"].item(), saved["logit_scale"].item()
    engine.close()
    return out


@pytest.mark.parametrize("layout", ALL)
def test_a_frozen_scale_is_not_clamped(layout):
    factor, saved = run_ranks(scale_after_a_step, 1, layout)[0]
    assert factor == pytest.approx(math.exp(4.7215), rel=1e-6)
    assert saved == pytest.approx(4.7215, rel=1e-6)
