"""The engines: `ENGINES` names a class for each `engine.kind`, behind the interface `EngineKind`.

`clip_train.engines.base.Engine` is the interface of an engine that has been built.
"""

from __future__ import annotations

import abc
import importlib
import os
import pkgutil
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from clip_train.engines.config import EngineConfig
from clip_train.settings import broken, is_installed

if TYPE_CHECKING:  # a recipe is read without torch
    import torch
    from torch import nn

    from clip_train.batch import BatchPlan
    from clip_train.engines.base import Engine
    from clip_train.engines.traffic import Collective, Shapes
    from clip_train.memory.plan import Memory

MakeOptimizer: TypeAlias = "Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]"

ENGINES = {
    "deepspeed": "clip_train.engines.deepspeed:DeepSpeedKind",
    "fsdp": "clip_train.engines.fsdp:FSDPKind",
    "plain": "clip_train.engines.plain:PlainKind",
}
"""`engine.kind` -> module:class, imported when it is first asked for."""


@dataclass(frozen=True)
class Facts:
    """Facts that an engine's rules need in addition to the `engine` section."""

    world_size: int
    micro_size: int = 1
    grad_clip_norm: float | None = None
    # its name, and what its update needs (`clip_train.optim`)
    optimizer: tuple[str, str] = ("adamw", "elements")


class EngineKind(abc.ABC):
    """The launcher's view of an engine, before it is built."""

    name: str  # of its sharding, such as "ZeRO"; of the engine, if it does not shard
    sharded: bool = True
    module: str
    """Has `build_engine(config, make_model, make_optimizer, device, facts) -> Engine`, collective.
    Only this module imports the library of the engine."""

    @abc.abstractmethod
    def mistakes(self, config: EngineConfig, facts: Facts) -> list[str]:
        """Reasons why this recipe cannot run. Each message has the field, the value and the
        remedy."""

    @abc.abstractmethod
    def memory(
        self, config: EngineConfig, P: int, trained: int, moment_bytes: float, world_size: int
    ) -> Memory:
        """Bytes on one rank for a model of P parameters, without activations.

        trained: how many of the P are trained. moment_bytes: the optimizer's, for each of those.
        """

    @abc.abstractmethod
    def traffic(
        self, config: EngineConfig, plan: BatchPlan, shapes: Shapes
    ) -> Iterator[Collective]:
        """The collectives of each rank in a step, for parameters and gradients.

        The list may include calls that are not made: with one rank, no elements, or zero times.
        """


@cache
def find_engine(kind: str) -> EngineKind:
    """kind: a key of `ENGINES`, or module:class."""
    return pkgutil.resolve_name(ENGINES.get(kind, kind))()


def describe(config: EngineConfig | Mapping[str, Any]) -> str:
    """A short description of how the model is sharded. config: an engine section, also from a
    checkpoint."""
    section = config.model_dump() if isinstance(config, EngineConfig) else config
    groups = f" in groups of {section['shard_ranks']}" if section.get("shard_ranks") else ""
    kind = find_engine(section.get("kind", "deepspeed"))  # the default of early checkpoints
    if not kind.sharded:
        return kind.name
    return f"{kind.name} {section.get('zero_stage')}{groups}"


def on_this_machine(config: EngineConfig, world_size: int, per_node: int = 8) -> EngineConfig:
    """The section with values for `auto`, for this many ranks, `per_node` on each node, with
    devices like this machine's."""
    import torch

    if not torch.cuda.is_available():
        return config.on(bf16=False)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    triton = is_installed("triton") and torch.cuda.get_device_capability() >= (7, 0)
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")  # for the launchers of its kernels
    compiles = triton and any(map(shutil.which, compilers))
    return config.on(bf16, world_size, per_node, compiles)


def mistakes_here(config: EngineConfig) -> list[str]:
    """What this machine lacks for the section. config: with values for `auto`."""
    import torch

    from clip_train.engines import linear

    gpu = torch.cuda.is_available()
    no_fp16 = (
        config.precision == "fp16" and not gpu and not computes_fp16(),
        "engine.precision (fp16) needs a GPU, or a CPU with AVX512-FP16 or AMX-FP16, and this CPU "
        "has neither: set engine.precision=bf16 or fp32",
    )
    return [*linear.mistakes_here(config), *broken([no_fp16])]


def computes_fp16() -> bool:
    """Whether this CPU does, as DeepSpeed asks."""
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):  # torch without oneDNN
        return False


def build(
    config: EngineConfig,
    make_model: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    *,
    device: torch.device,
    grad_clip_norm: float | None = None,
    micro_size: int = 1,
) -> Engine:
    """The engine that `config.kind` names, around `make_model()`, on every rank.

    The weights are those drawn by `make_model`, or undefined; `load_fragments` sets them. UserError
    for a model that the engine cannot hold.
    """
    import torch

    from clip_train import dist
    from clip_train.engines.compile import towers_without_units

    W = dist.world_size()
    config = on_this_machine(config, W) if device.type == "cuda" else config.on(bf16=False)
    tf32 = config.matmul == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32  # convolutions: torch's own default is TF32
    if config.deterministic:  # inductor's choices too
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        # no empty tensors are filled, which finds bugs and costs time
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    facts = Facts(W, micro_size, grad_clip_norm)
    module = importlib.import_module(find_engine(config.kind).module)
    engine: Engine = module.build_engine(config, make_model, make_optimizer, device, facts)
    effects = [
        *(["one unit of FSDP's"] if config.kind == "fsdp" and config.zero_stage > 0 else []),
        *(["not compiled"] if config.compile else []),
    ]
    if effects:
        engine.notes = [
            f"no blocks repeat in the {tower} tower ({count:,} parameters): it is "
            f"{' and '.join(effects)}"
            for tower, count in towers_without_units(engine.module, engine.task).items()
        ]
    return engine
