"""DeepSpeed's ZeRO as an engine: its limits and its memory.

`config` makes its JSON, `engine` has the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from clip_train.batch import BatchPlan
from clip_train.engines.deepspeed.config import build_ds_config, zero_number
from clip_train.engines.traffic import Collective, Shapes, rounded_up
from clip_train.errors import UserError
from clip_train.memory.plan import Memory
from clip_train.optim.optimizer import ALIGNED, needs
from clip_train.settings import broken
from clip_train.versions import installed, too_old

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
    stage = config.zero_stage
    rules = [
        (
            installed("deepspeed") is None,
            "engine.kind (deepspeed): DeepSpeed is not installed: pip install deepspeed, or "
            "set engine.kind=fsdp",
        ),
        (
            config.linear == "fp8" and stage == 3,
            "engine.linear (fp8) keeps whole weights from forward to backward, which "
            "DeepSpeed's engine.zero_stage 3 is meant to avoid: use engine.kind=fsdp, "
            "engine.linear=int8, or engine.zero_stage=2",
        ),
        (
            config.shard_ranks is not None,
            f"engine.shard_ranks ({config.shard_ranks}) is FSDP's: set engine.kind=fsdp, or "
            "take it out (with DeepSpeed all ranks share one copy)",
        ),
        # DeepSpeed's fp16 at stage 0 does not scale the loss; its first Adam step in bf16 is
        # 0.744 of the correct one.
        (
            stage == 0 and config.precision != "fp32",
            f"engine.precision ({config.precision}) is wrong in DeepSpeed at "
            "engine.zero_stage 0; use engine.zero_stage=1 (as fast), engine.precision=fp32, "
            "or, for bf16, engine.kind=fsdp",
        ),
        (
            needs(optim) != "elements" and stage > 0,
            f"optim.name ({optim.name}) needs whole parameters, which DeepSpeed flattens and shards "
            f"at engine.zero_stage {stage}: set engine.zero_stage=0, or engine.kind=fsdp, "
            "engine.zero_stage=0",
        ),
    ]
    found = [*too_old("deepspeed"), *broken(rules)]
    try:
        build_ds_config(
            config,
            world_size=world_size,
            micro_size=micro_size,
            grad_clip_norm=optim.grad_clip_norm,
        )
    except UserError as e:
        found.append(str(e))
    return found


def memory(
    config: EngineConfig, P: int, trained: int, moment_bytes: float, world_size: int
) -> Memory:
    """Reference: ZeRO (arXiv 1910.02054). Fp32 copies of frozen parameters are on the CPU."""
    W, stage = world_size, config.zero_stage
    word = 4 if config.precision == "fp32" else 2
    accumulation = 4 if config.precision == "bf16" else word
    # the gradients of a backward, in addition to the fp32 sum
    unsummed = word if stage == 1 and accumulation > word else 0
    master = 0 if stage == 0 else 4
    optimizer = (master + moment_bytes) * trained / (W if stage >= 1 else 1)
    bucketed = accumulation if stage == 1 else word
    # elements of the buffer through which stages 1 to 3 send gradients
    bucket = zero_number(config, "reduce_bucket_size", 500_000_000) if stage else 0
    sent = 4 if config.reduce_dtype == "fp32" else 2
    return Memory(
        parameters=word * P / (W if stage == 3 else 1),
        gradients=(accumulation / (1 if config.reduces_once else W) + unsummed) * trained,
        optimizer=0 if config.offload == "optimizer" else optimizer,
        # the bucket, and its copy in the type that is sent
        buffers=(bucketed + (sent if sent != bucketed else 0)) * bucket,
    )


def traffic(config: EngineConfig, plan: BatchPlan, shapes: Shapes) -> Iterator[Collective]:
    """Nothing runs at the same time: `overlap_comm` is off."""
    W, k, stage, word = plan.world_size, plan.accum_steps, config.zero_stage, config.precision
    # flat, each rank has an even share, which starts at a multiple of 16 bytes
    aligned = [rounded_up(n, ALIGNED * W) for n in shapes.flat]
    operator, sent = "all_reduce", sum(shapes.flat)
    if stage == 1 and word == "bf16" and config.offload == "none":
        sent = sum(aligned)  # DeepSpeed's BF16_Optimizer
    if stage == 3:  # each parameter by itself
        sizes = {p: rounded_up(p.numel(), W) for p in chain(*shapes.parts)}
        operator, sent = "reduce_scatter", sum(sizes[p] for p in sizes if p.requires_grad)
        limit = zero_number(config, "stage3_param_persistence_threshold", 100_000)
        small = [n for p, n in sizes.items() if p.numel() <= limit]
        released = sum(sizes.values()) - sum(small)
        yield Collective("forward", "all_gather", word, released, W, 2 * k - plan.kept_graphs)
        yield Collective("backward", "all_gather", word, released, W, k - 1)
        # One micro-batch: the backward's are prefetched before the forward releases anything.
        yield Collective("last backward", "all_gather", word, released, W, int(k > 1))
        aligned = small  # they stay whole between two updates
    if config.reduces_once:
        yield Collective("step", operator, config.reduce_dtype, sent, W)
    else:
        yield Collective("backward", operator, config.reduce_dtype, sent, W, k - 1)
        yield Collective("last backward", operator, config.reduce_dtype, sent, W)
    for n in aligned:
        yield Collective("step", "all_gather", word, n, W, int(stage > 0))


def build(
    config: EngineConfig,
    make_model: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    *,
    device: torch.device,
    grad_clip_norm: float | None,
    micro_size: int,
) -> Engine:
    from clip_train.engines.deepspeed.engine import build_engine

    return build_engine(
        config,
        make_model,
        make_optimizer,
        device=device,
        grad_clip_norm=grad_clip_norm,
        micro_size=micro_size,
    )
