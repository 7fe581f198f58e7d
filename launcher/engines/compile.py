"""Repeated blocks: the units of FSDP, and what both engines compile."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from clip_train.models.blocks import PatchEmbedding, Transformer
from clip_train.task import Task

# Graphs of one block's code, beyond which dynamo falls back to eager; its own limit is 8. Two
# towers, with a gradient and without, in training and in evaluation, frozen and not: 16. Rates of
# stochastic depth are constants, so each block of such a tower needs graphs of its own.
MOST_GRAPHS = 256


def units(model: nn.Module) -> list[nn.Module]:
    """The blocks whose parameters are gathered together, and which are compiled one by one.

    A block is a child of several layers that repeats: its class does within a list of modules
    (ModuleList, Sequential), its class and the sizes of its parameters within any other module. The
    outermost ones are taken, but a child that consists mostly of blocks itself, such as a stage of
    a hierarchical tower, is not.
    """

    in_list = isinstance(model, nn.ModuleList | nn.Sequential)

    def kind(child: nn.Module) -> tuple[Any, ...]:
        return type(child), *([] if in_list else map(_shape, child.parameters()))

    repeated = Counter(kind(child) for child in model.children() if _num_layers(child) > 1)
    blocks = []
    for child in model.children():
        inner = units(child)
        if repeated[kind(child)] > 1 and 2 * sum(map(num_parameters, inner)) < num_parameters(
            child
        ):
            blocks.append(child)
        else:
            blocks += inner
    return blocks


def towers_without_units(model: nn.Module, task: Task) -> dict[str, int]:
    """Parameters of each of the task's groups that have no parameter in a unit."""
    in_units = {id(p) for unit in units(model) for p in unit.parameters()}
    towers: Counter[str] = Counter()
    found = set()
    for name, p in model.named_parameters():
        tower = task.group(name)
        if tower is not None:
            towers[tower] += math.prod(_shape(p))
            if id(p) in in_units:
                found.add(tower)
    return {tower: count for tower, count in towers.items() if tower not in found}


def num_parameters(module: nn.Module) -> int:
    return sum(math.prod(_shape(p)) for p in module.parameters())


def _shape(p: nn.Parameter) -> torch.Size:
    return getattr(p, "ds_shape", p.shape)  # ZeRO 3 has emptied it


def _num_layers(module: nn.Module) -> int:
    return sum(any(True for _ in m.parameters(recurse=False)) for m in module.modules())


def compile_units(model: nn.Module) -> None:
    """torch.compile each of the model's units and native patch embeddings. The last block of a
    native transformer stays eager if it computes one token only: it would need graphs of its own.

    The method is compiled, not the module, so hooks stay outside and names do not change. The
    graphs take any batch and length. Blocks of the same code and sizes share them: two in training
    (with a gradient or without), and for some blocks one in evaluation. Random numbers are those of
    eager mode, so a replayed forward draws the same ones as the first."""
    torch.fx.experimental._config.use_duck_shape = (
        False  # sizes that happen to be equal need not stay so
    )
    modules = [*model.modules()]
    one_token = {m.resblocks[-1] for m in modules if isinstance(m, Transformer)}
    patches = [m for m in modules if isinstance(m, PatchEmbedding)]
    for unit in (*patches, *(unit for unit in units(model) if unit not in one_token)):
        compiled = torch.compile(  # type: ignore[call-overload]  # its stubs lack the limit
            unit.forward,
            dynamic=True,
            options={"fallback_random": True},
            recompile_limit=MOST_GRAPHS,
        )
        unit.forward = partial(_compiled, unit.forward, compiled)


def _compiled(
    eager: Callable[..., Any],
    compiled: Callable[..., Any],
    x: torch.Tensor,
    *more: Any,
    **named: Any,
) -> Any:
    """A single sample, such as a last micro-batch, and views of other tensors would need graphs of
    their own."""
    if any(isinstance(each, torch.Tensor) and each.shape[:1] == (1,) for each in (x, *more)):
        return eager(x, *more, **named)
    return compiled(
        *map(_owned, (x, *more)), **{name: _owned(value) for name, value in named.items()}
    )


def _owned(value: Any) -> Any:
    """A view that passed through an engine's hooks no longer counts as one, but it starts inside
    its memory."""
    if isinstance(value, torch.Tensor) and (value._is_view() or value.storage_offset()):
        return value.clone()
    return value
