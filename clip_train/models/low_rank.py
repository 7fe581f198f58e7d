"""Adapters of low rank (`model.lora`) in a model: new parameters, and names that stay.

A linear layer adds `B A x` to its output. If torch reads a weight directly
(`nn.MultiheadAttention`), the module provides W + B A. Both start with B = 0, which changes no bit.
`p` adapters in one weight [out, in], each for its part of the rows: A [p rank, in], B [out, rank].
"""

import difflib
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clip_train.errors import UserError
from clip_train.models.blocks import Attention, Block
from clip_train.models.dropout import LOW_RANK_ID, draw_by, drop_rows
from clip_train.models.lora import Lora, covers
from clip_train.settings import shown
from clip_train.torch_internals import own_parameters

NAMES = ("lora_A", "lora_B")  # of the parameters, beside the weight's
PACKED = "in_proj_weight"  # of queries, keys and values
# Names of linear layers that compute several projections in one product, as timm's -> how many.
FUSED = {"qkv": 3, "kv": 2}


def product(A: Tensor, B: Tensor) -> Tensor:
    """[p rank, in], [out, rank] -> [out, in]"""
    rank = B.shape[1]
    return (B.unflatten(0, (len(A) // rank, -1)) @ A.unflatten(0, (-1, rank))).flatten(0, 1)


class LowRank(nn.Module):
    """A base before a layer's own class."""

    lora_A: Tensor  # noqa: N815  peft's names
    lora_B: Tensor  # noqa: N815
    factor: float
    dropped: int  # the probability of dropout, times 65,536
    layer_id: Tensor

    def added(self, x: Tensor, first: int = 0, last: int = 1) -> Tensor:
        """[..., in] -> what the adapters `first` to `last` add: [..., their rows]."""
        rank = self.lora_B.shape[1]
        if self.training and self.dropped:
            x = drop_rows(x, self.dropped, self.layer_id)
        A = self.lora_A[first * rank : last * rank]
        parts = self.lora_B.chunk(len(self.lora_A) // rank)[first:last]
        narrow = F.linear(x, A).split(rank, dim=-1)
        return torch.cat([*map(F.linear, narrow, parts)], dim=-1) * self.factor


class AdaptedLinear(LowRank):
    """Before a subclass of `nn.Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.added(x, last=len(self.lora_A) // self.lora_B.shape[1])


class AdaptedAttention(LowRank, Attention):
    """This project's attention."""

    def project(self, x: Tensor, weight: Tensor, bias: Tensor, first: int, last: int) -> Tensor:
        return super().project(x, weight, bias, first, last) + self.added(x, first, last)


class AdaptedWeight(LowRank):
    """Before a class whose weight is read by other code, which finds W + B A under its name."""

    def merged(self, name: str) -> Tensor:
        weight: Any = own_parameters(self)[name]
        return weight + product(self.lora_A, self.lora_B) * self.factor


@cache
def adapted(kind: Any, layer: Any, name: str) -> type[nn.Module]:
    """The class of an adapted layer. name: of its weight."""
    if issubclass(kind, layer):
        return kind
    merged = {name: property(partial(AdaptedWeight.merged, name=name))}
    members = merged if kind is AdaptedWeight else {}
    return type(f"Adapted{layer.__name__}", (kind, layer), members)


def adaptable(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Each weight that can have adapters: its name, its module, and the module's new class."""
    # linear layers whose weights are read, and whose forward is not called
    inside: set[Any] = set()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            inside.add(module.out_proj)
        elif type(module).__name__ == "AttentionPool2d":  # of OpenCLIP's ResNets
            inside.update(module.children())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield f"{name}.weight", module, AdaptedWeight if module in inside else AdaptedLinear
        elif isinstance(getattr(module, PACKED, None), nn.Parameter):
            ours = isinstance(module, Attention)
            yield f"{name}.{PACKED}", module, AdaptedAttention if ours else AdaptedWeight


def adapters_of(weight: str) -> int:
    """How many adapters the weight of this name has: one for each projection in it."""
    if weight.endswith(PACKED):
        return 3
    return FUSED.get(weight.removesuffix(".weight").rpartition(".")[2], 1)


def adapt(model: nn.Module, lora: Lora) -> None:
    """Give a model its adapters, in place: A is drawn as peft draws it, B is 0.

    UserError for an entry of `on` that fits no weight, and for
    dropout where torch reads the weights itself.
    """
    found = [*adaptable(model)]
    for entry in lora.on:
        if not any(covers(entry, weight) for weight, *_ in found):
            ends = sorted({weight.removesuffix(".weight").split(".")[-1] for weight, *_ in found})
            near = difflib.get_close_matches(entry, ends, n=3, cutoff=0.4) or ends[:6]
            raise UserError(
                f"model.lora.on ({shown(list(lora.on))}): no layer's name ends with {entry}; give "
                f"one of {', '.join(near)}, or attention, mlp or linear"
            )
    for number, (weight, module, kind) in enumerate(found):
        if not any(covers(entry, weight) for entry in lora.on):
            continue
        if lora.dropout and kind is AdaptedWeight:
            raise UserError(
                f"model.lora.dropout ({lora.dropout}) cannot be applied to {weight}, whose "
                "product torch computes; set model.lora.dropout=0, or remove attention from "
                "model.lora.on"
            )
        name = weight.split(".")[-1]
        p: Any = own_parameters(module)[name]
        rows, columns = getattr(p, "ds_shape", p.shape)  # ZeRO 3 holds none of it here
        pairs, bound = adapters_of(weight), columns**-0.5
        A = torch.empty(pairs * lora.rank, columns).uniform_(-bound, bound)
        module.register_parameter(NAMES[0], nn.Parameter(A))
        module.register_parameter(NAMES[1], nn.Parameter(torch.zeros(rows, lora.rank)))
        module.factor, module.dropped = lora.alpha / lora.rank, round(lora.dropout * 65536)
        # a tensor: torch.compile would make a graph for each int
        module.layer_id = torch.tensor(LOW_RANK_ID + number, device="cpu")
        module.__class__ = adapted(kind, module.__class__, name)
    if lora.dropout:
        model.register_forward_pre_hook(of_model)
        for module in model.modules():
            if isinstance(module, Block):
                module.register_forward_pre_hook(of_block)


def of_model(_: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Before a forward of (images, texts, sample_seeds)."""
    draw_by(*inputs[2:3] or [None])


def of_block(_: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Before that of a block, also in a recomputation: its rows may be packed, or one token."""
    _x, seeds, token, packing = (*inputs, None, None)[:4]
    packed = None if packing is None else (packing.seeds, packing.places)
    draw_by(seeds, token, packed)


def merged(state: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """The state of the same model without adapters, which computes the same."""
    out = {name: x for name, x in state.items() if not name.endswith(NAMES)}
    for name in (name for name in state if name.endswith(NAMES[0])):
        layer = name.removesuffix(NAMES[0])
        weight = layer + ("weight" if f"{layer}weight" in state else PACKED)
        delta = product(state[name].double(), state[layer + NAMES[1]].double())
        out[weight] = (out[weight].double() + delta * (lora.alpha / lora.rank)).to(out[weight])
    return out
