"""torch alone, without sharding, as an engine: its limits and its memory.

`engine` has the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from clip_train.batch import BatchPlan
from clip_train.engines.traffic import Collective, Shapes
from clip_train.memory.plan import Memory
from clip_train.settings import broken

if TYPE_CHECKING:
    import torch
    from torch import nn

    from clip_train.engines import MakeOptimizer
    from clip_train.engines.base import Engine
    from clip_train.engines.config import EngineConfig
    from clip_train.optim.config import OptimConfig


def mistakes(
    config: EngineConfig, optim: OptimConfig, *, world_size: int, micro_size: int = 1
) -> list[str]:
    W = world_size
    return broken(
        [
            (
                config.zero_stage > 0 and W > 1,
                f"engine.kind (plain) shards nothing, but engine.zero_stage is "
                f"{config.zero_stage} on {W} ranks: set engine.zero_stage=0, or "
                "engine.kind=fsdp",
            ),
            (
                config.precision == "fp16",
                "engine.precision (fp16) has no loss scaling with engine.kind=plain: use "
                "engine.precision=bf16, or engine.kind=deepspeed",
            ),
            (
                config.offload != "none",
                f"engine.offload ({config.offload}) is not supported by engine.kind=plain: set "
                "engine.offload=none, or engine.kind=fsdp",
            ),
            (
                config.reduce_dtype == "bf16" and W > 1,
                "engine.reduce_dtype (bf16) is not supported by engine.kind=plain, which sums "
                "gradients in fp32: set engine.reduce_dtype=fp32, or engine.kind=deepspeed",
            ),
            (
                config.shard_ranks not in (None, 1),
                f"engine.shard_ranks ({config.shard_ranks}) needs an engine that shards: set "
                "engine.kind=fsdp, or engine.shard_ranks=null",
            ),
            (
                config.ds_config is not None,
                f"engine.ds_config ({config.ds_config}) does not apply to engine.kind=plain: "
                "remove it, or set engine.kind=deepspeed",
            ),
        ]
    )


def memory(
    config: EngineConfig, P: int, trained: int, moment_bytes: float, world_size: int
) -> Memory:
    """In bf16: copies of all parameters, and masters of those that are trained.

    The fp32 sums of gradients are held from step to step. In bf16 the gradients of one backward
    are held beside them. Masters of frozen parameters are in the CPU's memory.
    """
    low_precision = config.precision == "bf16"
    return Memory(
        parameters=2.0 * P if low_precision else 4.0 * P,
        gradients=4.0 * trained + (2.0 * trained if low_precision else 0.0),
        optimizer=(4.0 * trained if low_precision else 0.0) + moment_bytes * trained,
        buffers=0.0,
    )


def traffic(config: EngineConfig, plan: BatchPlan, shapes: Shapes) -> Iterator[Collective]:
    """One sum for each of the optimizer's groups, after the last backward."""
    for elements in shapes.flat:
        yield Collective("step", "all_reduce", "fp32", elements, plan.world_size)


def build(
    config: EngineConfig,
    make_model: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    *,
    device: torch.device,
    grad_clip_norm: float | None,
    micro_size: int,
) -> Engine:
    from clip_train.engines.plain.engine import build_engine

    return build_engine(
        config,
        make_model,
        make_optimizer,
        device=device,
        grad_clip_norm=grad_clip_norm,
    )
