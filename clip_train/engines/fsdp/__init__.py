"""PyTorch's FSDP2 as an engine: its limits and its memory. `engine` has the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from clip_train.batch import BatchPlan
from clip_train.engines.traffic import Collective, Shapes, rounded_up
from clip_train.memory.plan import Memory
from clip_train.optim.optimizer import needs
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
    W, stage, ranks = world_size, config.zero_stage, config.shard_ranks
    divisors = [str(n) for n in range(1, W + 1) if W % n == 0]
    return broken(
        [
            (
                config.precision == "fp16",
                "engine.precision (fp16) has no loss scaling with engine.kind=fsdp: use "
                "engine.precision=bf16, or engine.kind=deepspeed",
            ),
            (
                config.reduce_dtype == "bf16" and config.reduces_once,
                "engine.reduce_dtype (bf16) would also add up the micro-batches in bf16 where "
                "engine.kind=fsdp reduces once per step: set engine.reduce_dtype=fp32, or "
                "engine.zero_stage=2 with engine.reduce_gradients=each_backward",
            ),
            (
                config.ds_config is not None,
                f"engine.ds_config ({config.ds_config}) does not apply to engine.kind=fsdp: "
                "remove it, or set engine.kind=deepspeed",
            ),
            (
                W % (ranks or 1) != 0,
                f"engine.shard_ranks ({ranks}) must divide the number of ranks ({W}): one of "
                f"{', '.join(divisors)}, or null",
            ),
            (
                ranks not in (None, 1) and stage == 0,
                f"engine.shard_ranks ({ranks}) shards what engine.zero_stage 0 keeps whole: "
                "set engine.zero_stage=1, or engine.shard_ranks=null",
            ),
            (
                needs(optim) == "parameters" and stage > 0 and (ranks or W) > 1,
                f"optim.name ({optim.name}) needs whole parameters, which engine.zero_stage {stage} "
                f"shards across {ranks or W} ranks: set engine.zero_stage=0, or "
                "engine.shard_ranks=1",
            ),
        ]
    )


def memory(
    config: EngineConfig, P: int, trained: int, moment_bytes: float, world_size: int
) -> Memory:
    """Masters, moments and reduced gradients are fp32 and sharded; other buffers are added to
    them.

    Frozen parameters have masters only.
    """
    S = 1 if config.zero_stage == 0 else config.shard_ranks or world_size
    word = 4 if config.precision == "fp32" else 2
    whole = S > 1 or word < 4  # a copy beside the masters, in the model's precision
    offloaded = config.offload == "optimizer"
    return Memory(
        parameters=word * P if whole and config.zero_stage < 3 else 0.0,
        gradients=4 * trained / S + (4 * trained if config.reduces_once and S > 1 else 0),
        optimizer=0.0 if offloaded else (4 * P + moment_bytes * trained) / S,
        buffers=0.0,
    )


def traffic(config: EngineConfig, plan: BatchPlan, shapes: Shapes) -> Iterator[Collective]:
    """Unit by unit, beside the computation of its neighbors. Parameters outside of all units
    come first in a forward and last in a backward. A backward prefetches the unit before its
    own, even one that it does not reach: the next forward of the step then takes that copy."""
    W, k, stage = plan.world_size, plan.accum_steps, config.zero_stage
    S = 1 if stage == 0 else config.shard_ranks or W
    word, summed = config.precision, config.reduce_dtype
    followed = zip(shapes.reached, [*shapes.reached[1:], True], shapes.replayed, strict=True)
    in_units = sum(p.numel() for part in shapes.parts[:-1] for p in part)
    remaining = in_units  # elements of this unit and of those after it
    for part, (reached, next_reached, replayed) in zip(shapes.parts, followed, strict=True):
        alone = 1.0 if part is shapes.parts[-1] else remaining / in_units
        remaining -= sum(p.numel() for p in part)
        # each parameter's rows are sharded evenly
        sizes = [rounded_up(p.shape[:1].numel(), S) * p.shape[1:].numel() for p in part]
        sent = sum(n for n, p in zip(sizes, part, strict=True) if p.requires_grad)
        replays = (k - plan.kept_graphs) * replayed
        astray = next_reached and not reached
        in_last = int(reached or (astray and (replays > 0 or k == 1)))
        forwards = k + replays * (not astray) if stage == 3 else 1
        again = k if reached else (1 + replays) * astray
        for place, operator, dtype, elements, times in (
            ("forward", "all_gather", word, sum(sizes), forwards),
            ("backward", "all_gather", word, sum(sizes), (again - in_last) * (stage == 3)),
            ("backward", "reduce_scatter", summed, sent, 0 if config.reduces_once else k - 1),
            ("last backward", "all_gather", word, sum(sizes), in_last * (stage == 3)),
            ("last backward", "reduce_scatter", summed, sent, 1),
        ):
            yield Collective(place, operator, dtype, elements, S, times, alone=alone)
        # between copies of the model
        yield Collective(
            "last backward", "all_reduce", summed, sent // S, W // S, stride=S, alone=alone
        )


def build(
    config: EngineConfig,
    make_model: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    *,
    device: torch.device,
    grad_clip_norm: float | None,
    micro_size: int,
) -> Engine:
    from clip_train.engines.fsdp.engine import build_engine

    return build_engine(
        config,
        make_model,
        make_optimizer,
        device=device,
        grad_clip_norm=grad_clip_norm,
    )
