"""Which micro-batch, how many retained graphs: the least work among what fits into memory. Pure arithmetic.

The same function decides at the start of a run and in `clip-train plan`. `n` samples on a rank go through
the model in `k` micro-batches of `b`, the graphs of the last `m` are retained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clip_train.batch import BatchPlan
from clip_train.errors import UserError

GIB = 2**30
BACKWARD = 2.0  # forwards that a backward costs
RECOMPUTED = 0.7  # of a forward, by activation checkpointing: each block's last product is not needed again
CALL = 1.0  # a call of the model costs about as much as one more sample: launches, small products
REDUCTION = 16.0  # and one more reduction of the gradients over ranks, partly hidden, about as 16 samples


@dataclass(frozen=True)
class Profile:
    """What one sample more needs, in bytes, measured as the difference between two sizes of micro-batch."""

    forward: float  # at the highest point of a forward without a graph
    graph: float  # held between forward and backward
    peak: float  # at the highest point of a forward with a graph and of its backward

    def plus(self, more: Profile, less: Profile, times: int) -> Profile:
        """This, and `times` the difference between two others."""
        return Profile(
            self.forward + times * (more.forward - less.forward),
            self.graph + times * (more.graph - less.graph),
            self.peak + times * (more.peak - less.peak),
        )

    def bytes_for(self, plan: BatchPlan) -> float:
        """At the highest point of a step: all retained graphs and one micro-batch at work."""
        others = min(plan.kept_graphs - 1, plan.accum_steps - 1) * plan.micro_size
        return others * self.graph + plan.micro_size * max(self.peak, self.forward)


@dataclass(frozen=True)
class Layout:
    """One way to compute a step."""

    plan: BatchPlan
    activation_checkpointing: bool
    reduce_once: bool  # stages 2 and 3
    bytes: float  # on one rank, at the highest point
    cost: float  # in forwards of one sample on one rank

    @property
    def forwards_per_sample(self) -> float:
        return self.plan.forwards_per_sample + RECOMPUTED * self.activation_checkpointing


@dataclass(frozen=True)
class Room:
    """What there is to choose from, on each rank alike."""

    limit: float  # bytes
    fixed: (
        float  # parameters, gradients, optimizer state, features; reductions in each backward where there is a choice
    )
    whole_gradient: float = 0.0  # what a reduction once per step needs beyond that; see `reductions`
    reductions: tuple[bool, ...] = (True,)  # allowed values of `reduce_once`
    each_backward_costs: bool = False  # k reductions instead of one: stages 2 and 3 on several ranks


def layouts(
    n: int, global_size: int, world_size: int, room: Room, profiles: dict[bool, Profile], micro_size: int | None,
    kept_graphs: int | None,
) -> Iterator[Layout]:  # fmt: skip
    """Every one worth a look, whether it fits or not. `profiles`: activation checkpointing -> Profile.

    Micro-batches of equal size only (up to one sample), and of a user's size or number of graphs where given.
    With activation checkpointing all graphs are retained: it and the cache would pay for the same forward twice.
    """
    sizes = sorted({-(-n // k) for k in range(1, n + 1)}) if micro_size is None else [min(micro_size, n)]
    for b in sizes:
        k = -(-n // b)
        for checkpointing, profile in profiles.items():
            for once in room.reductions:
                for m in _graph_counts(b, k, checkpointing, room, once, profile, kept_graphs):
                    yield _layout(BatchPlan(global_size, world_size, b, m), checkpointing, once, room, profile)


def _graph_counts(
    b: int, k: int, checkpointing: bool, room: Room, once: bool, profile: Profile, kept_graphs: int | None
) -> set[int]:
    """Numbers of retained graphs worth a look: more of them are always faster, so one, and the most that fit."""
    if checkpointing:
        return {k} if kept_graphs is None or kept_graphs >= k else set()
    if kept_graphs is not None:
        return {min(kept_graphs, k)}
    left = room.limit - room.fixed - (room.whole_gradient if once else 0.0) - b * max(profile.peak, profile.forward)
    beside = int(left // (b * profile.graph)) if profile.graph > 0 else k
    return {1, max(1, min(k, 1 + beside))}


def _layout(plan: BatchPlan, checkpointing: bool, once: bool, room: Room, profile: Profile) -> Layout:
    n, k = plan.per_rank, plan.accum_steps
    calls = k + k + (k - min(plan.kept_graphs, k))  # forwards, backwards, and forwards again
    cost = n * (plan.forwards_per_sample + RECOMPUTED * checkpointing + BACKWARD) + CALL * calls
    if room.each_backward_costs and not once:
        cost += REDUCTION * (k - 1)
    need = room.fixed + profile.bytes_for(plan) + (room.whole_gradient if once else 0.0)
    return Layout(plan, checkpointing, once, need, cost)


def choose(
    global_size: int,
    world_size: int,
    room: Room,
    profiles: dict[bool, Profile],
    *,
    micro_size: int | None = None,
    kept_graphs: int | None = None,
) -> Layout:
    """The cheapest layout that fits; of equally cheap ones the smallest. None for a number means: choose it.

    UserError where not even the smallest fits.
    """
    n = -(-global_size // world_size)
    smallest: Layout | None = None
    best: Layout | None = None
    for layout in layouts(n, global_size, world_size, room, profiles, micro_size, kept_graphs):
        if smallest is None or layout.bytes < smallest.bytes:
            smallest = layout
        if layout.bytes <= room.limit and (best is None or (layout.cost, layout.bytes) < (best.cost, best.bytes)):
            best = layout
    if best is None:
        needs = "" if smallest is None else f" (the least that a step needs is {gib(smallest.bytes)})"
        raise UserError(
            f"batch.micro_size, batch.kept_graphs: nothing fits into {gib(room.limit)} a rank{needs}, of which "
            f"{gib(room.fixed)} are weights, gradients, optimizer state and features; raise batch.memory_limit, "
            "or use more ranks, a higher engine.zero_stage, engine.activation_checkpointing=auto, "
            "or a smaller batch.global_size"
        )
    return best


def gib(size: float) -> str:
    """Three digits, in the unit that suits."""
    return f"{size / GIB:.3g} GiB" if size >= GIB else f"{size / 2**20:.3g} MiB"
