"""What `engine.linear` does to a step's gradient: errors against the same model in float64, simulated on a CPU.

A small CLIP as it is drawn, 64 samples, InfoNCE at CLIP's first scale, in one micro-batch and in eight (`k`). int8
products are whole numbers and exact anywhere; fp8's factors are rounded as a GPU rounds them and multiplied in fp32, so
this is a simulation of the GPU's numbers and not of its speed. `unlike` compares a gradient in eight micro-batches with
that in one: what is added to precision's own where scales depend on what shares a micro-batch.

The last three are torchao's other ways, which are no choice here. Needs torchao.

Targets: in fp32 eight micro-batches give the gradient of one within a hundredth of its rounding; in bf16 the linears'
error is at most ten times that of bf16 itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from common import finish, parser
from torch import nn

from clip_train.engines import linear
from clip_train.engines.base import PlainEngine
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.models.config import parse_architecture
from clip_train.step import two_pass
from clip_train.task import IMAGE_TEXT, Context, MicroBatch
from tests.toy import columns_of

N, CUT = 64, 8
MODEL: dict[str, Any] = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 32, "layers": 4, "width": 128, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 1000, "width": 128, "heads": 4, "layers": 4},
}
TARGETS = {
    "unlike": "fp32: at most 0.01 of the error",
    "error": "bf16: at most 10 times bf16's own",
}
Convert = Callable[[nn.Module], None]


def blocks_only(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear)


def tensorwise(model: nn.Module) -> None:
    """fp8, a scale for each matrix."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model, module_filter_fn=blocks_only, config=Float8LinearConfig(emulate=True)
    )


def rounded_everywhere(model: nn.Module) -> None:
    """fp8 by rows, the weights' gradients too."""
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    by_rows = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, module_filter_fn=blocks_only, config=by_rows)


def int8_everywhere(model: nn.Module) -> None:
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    quantize_(model, int8_mixed_precision_training(module_swap=True), blocks_only)


WAYS: dict[str, Convert] = {
    "null": lambda model: None,
    "int8": lambda model: linear.convert(model, "int8", emulate=True),
    "fp8": lambda model: linear.convert(model, "fp8", emulate=True),
    "int8, weights' gradients too": int8_everywhere,
    "fp8 by rows, weights' gradients too": rounded_everywhere,
    "fp8, one scale a matrix": tensorwise,
}


def gradients(dtype: torch.dtype, convert: Convert, k: int) -> dict[str, torch.Tensor]:
    """Of each tower, in float64."""
    torch.manual_seed(0)
    model = CLIP(parse_architecture(MODEL, "linear")).to(dtype)
    convert(model)
    g = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (N, 3, 32, 32), dtype=torch.uint8, generator=g)
    texts = torch.randint(1, 999, (N, 16), generator=g)
    texts[:, -1] = 999
    parts = zip(
        images.split(N // k), texts.split(N // k), torch.arange(N).split(N // k), strict=True
    )
    # in bf16 each micro-batch's gradient is added up in fp32, as the engines do
    wide = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():

        def add(grown: torch.Tensor, name: str = name) -> None:
            assert grown.grad is not None
            wide[name] += grown.grad.double()
            grown.grad = None

        p.register_post_accumulate_grad_hook(add)
    two_pass(
        PlainEngine(model), [MicroBatch(columns_of(*part)) for part in parts], InfoNCE(), Context(N)
    )
    towers = ("image", "text")
    return {
        t: torch.cat([grad.flatten() for name, grad in wide.items() if IMAGE_TEXT.group(name) == t])
        for t in towers
    }


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    truth = gradients(torch.float64, WAYS["null"], 1)
    rows, missed = [], []
    own: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for way, convert in WAYS.items():
            once, cut = (gradients(dtype, convert, k) for k in (1, CUT))
            precision = "fp32" if dtype == torch.float32 else "bf16"
            row: dict[str, Any] = {"precision": precision, "engine.linear": way}
            for tower, exact in truth.items():
                row[f"error, {tower}"] = ((once[tower] - exact).norm() / exact.norm()).item()
            for tower, exact in truth.items():
                row[f"unlike, {tower}"] = ((cut[tower] - once[tower]).norm() / exact.norm()).item()
            rows.append(row)
            offered = way in ("int8", "fp8")
            for tower in truth:
                error, unlike = row[f"error, {tower}"], row[f"unlike, {tower}"]
                if offered and precision == "fp32" and unlike > 0.01 * error:
                    missed.append(
                        f"unlike: {precision}, {way}, {tower}: {unlike:.1e} of {error:.1e}"
                    )
                if offered and precision == "bf16" and error > 10 * own[tower]:
                    missed.append(
                        f"error: {way}, {tower}: {error:.1e}, bf16 alone {own[tower]:.1e}"
                    )
                if way == "null":
                    own[tower] = error
    return finish("linear", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
