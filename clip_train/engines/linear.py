"""int8 and fp8 products in a model's linear layers, by torchao, which is imported on demand.

The output and the gradient of the input are products of rounded matrices; the weight's gradient is
exact (SwitchBack, arXiv 2304.13013). Each row (a token) of activations, of their gradients, and of
a weight has its own scale. So a sample's features and its part of a gradient do not depend on the
other samples of a micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from clip_train.errors import UserError
from clip_train.settings import broken, is_installed

if TYPE_CHECKING:
    from clip_train.engines.config import EngineConfig

MULTIPLE = 16  # of both sides of a weight: the tensor cores' tiles
CAPABILITY = {
    "int8": (8, 0),
    "fp8": (9, 0),
}  # of the GPUs whose tensor cores take them; scaled by rows


def mistakes_here(config: EngineConfig) -> list[str]:
    """Requirements of `config.linear` that this machine lacks."""
    if config.linear is None:
        return []
    least = CAPABILITY[config.linear]
    seen, other, found = "no GPU is visible", "", (0, 0)
    if torch.cuda.is_available():
        found = torch.cuda.get_device_capability()
        seen = f"this one has {found[0]}.{found[1]}"
        other = "engine.linear=int8, or " if found >= CAPABILITY["int8"] else ""
    return broken(
        [
            (
                not is_installed("torchao"),
                f"engine.linear ({config.linear}) needs torchao: pip install "
                "'clip-train[torchao]', or set engine.linear=null",
            ),
            (
                found < least,
                f"engine.linear ({config.linear}) needs GPUs of compute capability "
                f"{least[0]}.{least[1]} or newer, but {seen}: set {other}engine.linear=null",
            ),
        ]
    )


def convert(model: nn.Module, kind: str, emulate: bool) -> None:
    """In place: every trained `nn.Linear` whose sides are multiples of 16; parameters stay, under
    their names.

    emulate: round as fp8 does, and multiply in fp32. UserError where nothing can be converted."""

    def fits(module: nn.Module, name: str = "") -> bool:
        if not isinstance(module, nn.Linear) or not module.weight.requires_grad:
            return False
        return module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0

    if not any(map(fits, model.modules())):
        raise UserError(
            f"engine.linear ({kind}): the model has no trained linear whose sides are multiples of "
            f"{MULTIPLE}; set engine.linear=null"
        )
    if kind == "fp8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        by_rows = replace(
            Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=emulate
        )
        convert_to_float8_training(model, module_filter_fn=fits, config=by_rows)
    else:
        from torchao.prototype.quantized_training import int8_mixed_precision_training
        from torchao.quantization import quantize_

        quantize_(model, int8_mixed_precision_training(grad_weight=False, module_swap=True), fits)
