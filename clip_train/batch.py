"""Batch arithmetic: the user chooses `global_size`, and this module derives everything else.

The global batch of a step has `G` samples; `G` depends on the step alone (`BatchSizes`). Each of
`W` ranks gets an equal share, or one sample more. Every rank cuts its share into the same number
`k` of micro-batches.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, PositiveInt

from clip_train.errors import UserError
from clip_train.settings import (
    LARGEST,
    Allowed,
    Messages,
    Refused,
    Rounding,
    Settings,
    rule,
)


class BatchStage(Settings):
    """A piece of `batch.schedule`."""

    until_step: PositiveInt
    """The first step, counted from 0, that no longer belongs to this piece."""
    global_size: PositiveInt
    """Samples in each global batch of this piece."""


def order_mistakes(key: str, stages: Sequence[Any]) -> Messages:
    """The message if the pieces of a schedule, each with `until_step`, do not follow each other."""
    ends = [stage.until_step for stage in stages]
    if any(b <= a for a, b in itertools.pairwise(ends)):
        yield f"{key}: until_step must rise from piece to piece, got {ends}; sort them"


class BatchConfig(Settings):
    """The `batch` section: the size of the global batch, and how a rank may compute it."""

    global_size: Annotated[PositiveInt, Refused] = 256
    """Samples per optimizer step over all ranks. Each is a negative of every other."""
    schedule: Annotated[
        list[BatchStage] | None,
        Allowed("a list of pieces, or null", example="'[{until_step: 1000, global_size: 1024}]'"),
        Refused,
    ] = None
    """Other sizes for the first steps, as pieces [{until_step: 1000, global_size: 1024}, ...].
    After the last piece, global_size applies."""
    micro_size: Annotated[PositiveInt | Literal["auto"], Rounding] = 256
    """Samples per forward pass on a rank, or fewer if the rank has fewer. It changes memory and
    speed, never the result; the last micro-batch may be shorter. auto: the fastest that fits, by
    its predicted size."""
    micro_tokens: Annotated[PositiveInt | None, Rounding] = None
    """Native resolution (data.resize): at most so many patches of images per forward pass on a
    rank, in place of micro_size, so a micro-batch of large images has fewer of them. It changes
    memory and speed, never the result."""
    kept_graphs: Annotated[PositiveInt | Literal["all", "auto"], Rounding] = "auto"
    """How many micro-batches, counted from the last, keep their graph and skip the second forward.
    Each costs one micro-batch's activations; "all" is the full-batch step; auto: as many as fit, by
    their predicted size; on a CPU 1, unless memory_limit is set."""
    memory_limit: Annotated[
        Annotated[ByteSize, Field(gt=0, le=LARGEST)] | None,
        Allowed("bytes, a size such as 24GiB or 500MB, or null"),
        Rounding,
    ] = None
    """For auto: bytes that one rank may use for weights, gradients, optimizer state, activations
    and features, as a number or as "24GiB". null: the free memory of the GPU, minus a tenth. On a
    CPU you must set it; Python and its libraries need about 0.5 GiB more on each rank."""

    @rule
    def _schedule_rises(self) -> Messages:
        yield from order_mistakes("batch.schedule", self.schedule or [])

    @property
    def sizes(self) -> BatchSizes:
        """The global batch's size at every step."""
        stages = self.schedule or []
        sizes = (*(stage.global_size for stage in stages), self.global_size)
        return BatchSizes(sizes, tuple(stage.until_step for stage in stages))


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of the global batches, a pure function of the step, so no state is saved."""

    sizes: tuple[int, ...]  # one after the other
    ends: tuple[int, ...] = ()  # for each size except the last: the first step after it

    def before(self, step: int) -> int:
        """P: samples in all global batches before that of `step`, counted from 0."""
        edges = itertools.pairwise([0, *(min(end, step) for end in self.ends), step])
        return sum(
            size * (stop - start) for size, (start, stop) in zip(self.sizes, edges, strict=True)
        )

    def at(self, step: int) -> int:
        """G: samples in the global batch of `step`."""
        return self.sizes[bisect.bisect_right(self.ends, step)]

    def steps_for(self, samples: float) -> int:
        """The number of steps, at least one, that use a number of samples closest to `samples`."""
        # The largest number of whole steps that need at most `samples`.
        whole = bisect.bisect_right(range(int(samples) + 1), int(samples), key=self.before) - 1
        return max(1, round(whole + (samples - self.before(whole)) / self.at(whole)))

    def __str__(self) -> str:
        """Such as `256 until step 1000, then 1024`."""
        texts = [
            f"{size} until step {end}" for size, end in zip(self.sizes, self.ends, strict=False)
        ]
        return ", ".join([*texts, f"{'then ' if texts else ''}{self.sizes[-1]}"])

    def check_ranks(self, world_size: int) -> None:
        """UserError if a global batch has fewer samples than there are ranks."""
        smallest = min(self.sizes)
        if smallest < world_size:
            key = "batch.global_size" + (" and batch.schedule: a size" if self.ends else "")
            raise UserError(
                f"{key} ({smallest}) must be at least the number of ranks ({world_size}), each of "
                f"which needs a sample; raise it to {world_size}, or run on {smallest} "
                f"rank{'s' if smallest > 1 else ''}"
            )


def shares(total: int, world_size: int) -> list[int]:
    """How many of `total` samples each rank holds; the first ranks hold one more."""
    return [total // world_size + (r < total % world_size) for r in range(world_size)]


def share_of(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Which of `total` samples, [begin, end), a rank holds."""
    counts = shares(total, world_size)
    begin = sum(counts[:rank])
    return begin, begin + counts[rank]


