"""The named inputs of a sample, `data.inputs`. One row of bytes holds all inputs of a sample.

So shared memory, micro-batches and digests treat them as they treat images. The model gets them
back as tensors, by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from clip_train.errors import UserError
from clip_train.resizing import Patches
from clip_train.settings import import_path

if TYPE_CHECKING:  # a recipe is read without torch
    from torch import Tensor, nn

IMAGE = "image"  # in place of an import path: the image as it is without `data.inputs`


class Input(NamedTuple):
    """One input of every sample, as its function declares it."""

    name: str
    path: str  # of the function, or IMAGE
    shape: tuple[int, ...]
    dtype: str  # as torch names it
    nbytes: int


def layout_of(paths: Mapping[str, str] | None, image_size: int) -> tuple[Input, ...]:
    """The inputs of `data.inputs`. UserError for a function that does not declare its result."""
    import torch

    layout = []
    # a tensor has these attributes too
    image = torch.empty(row_shape((), image_size), dtype=torch.uint8, device="meta")
    for name, path in (paths or {}).items():
        key = f"data.inputs.{name}"
        function = image if path == IMAGE else import_path(key, path)
        shape: Any = getattr(function, "shape", None)
        kind: Any = getattr(function, "dtype", None)
        known = isinstance(shape, tuple) and isinstance(kind, torch.dtype)
        if not known or min((1, *shape)) < 1:
            raise UserError(
                f"{key} ({path}) must be a function that declares what it returns: after it write "
                f"its .shape = (16000,), a tuple (now {shape}), and .dtype = torch.float32 (now "
                f"{kind})"
            )
        dtype = str(kind).removeprefix("torch.")
        layout.append(Input(name, path, tuple(shape), dtype, prod(shape) * kind.itemsize))
    return tuple(layout)


def row_shape(
    layout: Sequence[Input], image_size: int, patches: Patches | None = None
) -> tuple[int, ...]:
    """A sample's shape in `Batch.images`: [3, S, S], or [B] bytes where inputs are named, or
    `Patches.row` at native resolution."""
    if layout:
        return (sum(each.nbytes for each in layout),)
    if patches is not None:
        return patches.row
    return (3, image_size, image_size)


def unpack(rows: Tensor, layout: Sequence[Input]) -> dict[str, Tensor]:
    """uint8 [n, B] -> by name the inputs of n samples, [n, *shape]. Works on any device."""
    import torch

    parts = rows.split([each.nbytes for each in layout], dim=1)
    return {
        each.name: part.clone(memory_format=torch.contiguous_format)  # else it may not be aligned
        .view(getattr(torch, each.dtype))
        .view(len(rows), *each.shape)
        for part, each in zip(parts, layout, strict=True)
    }


def unpacked(layout: Sequence[Input], rows: Tensor | None) -> dict[str, Tensor] | None:
    """The named inputs of rows, a model's first argument; None for None."""
    return None if rows is None else unpack(rows, layout)


def change_first_argument(model: nn.Module, change: Callable[[Any], Any]) -> None:
    """Before each forward of the model, replace its first argument, given by place or by name, by
    `change` of it."""

    def hook(
        module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (change(arguments[0]), *arguments[1:]), named
        first = next(iter(inspect.signature(module.forward).parameters), "")
        if first in named:
            named = named | {first: change(named[first])}
        return arguments, named

    model.register_forward_pre_hook(hook, with_kwargs=True)
