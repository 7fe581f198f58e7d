"""The batch arithmetic: the user says `global_size`, everything else is derived here and nowhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, PositiveInt, model_validator

from clip_train.errors import UserError
from clip_train.settings import Settings


def parse_bytes(value: int | str) -> int:
    """Bytes, from a number or from "24GiB", "500 MB". ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?\s*", str(value), re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(f"batch.memory_limit ({value!r}) must be bytes, or a size such as 24GiB or 500MB")
    number, unit, binary = match.groups()
    power = " KMGT".index(unit.upper()) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def _size(value: int | str | None) -> int | str | None:
    if value is not None:
        parse_bytes(value)
    return value  # as the user wrote it: recipes are compared and read


class BatchConfig(Settings):
    """The `batch` section: what the user wants, and how it may be computed."""

    global_size: PositiveInt = 256
    """Samples per optimizer step over all ranks, each every other's negative."""
    micro_size: PositiveInt | Literal["auto"] = 256
    """Samples that go through the model at once on a rank (less where a rank has fewer). It changes memory
    and speed, never the result; the last micro-batch may be shorter. auto: the fastest that fits, measured
    at the start."""
    kept_graphs: PositiveInt | Literal["all", "auto"] = 1
    """How many of the last micro-batches keep their graph and need no second forward. Each costs one
    micro-batch's activations; "all" is the full-batch step; auto: chosen with micro_size=auto, or as many as
    fit beside a given micro_size."""
    memory_limit: Annotated[int | str | None, AfterValidator(_size)] = None
    """For auto: bytes that one rank may use for weights, gradients, optimizer state, activations and features,
    as a number or as "24GiB". null: what is free on the GPU, less a tenth; a CPU needs it said (Python and its
    libraries come on top there, about 0.5 GiB a rank)."""
    accumulation: Literal["cached", "local"] = "cached"
    """cached: every sample of the global batch is every other's negative, however it is cut. local: plain
    gradient accumulation, for comparison: negatives only within a micro-batch on a rank, so that micro_size
    and the number of ranks do change the result."""

    @model_validator(mode="before")
    @classmethod
    def _graphs_follow_the_size(cls, raw: Any) -> Any:
        """With a chosen micro-batch the kept graphs are chosen too, unless the recipe says a number."""
        if isinstance(raw, dict) and raw.get("micro_size") == "auto":
            return {"kept_graphs": "auto", **raw}
        return raw


@dataclass(frozen=True)
class BatchPlan:
    """How one rank computes its share of the global batch."""

    global_size: int  # N
    world_size: int  # W
    micro_size: int  # b
    kept_graphs: int  # m, 1 <= m <= accum_steps

    @property
    def per_rank(self) -> int:
        """n = N / W samples on each rank."""
        return self.global_size // self.world_size

    @property
    def accum_steps(self) -> int:
        """k micro-batches per step; the last may be short."""
        return -(-self.per_rank // self.micro_size)

    @property
    def forwards_per_sample(self) -> float:
        """1 for the graphs that are kept, 2 for the others: the price of the cache."""
        short = self.per_rank - (self.accum_steps - 1) * self.micro_size
        kept = (self.kept_graphs - 1) * self.micro_size + short
        return 2 - kept / self.per_rank


def plan_batch(config: BatchConfig, world_size: int) -> BatchPlan:
    """The plan for `world_size` ranks; UserError where the ranks cannot have equally many samples.

    Where something is `auto` it is the smallest plan, until memory has been looked at (`clip_train.memory`).
    """
    N = config.global_size
    if N % world_size:
        below = N // world_size * world_size
        nearest = f"{below} and {below + world_size}" if below else str(world_size)
        raise UserError(
            f"batch.global_size ({N}) must be a multiple of the number of ranks ({world_size}); the nearest: {nearest}"
        )
    micro = 1 if config.micro_size == "auto" else min(config.micro_size, N // world_size)
    plan = BatchPlan(N, world_size, micro, 1)
    wanted = config.kept_graphs
    kept = plan.accum_steps if wanted == "all" else 1 if wanted == "auto" else min(wanted, plan.accum_steps)
    return BatchPlan(N, world_size, micro, kept)
