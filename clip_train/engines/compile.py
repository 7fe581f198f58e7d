"""Repeated blocks: the units of FSDP, and what all engines compile."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from clip_train.models.blocks import Block, PatchEmbedding, Transformer, VisionTower
from clip_train.task import Task
from clip_train.torch_internals import (
    is_view,
    mark_first_size_dynamic,
    treat_sizes_as_independent,
    tree_leaves,
    tree_map,
)

# Graphs of one block's code, beyond which dynamo falls back to eager; its own limit is 8. With a
# gradient and without, in training and in evaluation, frozen and not: 8. Rates of stochastic depth
# are constants, so each block of such a tower needs graphs of its own.
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
        if in_list:
            return (type(child),)
        return type(child), *map(_shape, child.parameters())

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


def compile_units(model: nn.Module, own_kernels: bool = False) -> None:
    """torch.compile each of the model's units and native patch embeddings.

    The method is compiled, not the module, so hooks stay outside and names do not change. Random
    numbers are those of eager mode, so a replayed forward draws the same ones as the first.

    Blocks of the same code and sizes share their graphs: two in training (with a gradient or
    without), and for some blocks one in evaluation. The first dimension of every input, which is
    the number of samples or of packed tokens, may have any size. All other sizes are constants:
    with widths and heads as variables, a kernel divides integers for each element (89 instructions
    for a pixel, rather than 25). So towers must not share graphs: their sizes differ. A size
    that changes after all, such as the length of padded texts, becomes a variable of its graph.

    own_kernels: `engine.own_kernels`.
    """
    for module in model.modules():
        if isinstance(module, VisionTower):
            module.loops = False
        if isinstance(module, Block):
            module.own_kernels = module.attn.own_kernels = own_kernels and not module.recomputes
    treat_sizes_as_independent()
    limits: Any = torch.compiler.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_GRAPHS)
    modules = [*model.modules()]
    one_token = {m.resblocks[-1] for m in modules if isinstance(m, Transformer)}
    patches = [m for m in modules if isinstance(m, PatchEmbedding)]
    functions: dict[Any, FunctionType] = {}
    for unit in (*patches, *units(model)):
        method = unit.forward
        function = getattr(method, "__func__", None)
        if isinstance(function, FunctionType):  # not wrapped by somebody
            sizes = tuple(_shape(p) for p in unit.parameters())
            # the last block of a native transformer computes one token only
            variant = (function, sizes, unit in one_token)
            if variant not in functions:
                functions[variant] = _with_own_code(function, len(functions))
            method = MethodType(functions[variant], unit)
        compiled = torch.compile(method, options={"fallback_random": True})
        unit.forward = partial(_compiled, unit.forward, compiled)


def _with_own_code(function: FunctionType, number: int) -> FunctionType:
    """A copy with a code object of its own. Dynamo keeps its graphs by code object, and the sizes
    that have changed by name."""
    name = f"{function.__name__}_{number}"
    copy = FunctionType(
        function.__code__.replace(co_name=name),
        function.__globals__,
        name,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _compiled(
    eager: Callable[..., Any],
    compiled: Callable[..., Any],
    *args: Any,
    **named: Any,
) -> Any:
    """A single sample, such as a last micro-batch, would need graphs of its own. So would a view of
    another tensor."""
    args, named = tree_map(_owned, (args, named))
    for tensor in tree_leaves((args, named)):
        if isinstance(tensor, torch.Tensor):
            if tensor.shape[:1] == (1,):
                return eager(*args, **named)
            mark_first_size_dynamic(tensor)
    return compiled(*args, **named)


def _owned(value: Any) -> Any:
    """A view that passed through an engine's hooks no longer counts as one, but it starts inside
    its memory."""
    if isinstance(value, torch.Tensor) and (is_view(value) or value.storage_offset()):
        return value.clone()
    return value
