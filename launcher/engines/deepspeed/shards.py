"""Where DeepSpeed keeps which piece of which parameter: the one module that knows its flat partitions.

At every stage a rank's fp32 master weights lie in a few flat tensors, on which torch's optimizer works and
to which its state is keyed. An `OwnedSlice` says which elements of which parameter lie where in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class OwnedSlice:
    """Elements `[start, start + numel)` of a parameter are `flat[offset : offset + numel]` on this rank."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    numel: int
    flat: Tensor  # fp32 master weights, the key of the optimizer's state
    offset: int

    def tensors(self, optimizer: torch.optim.Optimizer, only: set[str] | None = None) -> dict[str, Tensor]:
        """Views, each [numel]: "param" and the optimizer's slots (those in `only`, if given)."""
        found: dict[str, Tensor] = {"param": self.flat.detach()}
        for slot, value in optimizer.state.get(self.flat, {}).items():
            if slot != "step" and value is not None and (only is None or slot in only):
                found[slot] = value
        return {slot: value.view(-1).narrow(0, self.offset, self.numel) for slot, value in found.items()}


def owned_slices(engine: Any, stage: int) -> list[OwnedSlice]:
    """This rank's slices of every trainable parameter, in the model's order."""
    finder = {0: _whole, 1: _mapped, 2: _mapped, 3: _partitioned}[stage]
    out: list[OwnedSlice] = []
    for name, p in engine.module.named_parameters():
        if p.requires_grad:
            out.extend(finder(engine, name, p))
    return out


def _whole(engine: Any, name: str, p: Any) -> Iterator[OwnedSlice]:
    """Stage 0: the optimizer works on the parameter itself."""
    yield OwnedSlice(name, tuple(p.shape), 0, p.numel(), p, 0)


def _mapped(engine: Any, name: str, p: Any) -> Iterator[OwnedSlice]:
    """Stages 1 and 2 (also DeepSpeed's BF16_Optimizer): the parameter's fragment of this rank's partition."""
    mapping = p._hp_mapping
    if mapping is None:  # it lies wholly on other ranks
        return
    wrapper = engine.optimizer
    flats = getattr(wrapper, "single_partition_of_fp32_groups", None) or wrapper.fp32_groups_flat_partition
    lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
    yield OwnedSlice(name, tuple(p.shape), lp.start, lp.numel, flats[mapping.param_group_index], hp.start)


def _partitioned(engine: Any, name: str, p: Any) -> Iterator[OwnedSlice]:
    """Stage 3: every parameter is cut evenly over the ranks; the last piece is padded."""
    wrapper = engine.optimizer
    group, offset, padded = wrapper.grad_position[wrapper.get_param_id(p)]
    start = padded * torch.distributed.get_rank(group=p.ds_process_group)
    numel = min(padded, p.ds_numel - start)
    if numel > 0:
        yield OwnedSlice(name, tuple(p.ds_shape), start, numel, wrapper.fp32_partitioned_groups_flat[group], offset)
