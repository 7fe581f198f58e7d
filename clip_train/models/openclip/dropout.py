"""The dropouts of OpenCLIP's models, drawn by the sample's seed.

Modules of known classes get another forward. Modules that draw by functions, such as a layer of a
Hugging Face tower, are found by one forward on the meta device, and their `F.dropout` is
intercepted. A model that draws in another way is not trained. `b` samples in a micro-batch; the
rows of a tensor, [b m, ...], belong to samples in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from open_clip.transformer import PatchDropout as OpenCLIPPatchDropout
from timm.layers import DropPath, PatchDropout, PatchDropoutWithIndices
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.module_tracker import ModuleTracker

from clip_train.models.dropout import MODULE_ID, current_seeds, drop_elements, keep_patches
from clip_train.torch_internals import READ_SCALAR, DispatchMode, argument_names, assume_all_nonzero


def dropped(x: Tensor, p: float, layer_id: int | Tensor) -> Tensor:
    """[b m, ...] -> the same, as `F.dropout` in training."""
    seeds = current_seeds()
    rows = x.reshape(len(seeds), -1)
    return drop_elements(rows, min(round(p * 65536), 65535), layer_id, seeds).view(x.shape)


class Seeded:
    layer_id: Tensor


class SeededDropout(nn.Dropout, Seeded):
    def forward(self, x: Tensor) -> Tensor:
        return dropped(x, self.p, self.layer_id) if self.training and self.p else x


class SeededDropPath(DropPath, Seeded):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop_prob:
            return x
        kept = dropped(x.new_ones(len(x)), self.drop_prob, self.layer_id)
        kept = kept if self.scale_by_keep else kept.sign()
        return x * kept.view(-1, *[1] * (x.ndim - 1))


class SeededPatches(PatchDropoutWithIndices, Seeded):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.training or not self.prob:
            return x, None
        return keep_patches(x, self.prob, self.layer_id, current_seeds(), self.num_prefix_tokens)


class SeededPatchDropout(PatchDropout, Seeded):
    def forward(self, x: Tensor) -> Tensor:
        return SeededPatches.forward(self, x)[0]


class SeededOpenCLIPPatchDropout(OpenCLIPPatchDropout, Seeded):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.prob:
            return x
        first = int(self.exclude_first_token)
        return keep_patches(x, self.prob, self.layer_id, current_seeds(), first)[0]


SEEDED = {
    nn.Dropout: SeededDropout,
    DropPath: SeededDropPath,
    PatchDropout: SeededPatchDropout,
    PatchDropoutWithIndices: SeededPatches,
    OpenCLIPPatchDropout: SeededOpenCLIPPatchDropout,
}


def seed_modules(model: nn.Module) -> None:
    """Those of known classes, and again those that it has seeded."""
    for number, module in enumerate(model.modules()):
        if type(module) in SEEDED:
            module.__class__ = SEEDED[type(module)]
        if isinstance(module, Seeded):
            # a tensor: torch.compile would make a graph for each int
            module.layer_id = torch.tensor(MODULE_ID + number, device="cpu")


class SeededFunctions(TorchFunctionMode):
    """Dropout by a function, in one call of a module."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is F.dropout:
            return self.dropout(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def dropout(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        self.layer_id += 1 << 32  # of the module's next draw
        return dropped(x, p, self.layer_id) if training and p else x


def intercept(module: nn.Module, number: int) -> None:
    """Let `SeededFunctions` answer the module's own calls, also those in a recomputation."""

    def seeded(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with SeededFunctions(MODULE_ID + number):
            return forward(*args, **kwargs)

    checkpoint: Any = getattr(module, "_gradient_checkpointing_func", None)
    if checkpoint is not None:  # of Hugging Face's layers, which call it in their forward

        def seeded_checkpoint(forward: Callable[..., Any], *args: Any) -> Any:
            return checkpoint(partial(seeded, forward), *args)

        module._gradient_checkpointing_func = cast(Any, seeded_checkpoint)
    module.forward = partial(seeded, module.forward)


class Draws(DispatchMode):
    """Which modules draw random numbers, by name, and by which operator."""

    def __init__(self) -> None:
        super().__init__()
        self.modules = ModuleTracker()
        self.found: dict[str, str] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is READ_SCALAR:
            # a meta tensor has no values: no layer is dropped, and no mask is left out
            return False
        arguments = dict(zip(argument_names(function), args, strict=False)) | (kwargs or {})
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        if is_random and arguments.get("dropout_p", arguments.get("p", 1)) != 0:
            innermost = max(self.modules.parents, key=len)
            self.found[innermost.partition(".")[2]] = function.name()
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def find_draws(model: nn.Module, *inputs: Tensor) -> dict[str, str]:
    """Names of the modules that draw in a forward in training, with the operator's name."""
    draws = Draws()
    # a meta tensor has no zeros either
    with assume_all_nonzero(), draws.modules, draws:
        model.train().requires_grad_(False)(*inputs)  # the tracker looks for graphs
    return draws.found
