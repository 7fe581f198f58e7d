"""The engines, a package each. What all else knows of one is what `Package` lists; which one it is says engine.kind."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from launcher.doctor.findings import Check
from launcher.engines.config import EngineConfig

if TYPE_CHECKING:  # a recipe is read without torch
    import torch
    from torch import nn

    from clip_train.protocols import Engine

MakeOptimizer: TypeAlias = "Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]"


@dataclass(frozen=True)
class Terms:
    """Bytes on one rank that do not depend on the micro-batch, of a model of P parameters."""

    parameters: float
    gradients: float
    optimizer: float  # fp32 master weights and moments; 0 where they are offloaded
    buffers: float  # of the engine: gradients and parameters on their way
    sums_fp32: bool  # micro-batches' gradients, where they are reduced once: as exact as in each backward


@dataclass(frozen=True)
class Facts:
    """What an engine's own rules look at beside its section."""

    world_size: int
    micro_size: int = 1
    grad_clip_norm: float | None = None
    several_graphs: bool = False  # a step may have more than one micro-batch
    on_this_machine: bool = False  # this process is a rank, so its devices have to do


class Package(Protocol):
    """The six things that `launcher.engines.<kind>` exports. None imports the engine itself before `build`."""

    def mistakes(self, config: EngineConfig, facts: Facts) -> Iterator[str]:
        """What this engine refuses, each with field, value and remedy."""
        ...

    def build(
        self,
        config: EngineConfig,
        make_model: Callable[[], nn.Module],
        make_optimizer: MakeOptimizer,
        *,
        device: torch.device,
        facts: Facts,
    ) -> Engine:
        """On every rank. The weights are what `make_model` drew, or garbage: `load_fragments` sets them."""
        ...

    def memory(self, config: EngineConfig, P: int, moment_bytes: int, world_size: int) -> Terms: ...

    def describe(self, config: EngineConfig | Mapping[str, Any]) -> str:
        """How the model is held, in two words; also of an engine section as a checkpoint has it."""
        ...

    def artifacts(self, config: EngineConfig, facts: Facts) -> dict[str, str]:
        """Files for the run directory: name -> text."""
        ...

    def doctor_checks(self) -> tuple[tuple[str, Check], ...]: ...


def package(kind: str) -> Package:
    return cast(Package, importlib.import_module(f"launcher.engines.{kind}"))


def describe(section: Mapping[str, Any]) -> str:
    """How the model was held, of an engine section as a checkpoint has it; the oldest do not name the engine."""
    return package(section.get("kind", EngineConfig().kind)).describe(section)


def load(kind: str) -> None:
    """Import what the engine needs, which takes seconds."""
    importlib.import_module(f"launcher.engines.{kind}.engine")


def build(
    config: EngineConfig,
    make_model: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    *,
    device: torch.device,
    grad_clip_norm: float | None = None,
    micro_size: int = 1,
) -> Engine:
    """The engine that `config.kind` names, around `make_model()`."""
    from clip_train import dist

    facts = Facts(dist.world_size(), micro_size, grad_clip_norm)
    return package(config.kind).build(config, make_model, make_optimizer, device=device, facts=facts)
