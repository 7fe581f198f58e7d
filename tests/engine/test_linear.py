"""engine.linear: which products are rounded, and that layouts stay invisible. On a CPU fp8 products are emulated by
torchao; those of int8 are whole numbers on any device but a CPU without VNNI."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clip_train import dist
from clip_train.engines import linear
from clip_train.engines.base import PlainEngine
from clip_train.engines.config import EngineConfig
from clip_train.errors import UserError
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture, ModelConfig, parse_architecture
from clip_train.models.freeze import freeze
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.recipe.recipe import Recipe
from clip_train.step import train_step
from clip_train.task import Batch
from tests.engine.layouts import engine_at
from tests.engine.test_buffers import merged
from tests.models.small import inputs, small_architecture
from tests.ranks import run_ranks
from tests.toy import columns_of, share

installed = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao is missing: pip install 'clip-train[torchao]'"
)
LARGEST = torch.full((32, 32), 127, dtype=torch.int8)
INT8 = pytest.param(
    "int8",
    marks=pytest.mark.skipif(
        bool((torch._int_mm(LARGEST, LARGEST) != 127 * 127 * 32).any()),
        reason="without VNNI, oneDNN's int8 products saturate at 16 bits",
    ),
)
N, LR = 12, 0.5
DRAWS = (4, 5, 6)  # seeds of the weights


# -- what is refused


@pytest.mark.parametrize(
    "kind, keys, said",
    [
        (
            "deepspeed",
            {"linear": "fp8", "precision": "bf16", "zero_stage": 3},
            "use engine.kind=fsdp, engine.linear",
        ),
        ("deepspeed", {"linear": "int8", "precision": "bf16", "zero_stage": 3}, ""),
        ("fsdp", {"linear": "fp8", "precision": "bf16", "zero_stage": 3}, ""),
    ],
)
def test_what_cannot_be_right_is_refused(kind, keys, said):
    config = EngineConfig(kind=kind, **keys)
    told = config.package.mistakes(config, OptimConfig(), world_size=2)
    assert len(told) == bool(said) and all(said in line for line in told)


@pytest.mark.parametrize("keys", [("fp8", "fp32"), ("int8", "fp16")], ids=str)
def test_only_bf16_is_rounded(keys):
    kind, precision = keys
    engine = {"linear": kind, "precision": precision}
    said = rf"engine.linear \({kind}\) rounds bf16 activations \(engine.precision is {precision}\)"
    with pytest.raises(ValueError, match=f"{said}: set engine.precision=bf16"):
        Recipe.model_validate({"run": {"steps": 1}, "data": {"train": "a.tar"}, "engine": engine})


@pytest.mark.parametrize(
    "kind, capability, said",
    [
        (
            "fp8",
            None,
            "needs GPUs of compute capability 9.0 or newer, but no GPU is visible: set engine.linear=null",
        ),
        ("fp8", (8, 0), "but this one has 8.0: set engine.linear=int8, or engine.linear=null"),
        (
            "int8",
            (7, 5),
            "needs GPUs of compute capability 8.0 or newer, but this one has 7.5: set engine.linear=null",
        ),
        ("int8", (8, 0), ""),
        ("fp8", (9, 0), ""),
    ],
)
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
def test_a_machine_that_lacks_something_is_refused(engine, kind, capability, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    told = [*linear.mistakes_here(EngineConfig(kind=engine, linear=kind, precision="bf16"))]
    of_devices = [
        line for line in told if "needs torchao: pip install 'clip-train[torchao]'" not in line
    ]
    assert len(of_devices) == bool(said) and all(said in line for line in of_devices)
    assert len(told) - len(of_devices) == (find_spec("torchao") is None)


# -- which products are rounded


Grid = Callable[[Tensor], Tensor]  # the distance between two neighbors of each element's grid


def int8(x: Tensor) -> Tensor:
    """Each row has 255 whole numbers."""
    return x.abs().amax(1, keepdim=True) / 127


def fp8(x: Tensor, by: Grid = lambda size: size.amax(1, keepdim=True)) -> Tensor:
    """e4m3: 4 significant bits, at most 448, and steps of 2^-9 below 2^-6; `by` a power of two for each row."""
    scale = 2.0 ** torch.floor(torch.log2(448 / by(x.abs())))
    y = x * scale
    return 2.0 ** (torch.floor(torch.log2(y.abs().clamp(min=2.0**-6))) - 3) / scale


def rounded(x: Tensor, grid: Grid) -> Tensor:
    return (x / grid(x)).round() * grid(x)


def off_borders(x: Tensor, *grids: Grid) -> Tensor:
    """`x`, but no element is halfway between two numbers of a grid, where float32 and float64 may round apart."""
    while True:
        halfway = [((x.double() / grid(x.double())) % 1 - 0.5).abs() < 1e-2 for grid in grids]
        near = torch.stack(halfway).any(0)
        if not near.any():
            return x
        x = torch.where(near, 0.96 * x, x)


def int8_columns(x: Tensor) -> Tensor:
    return int8(x.T).T


def rounded_products(
    kind: str, x: Tensor, weight: Tensor, bias: Tensor, cotangent: Tensor
) -> tuple[Tensor, ...]:
    """Output, and the gradients of x, weight and bias."""
    grid = {"int8": int8, "fp8": fp8}[kind]
    weight_grid = int8_columns if kind == "int8" else partial(fp8, by=torch.max)
    out = rounded(x, grid) @ rounded(weight, grid).T
    d_x = rounded(cotangent, grid) @ rounded(weight, weight_grid)
    return out + bias, d_x, cotangent.T @ x, cotangent.sum(0)


@installed
@pytest.mark.parametrize("kind", [INT8, "fp8"])
def test_output_and_input_gradient_are_rounded_by_rows(kind):
    torch.manual_seed(0)
    x, cotangent = (
        off_borders(torch.randn(21, side) * torch.rand(21, 1), int8, fp8).view(7, 3, side)
        for side in (32, 48)
    )
    module = nn.Sequential(nn.Linear(32, 48))
    with torch.no_grad():
        module[0].weight.copy_(off_borders(module[0].weight, int8, int8_columns, fp8))
    weight, bias = (p.detach().clone().double() for p in module.parameters())
    linear.convert(module, kind, emulate=True)
    (out := module(x.requires_grad_())).backward(cotangent)
    ours = [each.flatten(0, -2) for each in (out.detach(), x.grad)] + [
        p.grad for p in module.parameters()
    ]
    flat = (each.detach().double().flatten(0, 1) for each in (x, cotangent))
    rows, cotangents = flat
    expected = rounded_products(kind, rows, weight, bias, cotangents)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    exact = rows @ weight.T + bias
    assert 3e-3 < (expected[0] - exact).norm() / exact.norm() < 5e-2  # there is something to see


# -- in a model, under the two passes


def architecture() -> Architecture:
    text = {"context_length": 8, "vocab_size": 100, "width": 32, "heads": 2, "layers": 2}
    return parse_architecture(small_architecture(text_cfg=text).model_cfg(), "test")


def make_model(seed: int = 4) -> CLIP:
    torch.manual_seed(seed)
    return CLIP(architecture())


@installed
def test_the_blocks_linears_are_taken_but_frozen_ones():
    model = make_model()
    freeze(model, ModelConfig(lock_image=True, lock_image_unlocked_groups=2))
    names = [name for name, _ in model.named_parameters()]
    linear.convert(model, "fp8", emulate=True)
    taken = {name.partition("resblocks.")[2] for name, each in model.named_modules() if type(each) is not nn.Linear
             and isinstance(each, nn.Linear) and not type(each).__module__.startswith("clip_train.")}  # fmt: skip
    assert taken == {
        f"{i}.{name}" for i in (0, 1) for name in ("attn.out_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert [name for name, _ in model.named_parameters()] == names
    frozen = model.visual.transformer.resblocks[0].mlp.c_fc
    assert type(frozen).__module__.startswith("clip_train.")
    with pytest.raises(
        UserError, match=r"engine.linear \(int8\): the model has no trained linear whose sides"
    ):
        linear.convert(nn.Linear(20, 32), "int8", emulate=True)


def step(layout: str, kind: str | None, micro_size: int, kept: int, seed: int) -> Any:
    """A step of SGD on this rank: all that it saves."""
    optim = OptimConfig(name="sgd", lr=LR, weight_decay=0.0)
    if layout == "plain":
        model = make_model(seed)
        if kind is not None:
            linear.convert(model, kind, emulate=True)
        engine: Any = PlainEngine(model, build_optimizer(optim, model.named_parameters()))
    else:
        engine = engine_at(layout, partial(make_model, seed), optim, linear=kind)
    own = share(
        Batch(columns_of(*inputs(N), [str(i) for i in range(N)])), dist.rank(), dist.world_size()
    )
    loss = train_step(engine, own, InfoNCE(), micro_size=micro_size, kept_graphs=kept, lr=LR).loss
    saved = {(f.name, f.start): f.tensors["param"].clone() for f in engine.state_fragments()}
    engine.close()
    return loss, saved


def steps(layouts: list[str], kind: str) -> list[Any]:
    """One after another in this process: importing torchao takes seconds."""
    return [
        step(layout, kind, 2, 1 + i % 2 * 2, seed)
        for seed in DRAWS
        for i, layout in enumerate(layouts)
    ]


def update(parts: list[Any], seed: int) -> Tensor:
    after = merged(parts)
    start = make_model(seed)
    return torch.cat([after[name] - p.detach().flatten() for name, p in start.named_parameters()])


@installed
@pytest.mark.engine
@pytest.mark.parametrize("kind", [INT8, "fp8"])
def test_no_layout_shows(kind):
    """What is rounded does not depend on a sample's neighbors.

    A value that float32 puts halfway between two steps may fall to either, and all later layers see the difference:
    0.02 to 0.12 of `far`, in a third of the draws. Scales that depend on the layout cost 0.5 of `far` in every draw.
    """
    layouts = ["plain", "zero 0", "zero 1", "zero 2", "fsdp 0", "fsdp 2", "fsdp 3"]
    layouts += ["zero 3"] if kind == "int8" else []
    per_case = iter(zip(*run_ranks(steps, 2, layouts, kind), strict=True))
    errors: dict[str, list[float]] = {layout: [] for layout in layouts}
    for seed in DRAWS:
        whole = update([step("plain", kind, N, 1, seed)], seed)
        exact = update([step("plain", None, N, 1, seed)], seed)
        far = (exact - whole).norm()
        assert 3e-3 < far / whole.norm() < 0.4
        for layout in layouts:
            error = (update([*next(per_case)], seed) - whole).norm() / far
            errors[layout].append(error.item())
    for layout, of_draws in errors.items():
        assert min(of_draws) < 0.1, (layout, of_draws)
