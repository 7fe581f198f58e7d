"""Which micro-batch of `contrastive_step` fits into memory, measured: see docs/library.md."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clip_train import dist
from clip_train.batch import BatchPlan
from clip_train.cutting import SplitBy
from clip_train.library import Call, MicroSize, ModuleEngine
from clip_train.memory.plan import Profile, Room, cheapest_layout, gib
from clip_train.memory.probe import LiveBytes
from clip_train.models.batch_norm import collect_updates
from clip_train.settings import Recompute
from clip_train.step import restore_rng, rng_state
from clip_train.task import Features, Objective, is_scalar
from clip_train.torch_internals import discard_unreduced, tree_leaves

# of the free memory: fragments, workspaces of libraries
GPU_MARGIN = 0.1


@dataclass(frozen=True)
class ChunkMemory:
    """What a micro-batch costs: of a tower, or of the whole model."""

    profile: Profile  # bytes of each sample
    constant: float  # bytes of any micro-batch: gradients of a layer before they are added
    flops: float  # of a forward pass, of each sample

    def __str__(self) -> str:
        return (
            f"{gib(self.profile.peak)} at the peak, {gib(self.profile.graph)} for a kept graph, "
            f"{gib(self.profile.forward)} without a graph; {self.flops / 1e9:.3g} GFLOPs forward"
        )


@dataclass(frozen=True)
class StepMemory:
    """The memory that `contrastive_step` needs on this rank, beside the model, its inputs and the
    state of the optimizer. Bytes. `print` shows it.
    """

    limit: float
    samples: int  # n, of this rank
    gradients: float  # of the parameters, and what else a wrapper keeps from chunk to chunk
    features: float  # of all samples, twice: by chunk and joined
    loss: float  # at the peak of the loss, with the gradients of the features
    chunks: Mapping[str, ChunkMemory]  # by tower; the whole model's name is ""
    # The largest that fits and cuts the samples evenly, for `contrastive_step`; 0: none fits. By
    # tower with `by_tower`. The same on all ranks.
    micro_size: int | dict[str, int] = 0
    kept_graphs: int = 1

    @property
    def fixed_bytes(self) -> float:
        """That do not depend on the size of a micro-batch."""
        constant = max(chunk.constant for chunk in self.chunks.values())
        return self.gradients + self.features + self.loss + constant

    @property
    def bytes_per_sample(self) -> float | dict[str, float]:
        """Of a micro-batch, at the peak. By tower with `by_tower`."""
        by_tower = {name: chunk.profile.peak for name, chunk in self.chunks.items()}
        return by_tower.get("", by_tower)

    def bytes_for(self, micro_size: int | Mapping[str, int], kept_graphs: int = 1) -> float:
        """Of a step."""
        sizes = micro_size if isinstance(micro_size, Mapping) else {"": micro_size}
        activations = [
            self.chunks[name].profile.bytes_for(BatchPlan(self.samples, 1, size, kept_graphs))
            for name, size in sizes.items()
        ]
        return self.fixed_bytes + max(activations)

    def __str__(self) -> str:
        lines = [
            f"contrastive_step with {self.samples} samples on this rank, limit {gib(self.limit)}",
            f"fixed: {gib(self.fixed_bytes)}, of which gradients {gib(self.gradients)}, features "
            f"{gib(self.features)}, loss {gib(self.loss)}",
        ]
        for name, chunk in self.chunks.items():
            lines.append(f"each sample of a micro-batch{name and f' of {name}'}: {chunk}")
        if self.fits:
            total = self.bytes_for(self.micro_size, self.kept_graphs)
            lines.append(
                f"fits: micro_size={self.micro_size}, kept_graphs={self.kept_graphs}, which needs "
                f"{gib(total)}"
            )
        else:
            least = self.bytes_for(dict.fromkeys(self.chunks, 1), self.kept_graphs)
            lines.append(
                f"nothing fits: one sample in a micro-batch, kept_graphs={self.kept_graphs} needs "
                f"{gib(least)}"
            )
        return "\n".join(lines)

    @property
    def fits(self) -> bool:
        """Whether there is such a micro_size."""
        sizes = self.micro_size
        return min(sizes.values()) > 0 if isinstance(sizes, Mapping) else sizes > 0


def contrastive_memory(
    model: Callable[..., Any],
    *inputs: Any,
    limit: float | None = None,
    kept_graphs: int | None = 1,
    by_tower: bool = False,
    measured: tuple[int, int] = (4, 8),
    loss: Objective | Callable[..., Tensor] | None = None,
    ids: Tensor | Sequence[int] | None = None,
    shares: Sequence[int] | None = None,
    split_by: SplitBy | None = None,
    arguments: Mapping[str, Any] | None = None,
    **named: Any,
) -> StepMemory:
    """Measure what `contrastive_step` needs for these inputs, and the `micro_size` that fits.

    Runs two small micro-batches forward and backward, and the loss once over as many samples as the
    global batch has. Gradients, random numbers and running statistics are left as they were. The
    result is a sum over parts that need not meet, so a step usually takes a little less.

    All ranks call this together, with the arguments of `contrastive_step`, and these:

    Args:
        limit: bytes for the step, beside the model, its inputs and the state of the optimizer,
            which most optimizers make in their first step. None: on a CUDA device, nine tenths of
            what is free now.
        kept_graphs: None chooses it together with `micro_size`, for the least work.
        by_tower: measure a `micro_size` for each input, {"query": 64, "document": 8}; needs
            kept_graphs=1.
        measured: the samples of both micro-batches, which have to fit. They are the first ones: if
            samples differ in size, put the largest there.

    Memory is counted by CUDA's allocator, elsewhere by the tensors that torch's operators return.
    FLOPs are those of operators that torch's FlopCounterMode knows.

    Raises:
        ValueError: as of `contrastive_step`. No limit where there is no CUDA device. A ZeRO engine,
            whose gradients cannot be taken back.
    """
    micro_size: MicroSize = 1
    if by_tower:
        micro_size = dict.fromkeys(named, 1)
    call = Call.checked(
        model,
        inputs,
        named,
        micro_size=micro_size,
        loss=loss,
        ids=ids,
        shares=shares,
        scaler=None,
        split_by=split_by,
        arguments=arguments,
    )
    if by_tower and kept_graphs != 1:
        raise ValueError(f"kept_graphs ({kept_graphs}) must be 1 with by_tower")
    if hasattr(model, "coalesce_grad_reduction"):
        raise ValueError(
            f"model is {type(model).__name__}, whose gradients cannot be taken back: measure the "
            "module before it becomes an engine, and add what ZeRO needs"
        )
    n = call.size
    sizes = sorted(min(size, n) for size in measured)
    if sizes[0] < 1:
        raise ValueError(f"measured ({measured}) must be two numbers of samples, at least 1")
    parameters = call.parts.parameters
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    # so many micro-batches that none is the last, whose backward would reduce
    engine = call.engine(2**60, micro_size)
    if limit is None:
        limit = free_bytes(engine.device)
    random_state = rng_state(engine.device)
    try:
        with collect_updates():
            memory = Measurement(call, engine, micro_size, sizes).memory(limit)
    finally:
        restore_rng(random_state, engine.device)
        for module in engine.sharded:
            discard_unreduced(module)
            module.reshard()
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
    return fitted(memory, kept_graphs, engine.device)


def free_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        raise ValueError(f"limit: give the bytes for the step on {device}, such as 8 * 2**30")
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + unused) * (1 - GPU_MARGIN)


def fitted(memory: StepMemory, kept_graphs: int | None, device: torch.device) -> StepMemory:
    """With the largest micro_size that fits on all ranks."""
    room = Room(memory.limit, memory.fixed_bytes)
    chosen = []
    for name, chunk in memory.chunks.items():
        if memory.bytes_for({name: 1}, kept_graphs or 1) > memory.limit:
            chosen.append([0, kept_graphs or 1])
            continue
        profiles: dict[Recompute, Profile] = {False: chunk.profile}
        layout = cheapest_layout(memory.samples, 1, room, profiles, kept_graphs=kept_graphs)
        chosen.append([layout.plan.micro_size, layout.plan.kept_graphs])
    of_ranks = dist.all_gather(torch.tensor([chosen], device=device))  # [W, towers, 2]
    sizes, kept = of_ranks.amin(0).unbind(1)
    by_tower = dict(zip(memory.chunks, sizes.tolist(), strict=True))
    return replace(
        memory,
        micro_size=by_tower.get("", by_tower),
        kept_graphs=int(kept.min()),
    )


class AllocatedBytes:
    """As `LiveBytes`, by CUDA's allocator: what kernels need beside their results too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> "AllocatedBytes":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def start_phase(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    @property
    def highest(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


class Measurement:
    """Runs micro-batches and the loss, and reads the memory that they need."""

    def __init__(
        self, call: Call, engine: ModuleEngine, micro_size: MicroSize, sizes: Sequence[int]
    ) -> None:
        """sizes: samples of the two micro-batches."""
        self.call, self.engine = call, engine
        self.sizes = sizes
        self.towers: dict[str, set[Any]] = {"": {*call.by_key}}
        if isinstance(micro_size, Mapping):
            self.towers = {name: {name} for name in micro_size}
        self.meter: Any = LiveBytes(known_tensors(call))
        if engine.device.type == "cuda":
            self.meter = AllocatedBytes(engine.device)

    def memory(self, limit: float) -> StepMemory:
        flops, features = {}, {}
        # outside the meter, because the counter takes attention apart
        for name in self.towers:
            flops[name], features[name] = self.counted_forward(name)
        with self.meter:
            of_loss, gradients = self.loss(features)
            # the first backward makes the gradients of the parameters
            before = self.meter.live
            for name in self.towers:
                self.chunk(name, self.sizes[0], gradients)
            of_parameters = self.meter.live - before
            chunks = {}
            for name in self.towers:
                peaks = [self.chunk(name, size, gradients) for size in self.sizes]
                chunks[name] = through(self.sizes, peaks, flops[name])
        of_features = sum(nbytes(self.of_all(part)) for part in features.values())
        return StepMemory(
            limit=limit,
            samples=self.call.size,
            gradients=of_parameters,
            features=2 * of_features,
            loss=of_loss,
            chunks=chunks,
        )

    def counted_forward(self, name: str) -> tuple[float, Features]:
        """FLOPs of each sample, and the features of the smaller micro-batch."""
        size = self.sizes[0]
        counter = FlopCounterMode(display=False)
        micro_batch = self.call.cut(slice(0, size), self.towers[name])
        backends = [SDPBackend.MATH]
        if self.engine.device.type == "cuda":
            # whose operators torch can count
            backends += [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with torch.no_grad(), sdpa_kernel(backends), counter:
            features = self.engine.forward(micro_batch)
        return counter.get_total_flops() / size, features

    def of_all(self, features: Features) -> Features:
        """Features of all samples of this rank, which repeat those of a micro-batch."""
        size = self.sizes[0]
        rows = torch.arange(self.call.size, device=self.engine.device) % size
        return {
            name: x if is_scalar(x) else x.unflatten(0, (size, -1))[rows].flatten(0, 1)
            for name, x in features.items()
        }

    def loss(self, features: Mapping[str, Features]) -> tuple[float, set[str]]:
        """Bytes at the peak of the loss, and the names of the features that get a gradient."""
        joined: Features = {}
        for part in features.values():
            joined |= self.of_all(part)
        context = self.call.context(self.engine.device)
        before = self.meter.live
        self.meter.start_phase()
        output = self.call.objective(joined, context)
        return self.meter.highest - before, {*output.gradients}

    def chunk(self, name: str, size: int, with_gradient: set[str]) -> Profile:
        """The bytes of one micro-batch of a tower, in both passes."""
        micro_batch = self.call.cut(slice(0, size), self.towers[name])
        before = self.meter.live
        self.meter.start_phase()
        with torch.no_grad():
            self.engine.forward(micro_batch)
        forward = self.meter.highest - before
        self.meter.start_phase()
        features = self.engine.forward(micro_batch)
        graph, building = self.meter.live - before, self.meter.highest - before
        self.meter.start_phase()
        gradients = {key: torch.ones_like(x) for key, x in features.items() if key in with_gradient}
        self.engine.backward(features, gradients)
        return Profile(forward, graph, building, self.meter.highest - before)


def known_tensors(call: Call) -> list[Tensor]:
    """Tensors that exist before a step."""
    leaves = tree_leaves([*call.by_key.values()])
    tensors: list[Tensor] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    tensors += call.parts.parameters
    for module in call.parts.modules:
        tensors += module.buffers(recurse=False)
    return tensors


def nbytes(features: Features) -> int:
    return sum(x.nbytes for x in features.values())


def through(sizes: Sequence[int], peaks: Sequence[Profile], flops: float) -> ChunkMemory:
    """The line through two measured micro-batches."""

    def slope(values: Iterable[float]) -> float:
        less, more = values
        if sizes[0] == sizes[1]:
            return more / sizes[1]
        return max((more - less) / (sizes[1] - sizes[0]), 0.0)

    profile = Profile(
        forward=slope(p.forward for p in peaks),
        graph=slope(p.graph for p in peaks),
        building=slope(p.building for p in peaks),
        backward=slope(p.backward for p in peaks),
    )
    smaller = peaks[0]
    constant = max(
        smaller.building - sizes[0] * profile.building,
        smaller.backward - sizes[0] * profile.backward,
        0.0,
    )
    return ChunkMemory(profile, constant, flops)
