"""Optimizers named by import path: found and tried before the model is built."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clip_train.errors import UserError
from clip_train.settings import import_path, shown

find_class = partial(import_path, "optim.name", base=torch.optim.Optimizer)


class Trial(NamedTuple):
    """The result of two steps of an optimizer on a small matrix."""

    slots: int  # tensors of the parameter's shape in its state
    elementwise: bool  # the rows of a matrix are updated alike, whether apart or together


def try_out(path: str, lr: float, options: Mapping[str, Any]) -> Trial:
    """Two steps on a matrix and, as separate parameters, on its rows.

    UserError if the class does not take the options, or if a checkpoint cannot hold its state: it
    may keep `step` and tensors of the parameter's shape, and may change no entry of its groups.
    """
    drawn = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    whole = nn.Parameter(drawn[0].clone())
    rows: list[Tensor] = [nn.Parameter(row.clone()) for row in drawn[0].split(1)]
    make = find_class(path)
    try:
        optimizer = make([whole, *rows], lr=lr, **options)
        group = optimizer.param_groups[0]
        fresh = dict(group)
        for gradient in drawn[1:]:
            whole.grad = gradient.clone()
            for row, part in zip(rows, gradient.split(1), strict=True):
                row.grad = part.clone()
            optimizer.step()
    except (TypeError, ValueError, RuntimeError) as e:
        raise UserError(
            f"optim.name ({path}) cannot be used with optim.options ({shown(dict(options))}): {e}; "
            "correct them"
        ) from None
    slots, lost = 0, [key for key, value in group.items() if value != fresh.get(key)]
    for slot, value in optimizer.state[whole].items():
        if isinstance(value, Tensor) and value.shape == whole.shape:
            slots += 1
        elif value is not None and not (slot == "step" and float(value) == 2):
            lost.append(slot)
    if lost:
        raise UserError(
            f"optim.name ({path}) remembers {', '.join(lost)}, which does not have a parameter's "
            "shape: a checkpoint could not hold it; choose another optimizer"
        )
    return Trial(slots, torch.allclose(whole, torch.cat(rows), rtol=1e-5, atol=1e-7))
