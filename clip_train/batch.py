"""The batch arithmetic: the user says `global_size`, everything else is derived here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveInt

from clip_train.errors import UserError
from clip_train.settings import Settings


class BatchConfig(Settings):
    """The `batch` section: what the user wants, and how it may be computed."""

    global_size: PositiveInt = 256
    """Samples per optimizer step over all ranks, each every other's negative."""
    micro_size: PositiveInt = 256
    """Samples that go through the model at once on a rank (less where a rank has fewer). It changes memory
    and speed, never the result; the last micro-batch may be shorter."""
    kept_graphs: PositiveInt | Literal["all"] = 1
    """How many of the last micro-batches keep their graph and need no second forward. Each costs one
    micro-batch's activations; "all" is the full-batch step."""
    accumulation: Literal["cached", "local"] = "cached"
    """cached: every sample of the global batch is every other's negative, however it is cut. local: plain
    gradient accumulation, for comparison: negatives only within a micro-batch on a rank, so that micro_size
    and the number of ranks do change the result."""


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
    """The plan for `world_size` ranks; UserError where the ranks cannot have equally many samples."""
    N = config.global_size
    if N % world_size:
        below = N // world_size * world_size
        nearest = f"{below} and {below + world_size}" if below else str(world_size)
        raise UserError(
            f"batch.global_size ({N}) must be a multiple of the number of ranks ({world_size}); the nearest: {nearest}"
        )
    micro = min(config.micro_size, N // world_size)
    plan = BatchPlan(N, world_size, micro, 1)
    kept = plan.accum_steps if config.kept_graphs == "all" else min(config.kept_graphs, plan.accum_steps)
    return BatchPlan(N, world_size, micro, kept)
