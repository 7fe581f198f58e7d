"""Blocks that repeat, as timm, Hugging Face and hierarchical towers hold them: found, sharded, compiled, and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule

from clip_train import dist
from clip_train.engines.compile import compile_units, units
from clip_train.engines.config import EngineConfig
from clip_train.errors import UserError
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step
from clip_train.task import Batch
from tests import tolerances
from tests.engine.layouts import engine_at
from tests.models.small import inputs, small_architecture
from tests.ranks import run_ranks
from tests.toy import columns_of, oracle_loss, share

pytestmark = pytest.mark.engine
N, LR, STEPS = 10, 0.1, 2


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.drop(F.gelu(self.fc1(self.norm(x))))
        y = y if mask is None else y * mask
        return x + self.fc2(y + y.mean(1, keepdim=True))


class Encoder(nn.Module):
    """Hugging Face's: encoder.layer, called with a mask by name."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(100, width)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(Block(width, 2 * width) for _ in range(depth))

    def forward(self, texts: Tensor) -> Tensor:
        x, mask = self.embeddings(texts), (texts != 0)[:, :, None].to(self.embeddings.weight.dtype)
        for layer in self.encoder.layer:
            x = layer(x, mask=mask)
        return x


class Trunk(nn.Module):
    """timm's: a Sequential of blocks; `stages`: one of stages, each with blocks and a layer between."""

    def __init__(self, width: int, depth: int, stages: int) -> None:
        super().__init__()
        self.patches = nn.Linear(48, width)
        self.norm_pre, self.norm = (
            nn.LayerNorm(width),
            nn.LayerNorm(width),
        )  # of a size, and no blocks
        if stages:
            self.blocks = nn.Sequential(*(Stage(width, depth) for _ in range(stages)))
        else:
            self.blocks = nn.Sequential(*(Block(width, 3 * width) for _ in range(depth)))

    def forward(self, images: Tensor) -> Tensor:
        x = images.unflatten(3, (4, 4)).unflatten(2, (4, 4)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        x = x.flatten(1, 2).to(self.patches.weight.dtype) / 128 - 1  # [b, 16, 48]
        return self.norm(self.blocks(self.norm_pre(self.patches(x))))


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.between = nn.Linear(width, width)
        self.blocks = nn.Sequential(*(Block(width, 3 * width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.between(x))


class TwoTowers(nn.Module):
    def __init__(self, stages: int = 0) -> None:
        super().__init__()
        self.visual, self.text = Trunk(24, 3, stages), Encoder(16, 2)
        self.image_proj, self.text_proj = nn.Linear(24, 12), nn.Linear(16, 12)
        self.logit_scale = nn.Parameter(torch.tensor([2.0]))
        self.logit_bias = None

    def forward(self, images: Any = None, texts: Any = None, sample_seeds: Any = None) -> Any:
        wide = torch.promote_types(self.logit_scale.dtype, torch.float32)
        image = None if images is None else self.image_proj(self.visual(images).mean(1)).to(wide)
        text = None if texts is None else self.text_proj(self.text(texts).mean(1)).to(wide)
        image, text = (x if x is None else F.normalize(x, dim=-1) for x in (image, text))
        return image, text, self.logit_scale.to(wide).exp(), None


def towers(stages: int = 0) -> TwoTowers:
    torch.manual_seed(4)
    return TwoTowers(stages)


def batch(seed: int) -> Batch:
    images, texts, seeds = inputs(N, seed=seed)
    return Batch(columns_of(images, texts, seeds, [str(i) for i in range(N)]))


def names(model: nn.Module) -> list[str]:
    named = {id(module): name for name, module in model.named_modules()}
    return [named[id(unit)] for unit in units(model)]


def test_blocks_are_found_wherever_they_repeat():
    image = [f"visual.blocks.{i}" for i in range(3)]
    text = [f"text.encoder.layer.{i}" for i in range(2)]
    assert names(towers()) == image + text
    staged = [f"visual.blocks.{s}.blocks.{i}" for s in range(2) for i in range(3)]
    assert names(towers(stages=2)) == staged + text
    by_hand = nn.Module()  # attributes instead of a list: alike to the sizes
    by_hand.first, by_hand.other, by_hand.second = Block(8, 8), Block(8, 9), Block(8, 8)
    assert names(by_hand) == ["first", "second"]
    uneven = nn.Sequential(Block(8, 9), nn.Linear(8, 8), nn.Linear(8, 8), Block(8, 8))
    assert names(uneven) == ["0", "3"]  # in a list the class is enough; single layers are none
    assert names(nn.ModuleList([towers(), towers()])) == [
        f"{i}.{name}" for i in range(2) for name in image + text
    ]
    native = CLIP(small_architecture())
    assert names(native) == [
        f"{tower}transformer.resblocks.{i}" for tower in ("", "visual.") for i in range(2)
    ]


def train(layout: str, compiled: bool) -> tuple[list[Any], list[Any], int, dict[str, int]]:
    torch.compiler.set_default_backend("eager")
    optim = OptimConfig(name="sgd", lr=LR, weight_decay=0.0)
    engine = engine_at(layout, towers, optim, compile=compiled)
    told = []
    for step in range(STEPS):
        own = share(batch(step), dist.rank(), dist.world_size())
        result = train_step(engine, own, InfoNCE(), micro_size=2, kept_graphs=1, lr=LR)
        told += [result.loss, result.grad_norm]
    fragments = [(f.name, f.start, f.tensors["param"].clone()) for f in engine.state_fragments()]
    sharded = sum(isinstance(module, FSDPModule) for module in engine.module.modules())
    engine.close()
    frames = counters["frames"]
    counted = {
        "frames": frames["total"],
        "given up": frames["total"] - frames["ok"],
        "breaks": sum(counters["graph_break"].values()),
    }
    return told, fragments, sharded, counted


@pytest.mark.parametrize(
    "layout, compiled",
    [
        ("fsdp 1", False),
        ("fsdp 2", True),
        ("fsdp 3", True),
        ("zero 1", False),
        ("zero 2", False),
        ("zero 3", True),
    ],
)
def test_towers_in_units_take_the_steps_of_one_float64_model(layout, compiled):
    model, expected = towers().double(), []
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for step in range(STEPS):
        whole = batch(step)
        loss = oracle_loss(*model(whole.images, whole.texts)[:3])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        expected += [loss.item(), norm.item()]
        optimizer.step()
    weights = {name: p.detach().flatten() for name, p in model.named_parameters()}
    for told, fragments, sharded, counted in run_ranks(train, 2, layout, compiled):
        assert told == pytest.approx(expected, rel=tolerances.norm(STEPS, "sgd"))
        for name, start, value in fragments:
            of = weights[name][start : start + len(value)]
            assert (value - of).norm() <= 2e-6 * of.norm() + 1e-7, name
        assert sharded == (5 + 1 if "fsdp" in layout else 0)  # blocks, and the rest
        # two classes of blocks, by their sizes; with a gradient and without
        assert counted == {"frames": 4 if compiled else 0, "given up": 0, "breaks": 0}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads those of inputs
def test_no_variation_of_a_run_gives_a_graph_up():
    """Lengths, batches, gradients, evaluation and frozen blocks of either width: more graphs than the 8 after which
    dynamo gives up by default."""
    torch.compiler.reset()
    counters.clear()
    default = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("eager")
    model = towers()
    model.text = Trunk(16, 2, 0)  # the same code at another width
    compile_units(model)
    images = batch(0).images

    def forward(size: int, grad: bool = True) -> None:
        with torch.set_grad_enabled(grad):
            model.visual(images[:size])
            model.text(images[:size])

    try:
        for training in (True, False):
            model.train(training)
            for grad in (True, False):
                for size in (N, 3, 1, 2):
                    forward(size, grad)
        for tower in (model.visual, model.text):
            tower.requires_grad_(False)
            forward(N)
            tower.requires_grad_(True)
        model.visual.blocks[0].requires_grad_(False)
        forward(N)
        frames = counters["frames"]
        assert frames["total"] == frames["ok"] > 8 and not counters["graph_break"]
    finally:
        torch.compiler.set_default_backend(default)
        torch.compiler.reset()


class Layers(nn.Module):
    """A tower in which nothing repeats."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.Linear(width, width))
        self.blocks = nn.Sequential(Block(8, 8), Block(8, 8))


def build(width: int, **section: Any) -> Any:
    config = EngineConfig(**section)
    return config.build(
        lambda: Layers(width),
        lambda named: torch.optim.SGD([p for _, p in named]),
        device=torch.device("cpu"),
    )


def noted() -> list[list[str]]:
    sections = [
        {"kind": "fsdp", "zero_stage": 3, "compile": True},
        {"kind": "fsdp", "zero_stage": 2},
        {"kind": "fsdp", "zero_stage": 0},
    ]
    return [list(build(16, **section).notes) for section in sections]


def test_a_tower_without_blocks_is_named_or_refused_at_stage_3():
    said = "no blocks repeat in the image tower (480 parameters): it is one unit of FSDP's"
    assert run_ranks(noted, 1) == [[[f"{said} and not compiled"], [said], []]]
    with pytest.raises(UserError, match=r"engine.zero_stage \(3\).*image tower.*zero_stage=2, or"):
        build(5000, kind="fsdp", zero_stage=3)
