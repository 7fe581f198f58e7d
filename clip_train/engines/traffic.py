"""Bytes that a rank sends in a step, as a recorder of collectives counts them, and their duration.

tests/engine/test_wire.py compares it with a recorder, to the byte. Calls of less than 1 KB, such as
norms and statuses, are left out.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from torch import nn

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "int64": 8}


@dataclass(frozen=True)
class Shapes:
    """The parameters that an engine shards. Nothing holds data."""

    # the parameters of each unit, in the order of a forward; all others last
    parts: Sequence[Sequence[nn.Parameter]]
    flat: Sequence[int]  # trained elements in each of the optimizer's groups
    # for each part: whether a second forward computes it, which frozen towers do not need
    replayed: Sequence[bool]
    reached: Sequence[bool]  # and whether a backward reaches it
    # what Muon updates: name -> shape
    matrices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Collective:
    """The calls of one operator on one tensor."""

    place: str  # in the step: forward, loss, backward, last backward, step
    operator: str  # all_gather, reduce_scatter, all_reduce, all_to_all, send
    dtype: str  # a key of BYTES
    elements: int  # of the larger tensor
    ranks: int  # of the group
    times: int = 1  # in a step
    stride: int = 1  # between neighbors in the group
    # The fraction of the place's computation that cannot run at the same time: what comes before it
    # in a backward, what waits for it in a forward.
    alone: float = 1.0

    @property
    def call_bytes(self) -> int:
        return self.elements * BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        return self.times * self.call_bytes


@dataclass(frozen=True)
class Links:
    """How GPUs are connected: bytes a second, one way."""

    node: float  # from each GPU to the others of its node
    network: float  # from each node to the others, all of its adapters together
    per_node: int  # GPUs
    # seconds from one rank to the next: NVLink, by NCCL's own model, which has 4e-6 for a network
    hop: float = 2e-6

    def crosses(self, sent: Collective) -> bool:
        """Whether the group spans nodes."""
        return sent.ranks * sent.stride > self.per_node

    def seconds(self, sent: Collective) -> float:
        """One call, by rings. A ring enters each node once, so that a group of all GPUs uses the
        whole network of a node; groups with one GPU in each node share it."""
        rate, hops, rounds = self.node, sent.ranks - 1, 1
        if self.crosses(sent):
            rate = min(rate, self.network / min(sent.stride, self.per_node))
        if sent.operator == "all_reduce":  # small ones go up and down a tree
            hops, rounds = 2 * math.ceil(math.log2(sent.ranks)), 2
        elif sent.operator == "send":
            hops = 1
        moved = rounds * sent.call_bytes * (sent.ranks - 1) / sent.ranks
        return moved / rate + hops * self.hop

    def exposed(self, sent: Iterable[Collective], computation: float) -> float:
        """Seconds by which one pass, which computes for `computation` seconds, takes longer."""
        end = 0.0
        for call in sorted(sent, key=attrgetter("alone")):
            end = max(end, call.alone * computation) + self.seconds(call)
        return max(end - computation, 0.0)


def rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
