"""How a run is cut to the memory that there is: what is fixed, what a sample needs, what `auto` becomes.

`decide` is one function for `clip-train plan`, which knows sizes only (fake tensors), and for `clip-train
train`, which asks it before the engine is built and again with what the engine's own forwards took.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from clip_train import dist
from clip_train.batch import BatchPlan, parse_bytes
from clip_train.contrastive.tiles import GPU_SIDE
from clip_train.errors import UserError
from clip_train.memory import Layout, Profile, Room, choose, gib
from clip_train.models.clip import CLIP, count_parameters
from clip_train.models.config import Architecture
from clip_train.probe import fake_profile, real_profile
from clip_train.protocols import Engine, MicroBatch
from launcher.config.recipe import RunConfig
from launcher.engines import Terms, package
from launcher.engines.config import EngineConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GPU_MARGIN = 0.1  # of what is free: fragments, libraries' workspaces


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs, estimated."""

    parameters: float  # a teacher's included, which no stage divides
    gradients: float
    optimizer: float  # fp32 master weights and moments, on the CPU if offloaded
    activations: float  # of the retained graphs, and of the micro-batch at work
    buffers: float  # of the engine: gradients and parameters on their way
    features: float  # the batch, the gathered features, their gradients, memory banks, and two tiles of logits

    @property
    def fixed(self) -> float:
        """Whatever the micro-batch."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.features

    @property
    def total(self) -> float:
        return self.fixed + self.activations


def estimate_memory(
    config: RunConfig, engine: EngineConfig, plan: BatchPlan, architecture: Architecture, profile: Profile | None
) -> Memory:
    """From the sizes alone. `engine`: the recipe's, without `auto`."""
    teacher = config.model.teacher_architecture()
    held = engine_terms(config, engine, plan.world_size, architecture)
    sample = 3 * architecture.vision_cfg.image_size**2 + 8 * architecture.text_cfg.context_length
    return Memory(
        parameters=held.parameters + (DTYPES[engine.precision].itemsize * count_parameters(teacher) if teacher else 0),
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=profile.bytes_for(plan) if profile else 0.0,
        buffers=held.buffers,
        features=4 * architecture.embed_dim * (2 * plan.global_size + 4 * plan.per_rank + 2 * banked(config))
        + 8
        * min(GPU_SIDE if config.loss.tile == "auto" else config.loss.tile, plan.global_size)
        ** 2  # on whatever it will run, at most
        + sample * plan.per_rank,
    )


def engine_terms(config: RunConfig, engine: EngineConfig, world_size: int, architecture: Architecture) -> Terms:
    moment_bytes = 8 if config.optim.name == "adamw" else 4 if config.optim.momentum else 0
    return package(engine.kind).memory(engine, count_parameters(architecture), moment_bytes, world_size)


def banked(config: RunConfig) -> int:
    """Pairs in the memory banks, which every rank holds."""
    return config.loss.bank_size if config.loss.kind == "memory_bank" else 0


def micro_batch(architecture: Architecture, device: torch.device, size: int) -> MicroBatch:
    """Any one of that size."""
    side, length = architecture.vision_cfg.image_size, architecture.text_cfg.context_length
    return MicroBatch(
        torch.zeros(size, 3, side, side, dtype=torch.uint8, device=device),
        torch.zeros(size, length, dtype=torch.int64, device=device),
        torch.arange(size, device=device),
    )


SHALLOW = 3  # blocks of a tower; every further one takes as much as the third


@cache
def _profile(architecture_json: str, precision: str, dropout: float, checkpointing: bool) -> Profile:
    """Of shallow towers, and what one block more takes of either: fake blocks of a large model take half a minute."""
    architecture = Architecture.model_validate_json(architecture_json)
    sections: dict[str, Any] = {"vision_cfg": architecture.vision_cfg, "text_cfg": architecture.text_cfg}
    base: dict[str, Any] = {
        name: section.model_copy(update={"layers": min(section.layers, SHALLOW)}) for name, section in sections.items()
    }

    def profile(more: dict[str, Any]) -> Profile:
        return _full_profile(architecture.model_copy(update=base | more), precision, dropout, checkpointing)

    total = shallow = profile({})
    for name, section in sections.items():
        if section.layers > SHALLOW:
            deeper = profile({name: section.model_copy(update={"layers": SHALLOW + 1})})
            total = total.plus(deeper, shallow, section.layers - SHALLOW)
    return total


def _full_profile(architecture: Architecture, precision: str, dropout: float, checkpointing: bool) -> Profile:
    """By fake tensors."""

    def make_model() -> CLIP:
        usual = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES[precision])
        try:
            return CLIP(architecture, dropout=dropout, activation_checkpointing=checkpointing)
        finally:
            torch.set_default_dtype(usual)

    return fake_profile(make_model, partial(micro_batch, architecture, torch.device("cpu")))


def predicted_profile(config: RunConfig, architecture: Architecture, checkpointing: bool) -> Profile:
    """From fake tensors; with a teacher, its forward too."""
    precision = config.engine.precision
    own = _profile(architecture.model_dump_json(), precision, config.model.dropout, checkpointing)
    teacher = config.model.teacher_architecture()
    if teacher is None:
        return own
    return replace(own, forward=max(own.forward, _profile(teacher.model_dump_json(), precision, 0.0, False).forward))


