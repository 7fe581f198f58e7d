"""torch.compile, block by block, for both engines."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from clip_train.models.blocks import PatchEmbedding, Transformer


def units(model: nn.Module) -> list[nn.Module]:
    """The parts whose parameters travel together, and which are compiled one by one: what module
    lists hold, such as a tower's transformer blocks."""
    return [part for each in model.modules() if isinstance(each, nn.ModuleList) for part in each]


def compile_units(model: nn.Module) -> None:
    """torch.compile what makes patches of pixels, and each transformer's blocks but a last one that
    reads one token only: its graphs would be others.

    The method, not the module: hooks stay outside, and names as they are. The graphs take any batch
    and length, and are shared by the blocks of a tower: two (with a gradient or without), three
    with dropout (and none in evaluation); the patches have two of their own."""
    torch.fx.experimental._config.use_duck_shape = (
        False  # sizes that happen to be equal need not stay so
    )
    towers = [each for each in model.modules() if isinstance(each, Transformer)]
    lists = [[*each.resblocks][: -1 if each.one_token else None] for each in towers]
    patches = [each for each in model.modules() if isinstance(each, PatchEmbedding)]
    for unit in chain(patches, *lists):
        unit.forward = partial(_compiled, unit.forward, torch.compile(unit.forward, dynamic=True))


def _compiled(eager: Callable[..., Any], compiled: Callable[..., Any], *inputs: Any) -> Any:
    """A single sample, such as a last micro-batch, and views of other tensors would need graphs of
    their own."""
    if len(inputs[0]) == 1:
        return eager(*inputs)
    return compiled(
        *(x.clone() if isinstance(x, torch.Tensor) and x._is_view() else x for x in inputs)
    )
