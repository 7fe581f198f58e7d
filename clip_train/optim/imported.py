"""An optimizer that a recipe names by its import path: found, and tried, before anything is built with it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clip_train.errors import UserError
from clip_train.settings import shown


@dataclass(frozen=True)
class Trial:
    """What two steps on a little matrix have shown."""

    slots: int  # tensors of the parameter's shape in its state
    elementwise: bool  # a matrix that is cut anywhere is updated alike


def find_class(path: str) -> type[torch.optim.Optimizer]:
    """UserError where there is none."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise UserError(
            f"optim.name ({path}) cannot be imported: {e}; install it, or correct the path"
        ) from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(
            f"optim.name ({path}) is no torch.optim.Optimizer; give the path of such a class"
        )
    return found


def try_out(path: str, lr: float, options: Mapping[str, Any]) -> Trial:
    """UserError where it cannot be made, or where a checkpoint could not hold what it remembers: `step`, and tensors of
    the parameter's shape."""
    make = find_class(path)
    drawn = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(3, 4, 4, generator=drawn)

    def stepped(cut: Callable[[Tensor], list[Tensor]]) -> tuple[torch.optim.Optimizer, Tensor]:
        parameters = [nn.Parameter(part.clone()) for part in cut(start)]
        optimizer = make(parameters, lr=lr, **options)  # type: ignore[call-arg]
        for gradient in gradients:
            for p, part in zip(parameters, cut(gradient), strict=True):
                p.grad = part.clone()
            optimizer.step()
        return optimizer, torch.cat([p.detach().flatten() for p in parameters])

    try:
        fresh = make([nn.Parameter(start.clone())], lr=lr, **options).param_groups[0]  # type: ignore[call-arg]
        optimizer, whole = stepped(lambda x: [x])
    except (TypeError, ValueError, RuntimeError) as e:
        raise UserError(
            f"optim.name ({path}) cannot be used with optim.options ({shown(dict(options))}): {e}; correct them"
        ) from None
    (state,) = optimizer.state.values() or ({},)
    others = [
        slot
        for slot, value in state.items()
        if not isinstance(value, Tensor) or value.shape != start.shape
    ]
    kept = [
        slot
        for slot in others
        if state[slot] is not None and not (slot == "step" and float(state[slot]) == 2)
    ]
    kept += [
        key
        for key, value in optimizer.param_groups[0].items()
        if key != "params" and value != fresh.get(key)
    ]
    if kept:
        raise UserError(
            f"optim.name ({path}) remembers {', '.join(kept)}, which is not of a parameter's shape: a checkpoint could "
            "not hold it; choose another optimizer"
        )
    try:
        _, pieces = stepped(lambda x: list(x.flatten().split(6)))
    except (TypeError, ValueError, RuntimeError):  # it takes matrices only
        return Trial(len(state) - len(others), False)
    return Trial(len(state) - len(others), torch.allclose(whole, pieces, rtol=1e-5, atol=1e-7))
