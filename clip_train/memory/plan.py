"""Choose the micro-batch size and the number of retained graphs: the least work that fits into
memory. A run and `clip-train plan` use the same function.

The `n` samples of a rank go through the model in `k` micro-batches of `b` samples. The graphs of
the last `m` micro-batches are retained.
"""

import itertools
from dataclasses import dataclass, replace

from clip_train.batch import BatchPlan
from clip_train.errors import UserError
from clip_train.settings import Recompute

GIB = 2**30
# Costs in forwards of one sample.
BACKWARD = 2.0
# What is recomputed, by activation checkpointing. Whole blocks: the last product of each block is
# not needed again. Pointwise: GELU and the norms take as long as a fifth of a forward.
RECOMPUTED: dict[Recompute, float] = {False: 0.0, "pointwise": 0.2, True: 0.7}
RECOMPUTED_NAMES: dict[Recompute, str] = {
    False: "",
    "pointwise": ", GELU and norms recomputed",
    True: ", activation checkpointing",
}
CALL = 1.0  # of one call of the model: kernel launches, small products
REDUCTION = 16.0  # of one reduction of the gradients over ranks, partly hidden


@dataclass(frozen=True)
class Profile:
    """Bytes that each sample of a micro-batch adds."""

    forward: float  # at the peak of a forward without a graph
    graph: float  # of the graph, between forward and backward
    building: float  # at the peak of a forward with a graph
    backward: float  # at the peak of the backward

    @property
    def peak(self) -> float:
        return max(self.building, self.backward)

    def deeper(self, more: "Profile", less: "Profile", num_blocks: int) -> "Profile":
        """The profile of a model with `num_blocks` more blocks. `more` has one block more than
        `less`: the difference is a block's.

        A forward without a graph needs no more memory, because no block's activations stay.
        """
        return Profile(
            forward=max(self.forward, more.forward),
            graph=self.graph + num_blocks * (more.graph - less.graph),
            building=self.building + num_blocks * (more.building - less.building),
            backward=self.backward + num_blocks * (more.backward - less.backward),
        )

    def bytes_for(self, plan: BatchPlan) -> float:
        """Bytes at the peak of a step: all retained graphs, and one micro-batch being computed."""
        others = min(plan.kept_graphs - 1, plan.accum_steps - 1) * plan.micro_size
        return others * self.graph + plan.micro_size * max(self.peak, self.forward)


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs, estimated."""

    parameters: float
    gradients: float
    optimizer: float  # fp32 master weights and moments; 0 if they are offloaded
    buffers: float  # of the engine: gradients and parameters in communication
    # the batch, the gathered features, their gradients, memory banks, and two tiles of logits
    features: float = 0.0
    activations: float = 0.0  # of the retained graphs, and of the micro-batch being computed

    @property
    def total(self) -> float:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.buffers
            + self.features
            + self.activations
        )


@dataclass(frozen=True)
class Room:
    """The memory that the planner has, the same on each rank."""

    limit: float  # bytes
    fixed: float  # bytes that do not depend on the micro-batch
    reduces_often: bool = False  # each of the k backwards reduces the gradients over ranks


@dataclass(frozen=True)
class StepLayout:
    """One way to compute a step."""

    plan: BatchPlan
    activation_checkpointing: Recompute
    profile: Profile  # of this activation checkpointing
    room: Room

    @property
    def bytes(self) -> float:
        """Bytes on one rank at the peak."""
        return self.room.fixed + self.profile.bytes_for(self.plan)

    @property
    def forwards_per_sample(self) -> float:
        return self.plan.forwards_per_sample + RECOMPUTED[self.activation_checkpointing]

    @property
    def cost(self) -> float:
        """In forwards of one sample on one rank."""
        n, k = self.plan.per_rank, self.plan.accum_steps
        # forwards, backwards, and second forwards of micro-batches whose graph is not retained
        calls = k + k + (k - min(self.plan.kept_graphs, k))
        reductions = k - 1 if self.room.reduces_often else 0
        return n * (self.forwards_per_sample + BACKWARD) + CALL * calls + REDUCTION * reductions

    def describe(self) -> str:
        plan, profile = self.plan, self.profile
        recomputed = RECOMPUTED_NAMES[self.activation_checkpointing]
        return (
            f"{plan.accum_steps} micro-batches of {plan.micro_size}, {plan.kept_graphs} graphs "
            f"kept{recomputed}: {self.forwards_per_sample:.2f} forwards per sample, the least work that "
            f"fits. Memory per rank: {gib(self.bytes)} of {gib(self.room.limit)}, "
            f"{gib(self.room.fixed)} of it fixed. Memory per sample: {gib(profile.graph)} with "
            f"its graph, {gib(profile.forward)} without, {gib(profile.peak)} at the peak"
        )


def cheapest_layout(
    global_size: int,
    world_size: int,
    room: Room,
    profiles: dict[Recompute, Profile],
    *,
    micro_size: int | None = None,
    kept_graphs: int | None = None,
) -> StepLayout:
    """The cheapest layout that fits, or the smallest of equally cheap ones. UserError: none fits.

    profiles: by activation checkpointing; each of its keys is tried. micro_size, kept_graphs: None
    allows any. Without a micro_size, only sizes that divide the samples equally (up to one sample)
    are tried.
    """
    n = -(-global_size // world_size)
    if micro_size is None:
        sizes = sorted({-(-n // k) for k in range(1, n + 1)})
    else:
        sizes = [min(micro_size, n)]
    layouts: list[StepLayout] = []
    for b, (checkpointing, profile) in itertools.product(sizes, profiles.items()):
        one_graph = StepLayout(
            BatchPlan(global_size, world_size, b, 1), checkpointing, profile, room
        )
        k = one_graph.plan.accum_steps
        if checkpointing is True and (micro_size is None or kept_graphs is not None):
            # recomputed blocks only with all graphs retained: a second forward would repeat them
            counts = {k} if kept_graphs is None or kept_graphs >= k else set()
        elif kept_graphs is not None:
            counts = {min(kept_graphs, k)}
        else:  # one graph, and as many as fit: more graphs are always faster
            others = (room.limit - one_graph.bytes) // (b * max(profile.graph, 1.0))
            counts = {1, max(1, min(k, 1 + int(others)))}
        for m in counts:
            layouts.append(replace(one_graph, plan=replace(one_graph.plan, kept_graphs=m)))
    fitting = [layout for layout in layouts if layout.bytes <= room.limit]
    if not fitting:
        least = min((layout.bytes for layout in layouts), default=room.fixed)
        raise UserError(
            f"batch.micro_size, batch.kept_graphs: nothing fits into {gib(room.limit)} per rank. "
            f"A step needs at least {gib(least)}, of which {gib(room.fixed)} are weights, "
            "gradients, optimizer state and features. "
            "Raise batch.memory_limit, or use more ranks, a higher engine.zero_stage, "
            "engine.activation_checkpointing=auto, or a smaller batch.global_size"
        )
    return min(fitting, key=lambda layout: (layout.cost, layout.bytes))


def gib(size: float) -> str:
    """Format a size with three digits and a suitable unit."""
    return f"{size / GIB:.3g} GiB" if size >= GIB else f"{size / 2**20:.3g} MiB"