def num_chunks(largest: int, smallest: int, micro_size: int) -> int:
    """k: enough for the largest share, and at most the number of samples in the smallest."""
    return min(-(-largest // micro_size), smallest)


def chunk_sizes(n: int, k: int, micro_size: int) -> list[int]:
    """Cut n samples into `k` chunks of `micro_size`, none of them empty; the last ones may be
    shorter.

    If micro_size is 1 and shares differ, the larger share has one sample more than there are
    chunks, so its last chunk has two.
    """
    sizes = []
    for behind in reversed(range(k)):
        sizes.append(min(micro_size, n - behind) if behind else n)
        n -= sizes[-1]
    return sizes


def token_chunks(num_tokens: Sequence[int], most: int, k: int = 1) -> list[int]:
    """Sizes of micro-batches in order, each with at most `most` tokens, or one sample.

    num_tokens: of each sample. k: the minimum number of chunks, because another rank has that many;
    needs at least k samples.
    """
    sizes, total = [0], 0
    for tokens in num_tokens:
        total += tokens
        if total > most and sizes[-1]:
            sizes.append(0)
            total = tokens
        sizes[-1] += 1
    while len(sizes) < min(k, len(num_tokens)):
        i = sizes.index(max(sizes))
        sizes[i : i + 1] = [sizes[i] - sizes[i] // 2, sizes[i] // 2]
    return sizes


@dataclass(frozen=True)
class BatchPlan:
    """How a rank computes its share of a global batch."""

    global_size: int  # G
    world_size: int  # W
    micro_size: int  # b; with micro_tokens its expected value
    kept_graphs: int  # m, 1 <= m <= accum_steps
    # native resolution: the most patches of a micro-batch; None: micro_size samples
    micro_tokens: int | None = None

    def at(self, global_size: int) -> BatchPlan:
        """The same plan for a global batch that is not larger."""
        plan = replace(self, global_size=global_size)
        plan = replace(plan, micro_size=min(self.micro_size, plan.per_rank))
        return replace(plan, kept_graphs=min(self.kept_graphs, plan.accum_steps))

    @property
    def per_rank(self) -> int:
        """n: samples of a rank, or the larger share if W does not divide G."""
        return -(-self.global_size // self.world_size)

    @property
    def accum_steps(self) -> int:
        """k micro-batches per step, on every rank; the last may be short. With micro_tokens, the
        expected number: each step has its own."""
        return num_chunks(self.per_rank, self.global_size // self.world_size, self.micro_size)

    @property
    def forwards_per_sample(self) -> float:
        """1 for micro-batches whose graph is kept, 2 for the others: the cost of the cache."""
        chunks = chunk_sizes(self.per_rank, self.accum_steps, self.micro_size)
        return 2 - sum(chunks[-self.kept_graphs :]) / self.per_rank


def plan_batch(
    config: BatchConfig, world_size: int, tokens_per_image: float | None = None
) -> BatchPlan:
    """The plan of the largest global batch on `world_size` ranks.

    An `auto` value starts as the smallest plan; `clip_train.memory.plan` chooses later, once memory
    has been measured. UserError if a rank would get no sample.

    tokens_per_image: at native resolution, the mean number of patches, for `micro_tokens`.
    """
    config.sizes.check_ranks(world_size)
    largest = max(config.sizes.sizes)
    micro = 1 if config.micro_size == "auto" else config.micro_size
    if config.micro_tokens is not None and tokens_per_image is not None:
        micro = max(1, int(config.micro_tokens / tokens_per_image))
    counts: dict[Any, Any] = {"auto": 1, "all": largest}
    kept = counts.get(config.kept_graphs, config.kept_graphs)
    plan = BatchPlan(largest, world_size, micro, kept, config.micro_tokens)
    return plan.at(largest)
