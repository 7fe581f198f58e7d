"""Choose micro-batch size and retained graphs: the least work among the layouts that fit into
memory. A run and `clip-train plan` use the same function. `n` samples on a rank go through the
model in `k` micro-batches of `b`, the graphs of the last `m` are retained.
"""

import itertools
from dataclasses import astuple, dataclass, replace

from clip_train.batch import BatchPlan
from clip_train.errors import UserError
from clip_train.settings import Recompute

GIB = 2**30
BACKWARD = 2.0  # forwards that a backward costs
# Forwards by activation checkpointing. Whole blocks: each block's last product is not needed again.
# Pointwise: GELU and the norms move as many bytes as a fifth of a forward's time.
RECOMPUTED: dict[Recompute, float] = {False: 0.0, "pointwise": 0.2, True: 0.7}
RECOMPUTED_NAMES: dict[Recompute, str] = {
    False: "",
    "pointwise": ", GELU and norms recomputed",
    True: ", activation checkpointing",
}
CALL = 1.0  # a call of the model costs about as much as one more sample: launches, small products
# and one more reduction of the gradients over ranks, partly hidden, about as 16 samples
REDUCTION = 16.0


@dataclass(frozen=True)
class Profile:
    """Bytes that one more sample needs: the difference between two sizes of micro-batch."""

    forward: float  # at the highest point of a forward without a graph
    graph: float  # held between forward and backward
    building: float  # at the highest point of a forward with a graph
    backward: float  # at the highest point of its backward

    @property
    def peak(self) -> float:
        return max(self.building, self.backward)

    def deeper(self, more: "Profile", less: "Profile", times: int) -> "Profile":
        """With `times` more blocks. `more` has one block more than `less`.

        Without a graph no block is held.
        """
        each = zip(astuple(self)[1:], astuple(more)[1:], astuple(less)[1:], strict=True)
        return Profile(
            max(self.forward, more.forward), *(here + times * (b - a) for here, b, a in each)
        )

    def bytes_for(self, plan: BatchPlan) -> float:
        """At the peak of a step: all retained graphs, and one micro-batch being computed."""
        others = min(plan.kept_graphs - 1, plan.accum_steps - 1) * plan.micro_size
        return others * self.graph + plan.micro_size * max(self.peak, self.forward)


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs, estimated."""

    parameters: float
    gradients: float
    optimizer: float  # fp32 master weights and moments; 0 where they are offloaded
    buffers: float  # of the engine: gradients and parameters on their way
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
    reduces_often: bool = False  # gradients over ranks in each of the k backwards


@dataclass(frozen=True)
class Layout:
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
        # forwards, backwards, and forwards again
        calls = k + k + (k - min(self.plan.kept_graphs, k))
        reductions = k - 1 if self.room.reduces_often else 0
        return n * (self.forwards_per_sample + BACKWARD) + CALL * calls + REDUCTION * reductions

    def describe(self) -> str:
        plan, profile = self.plan, self.profile
        more = RECOMPUTED_NAMES[self.activation_checkpointing]
        return (
            f"{plan.accum_steps} micro-batches of {plan.micro_size}, {plan.kept_graphs} graphs "
            f"kept{more}: {self.forwards_per_sample:.2f} forwards per sample, the least work that "
            f"fits. Memory per rank: {gib(self.bytes)} of {gib(self.room.limit)}, "
            f"{gib(self.room.fixed)} of it fixed. Memory per sample: {gib(profile.graph)} with "
            f"its graph, {gib(profile.forward)} without, {gib(profile.peak)} at the peak"
        )


def choose(
    global_size: int,
    world_size: int,
    room: Room,
    profiles: dict[Recompute, Profile],
    *,
    micro_size: int | None = None,
    kept_graphs: int | None = None,
) -> Layout:
    """The cheapest layout that fits, or the smallest of equally cheap ones. UserError: none fits.

    `profiles`: activation checkpointing -> Profile. None allows any number. Micro-batches of equal
    size only (up to one sample), unless a size is given.
    """
    n = -(-global_size // world_size)
    layouts = []
    sizes = (
        sorted({-(-n // k) for k in range(1, n + 1)})
        if micro_size is None
        else [min(micro_size, n)]
    )
    for b, (checkpointing, profile) in itertools.product(sizes, profiles.items()):
        one = Layout(BatchPlan(global_size, world_size, b, 1), checkpointing, profile, room)
        k = one.plan.accum_steps
        # with all graphs retained, the cache would only repeat their forward
        if checkpointing is True and (micro_size is None or kept_graphs is not None):
            counts = {k} if kept_graphs is None or kept_graphs >= k else set()
        elif kept_graphs is not None:
            counts = {min(kept_graphs, k)}
        else:  # more graphs are always faster: one, and the most that fit
            beside = (room.limit - one.bytes) // (b * max(profile.graph, 1.0))
            counts = {1, max(1, min(k, 1 + int(beside)))}
        layouts += [replace(one, plan=replace(one.plan, kept_graphs=m)) for m in counts]
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
