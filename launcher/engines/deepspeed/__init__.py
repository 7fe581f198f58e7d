"""DeepSpeed's ZeRO as an engine: `config` (its JSON, what is refused), `engine` (the protocol), `shards` (which pieces
of which parameters it keeps where), `doctor`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from clip_train.errors import UserError
from clip_train.protocols import Engine
from launcher.engines import Facts, MakeOptimizer, Terms
from launcher.engines.config import EngineConfig
from launcher.engines.deepspeed.config import build_ds_config, reduce_bucket_elements, reduces_once
from launcher.engines.deepspeed.doctor import CHECKS


def mistakes(config: EngineConfig, facts: Facts) -> Iterator[str]:
    if config.shard_ranks is not None:
        yield (
            f"engine.shard_ranks ({config.shard_ranks}) is FSDP's: set engine.kind=fsdp, or take it out (with "
            "DeepSpeed all ranks share one copy)"
        )
    if config.zero_stage == 0 and config.precision != "fp32":
        # DeepSpeed's fp16 at stage 0 does not scale the loss, and its bf16 takes a first Adam step of 0.744x.
        yield (
            f"engine.precision ({config.precision}) is wrong in DeepSpeed at engine.zero_stage 0; use "
            "engine.zero_stage=1 (as fast), engine.precision=fp32, or, for bf16, engine.kind=fsdp"
        )
    if config.zero_stage == 0 and config.offload != "none":
        yield f"engine.offload ({config.offload}) needs engine.zero_stage 1, 2 or 3 (it is 0)"
    if facts.on_this_machine and config.precision != "fp32" and not torch.cuda.is_available():
        yield from _precision_mistake(config.precision)
    try:
        ds_config(config, facts)
    except UserError as e:
        yield str(e)


def _precision_mistake(precision: str) -> Iterator[str]:
    """What DeepSpeed would say of this machine's processor once the model is built, and would leave at that."""
    from launcher.engines.deepspeed.engine import supported_precisions  # a rank needs this import in any case

    supported = supported_precisions()
    if precision not in supported:
        remedies = " or ".join(f"engine.precision={each}" for each in reversed(supported))
        yield (
            f"engine.precision ({precision}): this machine's processor does not compute in it, and no GPU is visible: "
            f"use {remedies}, or GPUs"
        )


def ds_config(config: EngineConfig, facts: Facts) -> dict[str, Any]:
    return build_ds_config(
        config, micro_size=facts.micro_size, world_size=facts.world_size, grad_clip_norm=facts.grad_clip_norm
    )


def build(
    config: EngineConfig,
    make_model: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    *,
    device: torch.device,
    facts: Facts,
) -> Engine:
    from launcher.engines.deepspeed.engine import build_engine

    engine = build_engine(make_model, make_optimizer, ds_config(config, facts), device=device, compile=config.compile)
    engine.set_grad_clip(facts.grad_clip_norm)
    return engine


def memory(config: EngineConfig, P: int, moment_bytes: int, world_size: int) -> Terms:
    """Reference: ZeRO (arXiv 1910.02054). moment_bytes: of the optimizer, for each parameter."""
    W, stage = world_size, config.zero_stage
    word = 4 if config.precision == "fp32" else 2
    accumulation = 4 if config.precision == "bf16" else word
    whole_gradient = stage < 2 or reduces_once(config)
    unsummed = word if stage == 1 and accumulation > word else 0  # what a backward leaves, beside the fp32 sum
    master = 0 if stage == 0 else 4
    return Terms(
        parameters=word * P / (W if stage == 3 else 1),
        gradients=accumulation * P / (1 if whole_gradient else W) + unsummed * P,
        optimizer=0 if config.offload == "optimizer" else (master + moment_bytes) * P / (W if stage >= 1 else 1),
        buffers=(accumulation if stage == 1 else word) * reduce_bucket_elements(config),
        sums_fp32=config.precision == "fp32",
    )


def describe(config: EngineConfig | Mapping[str, Any]) -> str:
    stage = config.zero_stage if isinstance(config, EngineConfig) else config.get("zero_stage")
    return f"ZeRO {stage}"


def artifacts(config: EngineConfig, facts: Facts) -> dict[str, str]:
    return {"ds_config.json": json.dumps(ds_config(config, facts), indent=2) + "\n"}


def doctor_checks() -> tuple[tuple[str, Any], ...]:
    return CHECKS