@dataclass(frozen=True)
class Decision:
    """What `auto` has become, and what it was decided by."""

    layout: Layout
    room: Room
    profile: Profile  # of the chosen activation checkpointing
    engine: EngineConfig  # the recipe's, without `auto`

    def describe(self, chosen: list[str]) -> str:
        plan, profile, room = self.layout.plan, self.profile, self.room
        more = ", activation checkpointing" if self.layout.activation_checkpointing else ""
        if self.engine.zero_stage >= 2:
            more += f", gradients reduced {'once' if self.layout.reduce_once else 'in each backward'}"
        return (
            f"{', '.join(chosen)} = auto: {plan.accum_steps} micro-batches of {plan.micro_size}, "
            f"{plan.kept_graphs} graphs kept{more}: {self.layout.forwards_per_sample:.2f} forwards per sample, the "
            f"least work that fits: {gib(self.layout.bytes)} of {gib(room.limit)} a rank, "
            f"{gib(self.layout.bytes - plan_bytes(self))} fixed; a sample takes {gib(profile.graph)} with its graph, "
            f"{gib(profile.peak)} at its highest, {gib(profile.forward)} without a graph"
        )


def plan_bytes(decision: Decision) -> float:
    return decision.profile.bytes_for(decision.layout.plan)


def decide(
    config: RunConfig, architecture: Architecture, plan: BatchPlan, limit: float,
    *, measured: Profile | None = None, settled: EngineConfig | None = None, allocated: float = 0.0,
) -> Decision:  # fmt: skip
    """The layout of least work within `limit` bytes a rank; the numbers that the recipe gives stay as they are.

    measured: by the engine itself, which has been built as `settled` says; allocated: bytes that it holds.
    """
    engine, batch = settled or config.engine, config.batch
    wanted = engine.activation_checkpointing
    options = (False, True) if wanted == "auto" else (bool(wanted),)
    profiles = {on: measured or predicted_profile(config, architecture, on) for on in options}
    sharded = engine.model_copy(update={"activation_checkpointing": False, "reduce_gradients": "each_backward"})
    whole = sharded.model_copy(update={"reduce_gradients": "once"})
    each, once = (estimate_memory(config, e, plan, architecture, None).fixed for e in (sharded, whole))
    room = Room(
        limit,
        max(each, allocated),
        whole_gradient=once - each,
        reductions=_reductions(engine, engine_terms(config, whole, plan.world_size, architecture)),
        each_backward_costs=engine.zero_stage >= 2 and plan.world_size > 1,
    )
    kept = plan.per_rank if batch.kept_graphs == "all" else batch.kept_graphs
    layout = choose(
        plan.global_size,
        plan.world_size,
        room,
        profiles,
        micro_size=None if batch.micro_size == "auto" else batch.micro_size,
        kept_graphs=None if kept == "auto" else kept,
    )
    update = {
        "activation_checkpointing": layout.activation_checkpointing,
        "reduce_gradients": "once" if layout.reduce_once and engine.zero_stage >= 2 else "each_backward",
    }
    resolved = engine.model_copy(update=update)
    return Decision(layout, room, profiles[layout.activation_checkpointing], resolved)


def _reductions(engine: EngineConfig, terms: Terms) -> tuple[bool, ...]:
    if engine.zero_stage < 2:
        return (False,)  # they reduce once by themselves
    if engine.reduce_gradients == "auto":
        return (True, False) if terms.sums_fp32 else (False,)
    return (engine.reduce_gradients == "once",)


def memory_limit(config: RunConfig, device: torch.device | None) -> float:
    """Bytes a rank may use: the recipe's, else the free ones of `device`, the least of all ranks. UserError.

    device None: nobody may look at one.
    """
    if config.batch.memory_limit is not None:
        return float(parse_bytes(config.batch.memory_limit))
    if device is None or device.type != "cuda":
        raise UserError(no_limit(config))
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return -dist.max_scalar(-free * (1 - GPU_MARGIN))


def no_limit(config: RunConfig) -> str:
    return (
        f"{', '.join(config.chosen)} = auto needs batch.memory_limit where no GPU is looked at: "
        "the bytes one rank may use, such as batch.memory_limit=8GiB (for a GPU, about 0.9 of its memory)"
    )


def measure(config: RunConfig, architecture: Architecture, engine: Engine, first: Decision, limit: float) -> Decision:
    """The decision again, with what the engine's own forwards take on its device; on all ranks alike."""
    where = engine.device
    if where.type != "cuda" and config.engine.compile:
        return first  # compiled code makes its tensors out of the counter's sight
    seen = real_profile(engine, partial(micro_batch, architecture, where), first.profile)
    seen = Profile(*(dist.max_scalar(value) for value in (seen.forward, seen.graph, seen.peak)))
    seen = replace(seen, forward=max(seen.forward, first.profile.forward))
    allocated = dist.max_scalar(torch.cuda.memory_allocated(where)) if where.type == "cuda" else 0.0
    plan = first.layout.plan
    return decide(config, architecture, plan, limit, measured=seen, settled=first.engine, allocated=allocated)
