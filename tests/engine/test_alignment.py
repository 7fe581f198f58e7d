"""Every tensor that a kernel takes starts at a multiple of 16 bytes: parameters, gradients, masters.

cuBLASLt takes the alignment of a bias for that of the result, and excludes its fast kernels.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from clip_train import dist
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.models.clip import build_model
from clip_train.models.config import Architecture, ModelConfig, load_architecture
from clip_train.models.freeze import freeze
from clip_train.models.lora import Lora
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step
from clip_train.task import Batch
from tests.covering import pairwise
from tests.engine.layouts import FSDP, PLAIN, ZERO, engine_at
from tests.ranks import run_ranks
from tests.toy import columns_of, share

pytestmark = pytest.mark.engine


LORA = Lora(rank=4, alpha=8.0)


def vit_b32() -> Architecture:
    """Its sizes, with one block in each tower and fewer tokens and words."""
    architecture = load_architecture("ViT-B-32")
    vision = architecture.vision_cfg.model_copy(update={"layers": 1, "image_size": 64})
    text = architecture.text_cfg.model_copy(
        update={"layers": 1, "vocab_size": 64, "context_length": 8}
    )
    return architecture.model_copy(update={"vision_cfg": vision, "text_cfg": text})


def odd() -> Architecture:
    """No size is a multiple of 8, and there are two scalars."""
    return Architecture.model_validate(
        {
            "embed_dim": 7,
            "init_logit_bias": -10.0,
            "vision_cfg": {
                "image_size": 9, "layers": 2, "width": 15, "head_width": 5, "patch_size": 3,
            },
            "text_cfg": {"context_length": 5, "vocab_size": 33, "width": 9, "heads": 3, "layers": 2},
        }
    )  # fmt: skip


def with_lora() -> Architecture:
    return vit_b32().model_copy(update={"lora": LORA})


MODELS = {"ViT-B/32": vit_b32, "odd sizes": odd, "LoRA": with_lora, "frozen tower": vit_b32}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(MODELS[name]())
    if name == "LoRA":
        freeze(model, ModelConfig(lora=LORA))
    if name == "frozen tower":
        model.get_submodule("visual").requires_grad_(False)
    return model


def misaligned(layout: str, precision: str, name: str) -> list[str]:
    """What does not start at a multiple of 16 bytes, in a step of two micro-batches."""
    optim = OptimConfig(name="adamw", lr=1e-3)
    engine = engine_at(layout, partial(make, name), optim, precision=precision, clip=1.0)
    found: list[str] = []

    def look(kind: str, what: str, x: torch.Tensor | None) -> None:
        if x is not None and x.numel() and x.data_ptr() % 16:
            found.append(f"{kind} {what}: {x.data_ptr() % 16}")

    def before_forward(module: nn.Module, inputs: Any, where: str) -> None:
        for own, p in module.named_parameters(recurse=False):
            # ZeRO 3 puts all parameters into one buffer: the odd ones, such as scalars, come last
            if layout != "zero 3" or p.numel() % 8 == 0:
                look("parameter", f"{where}.{own}", p)

    for where, module in engine.module.named_modules():
        module.register_forward_pre_hook(partial(before_forward, where=where))

    def before_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                look("master", f"{g}.{i}", p)
                look("gradient", f"{g}.{i}", p.grad)
        for piece in engine.pieces:
            # a rank's part may begin anywhere in a parameter that is cut, and ZeRO 3 cuts all
            if piece.start == 0 and layout != "zero 3":
                look("master of", piece.name, piece.view(piece.held))

    engine.optimizer.register_step_pre_hook(before_update)
    architecture = MODELS[name]()
    size, text = architecture.vision_cfg.image_size, architecture.text_cfg
    n = 4 * dist.world_size()
    images = torch.zeros(n, 3, size, size, dtype=torch.uint8)
    texts = torch.full((n, text.context_length), text.vocab_size - 1)
    batch = Batch(columns_of(images, texts, torch.arange(n), [str(i) for i in range(n)]))
    own = share(batch, dist.rank(), dist.world_size())
    objective = InfoNCE() if architecture.init_logit_bias is None else SigmoidLoss()
    train_step(engine, own, objective, micro_size=2, kept_graphs=1, lr=1e-3)
    engine.close()
    return found


LAYOUTS = [*ZERO, "fsdp 1", *FSDP, *PLAIN]
# ZeRO 3 cuts every parameter: where sizes do not divide, its gradients begin anywhere
ALL_CASES = [
    case
    for case in product(LAYOUTS, (1, 2, 3), MODELS)
    if case[0] != "zero 3" or (case[1] < 3 and case[2] != "odd sizes")
]
PAIRS = [case for case in pairwise(LAYOUTS, (1, 2, 3), [*MODELS]) if case in ALL_CASES]


@pytest.mark.parametrize(
    ("layout", "world_size", "name"),
    [case if case in PAIRS else pytest.param(*case, marks=pytest.mark.full) for case in ALL_CASES],
)
def test_every_tensor_is_aligned(layout: str, world_size: int, name: str) -> None:
    precision = "fp32" if layout == "zero 0" else "bf16"
    assert run_ranks(misaligned, world_size, layout, precision, name) == [[]] * world_size
