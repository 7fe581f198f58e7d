"""The engines, a package each: `launcher.engines.<kind>`, of which engine.kind names one. All else knows these names:

    NAME                                            the way to hold a model, in a word: "ZeRO"
    CHECKS                                          what `clip-train doctor` looks at for it
    mistakes(config, facts) -> Iterator[str]        what it refuses, each with field, value and remedy
    mistakes_here(config) -> Iterator[str]          what this machine's devices cannot do
    memory(config, P, trained, moment_bytes, world_size)
                                                    bytes on one rank of a model of P parameters, as `Memory`
    sums_fp32(config) -> bool                       is a gradient that is reduced once as exact as one of each backward?
    artifacts(config, facts) -> dict[str, str]      files for the run directory: name -> text
    engine.build_engine(config, make_model, make_optimizer, device, facts) -> Engine

Nothing but the module `engine` imports what holds the model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from launcher.engines.config import EngineConfig

if TYPE_CHECKING:  # a recipe is read without torch
    import torch
    from torch import nn

    from clip_train.engine import Engine

MakeOptimizer: TypeAlias = "Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]"


KINDS: tuple[str, ...] = get_args(EngineConfig.model_fields["kind"].annotation)


@dataclass(frozen=True)
class Facts:
    """What an engine's own rules look at beside its section."""

    world_size: int
    micro_size: int = 1
    grad_clip_norm: float | None = None
    optimizer: tuple[str, str] = (
        "adamw",
        "elements",
    )  # its name, and what its update needs (`clip_train.optim`)


def package(kind: str) -> ModuleType:
    return importlib.import_module(f"launcher.engines.{kind}")


def describe(config: EngineConfig | Mapping[str, Any]) -> str:
    """How the model is held, in few words; also of an engine section as a checkpoint has it."""
    section = config.model_dump() if isinstance(config, EngineConfig) else config
    groups = f" in groups of {section['shard_ranks']}" if section.get("shard_ranks") else ""
    return f"{package(section.get('kind', EngineConfig().kind)).NAME} {section.get('zero_stage')}{groups}"


def on_this_machine(config: EngineConfig) -> EngineConfig:
    """With the precision that `auto` is on the devices seen here."""
    import torch

    return config.on(
        torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    )


def build(
    config: EngineConfig,
    make_model: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    *,
    device: torch.device,
    grad_clip_norm: float | None = None,
    micro_size: int = 1,
) -> Engine:
    """The engine that `config.kind` names, around `make_model()`, on every rank. UserError for what it cannot hold.

    The weights are what `make_model` drew, or garbage: `load_fragments` sets them.
    """
    import torch

    from clip_train import dist

    config = on_this_machine(config) if device.type == "cuda" else config.on(False)
    torch.set_float32_matmul_precision("high" if config.matmul == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = (
        config.matmul == "tf32"
    )  # convolutions: torch would, whatever is said of products
    facts = Facts(dist.world_size(), micro_size, grad_clip_norm)
    return package(f"{config.kind}.engine").build_engine(
        config, make_model, make_optimizer, device, facts
    )
