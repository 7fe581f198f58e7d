"""Which rows of which parameter FSDP keeps on this rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Shard:
    """This rank's rows of a parameter: elements `[start, start + local.numel())` of the flattened one."""

    name: str
    parameter: nn.Parameter  # a DTensor, the key of the optimizer's state
    start: int
    saved_here: bool  # among the ranks that hold the same rows, one saves them

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def local(self) -> Tensor:
        """fp32 masters, 1-d, a view."""
        return flat(self.parameter)

    def tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Views, each 1-d: "param" and the optimizer's slots."""
        slots = optimizer.state.get(self.parameter, {})
        held = {slot: flat(value) for slot, value in slots.items() if slot != "step" and value is not None}
        return {"param": self.local, **held}


def flat(x: Any) -> Tensor:
    return cast(DTensor, x).to_local().detach().view(-1)


def find_shards(model: nn.Module) -> list[Shard]:
    """Dim 0 is cut as torch.chunk cuts it: ceil(rows / ranks) rows each, the last ranks fewer or none."""
    out: list[Shard] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        mesh = cast(DTensor, p).device_mesh
        ranks, here = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
        row = math.prod(p.shape[1:])
        start = min(-(-p.shape[0] // ranks) * here, p.shape[0]) * row
        copies, copy = (mesh.size(0), mesh.get_local_rank(0)) if mesh.ndim == 2 else (1, 0)
        out.append(Shard(name, p, start, len(out) % copies == copy))
    return out
