"""The engines: `plain`, `fsdp` and `deepspeed`, each a package.

A package has what is known of its engine before it is built, and builds it. `EngineConfig.package`
picks it. `base.Engine` is the interface of an engine that has been built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:  # a recipe is read without torch
    import torch
    from torch import nn

    from clip_train.batch import BatchPlan
    from clip_train.engines.base import Engine
    from clip_train.engines.config import EngineConfig
    from clip_train.engines.traffic import Collective, Shapes
    from clip_train.memory.plan import Memory
    from clip_train.optim.config import OptimConfig

MakeOptimizer: TypeAlias = "Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]"


class EnginePackage(Protocol):
    """The functions of each engine's package. Only `build` imports the engine's library."""

    def mistakes(
        self, config: EngineConfig, optim: OptimConfig, *, world_size: int, micro_size: int = 1
    ) -> list[str]:
        """Reasons why this recipe cannot run. Each message has the field, the value and the
        remedy. UserError for an `optim.name` that is not the import path of an optimizer."""

    def memory(
        self, config: EngineConfig, P: int, trained: int, moment_bytes: float, world_size: int
    ) -> Memory:
        """Bytes on one rank for a model of P parameters, without activations.

        trained: how many of the P are trained. moment_bytes: the optimizer's, for each of those.
        """

    def traffic(
        self, config: EngineConfig, plan: BatchPlan, shapes: Shapes
    ) -> Iterator[Collective]:
        """The collectives of each rank in a step, for parameters and gradients.

        The list may include calls that are not made: with one rank, no elements, or zero times.
        """

    def build(
        self,
        config: EngineConfig,
        make_model: Callable[[], nn.Module],
        make_optimizer: MakeOptimizer,
        *,
        device: torch.device,
        grad_clip_norm: float | None,
        micro_size: int,
    ) -> Engine:
        """As `EngineConfig.build`, which has set torch's precision."""
