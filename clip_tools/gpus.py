"""What GPUs are by their datasheets, and what a run would take on one of them, by arithmetic
alone.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from clip_train.errors import UserError
from clip_train.memory.plan import BACKWARD, GIB, candidates
from clip_train.models.clip import flops_per_sample
from launcher.config.memory import decide, estimate_memory, predicted_profile
from launcher.config.resolve import Resolved, engine_facts
from launcher.engines import ENGINES, describe, find_engine

CONTEXT_BYTES = 1.5 * GIB  # CUDA's context, NCCL's buffers, the workspaces of cuBLAS and cuDNN
MFUS = (0.3, 0.4, 0.5)  # of the peak in bf16, the backward's 2 forwards counted, no recomputed one
LARGEST_TABLE = 16  # rows


@dataclass(frozen=True)
class GPU:
    memory: float  # bytes
    flops: float  # a second, dense bf16, or fp16
    bf16: bool = True


GPUS = {
    "B200": GPU(180e9, 2250e12),
    "H200": GPU(141e9, 989.5e12),
    "H100": GPU(80e9, 989.5e12),
    "A100-80": GPU(80e9, 312e12),
    "A100-40": GPU(40e9, 312e12),
    "L40S": GPU(48e9, 362e12),
    "A10": GPU(24e9, 125e12),
    "4090": GPU(24e9, 165e12),
    "V100": GPU(32e9, 125e12, bf16=False),
}


def find_gpu(name: str) -> GPU:
    if name.upper() not in GPUS:
        raise UserError(
            f"--gpu ({name}) is not known: use one of {', '.join(GPUS)}, or batch.memory_limit=80GB"
        )
    return GPUS[name.upper()]


def estimate(resolved: Resolved, gpu: GPU, limit: float) -> dict[str, Any]:
    """What `clip-train plan --gpu` adds to a plan: rates, days; a row for each layout and each
    engine.

    limit: bytes of a rank. Speed is that of bf16, whatever the recipe says.
    """
    plan, architecture, config = resolved.plan, resolved.architecture, resolved.config
    forward = flops_per_sample(architecture, architecture.vision_cfg.patch_dropout)
    useful = (1 + BACKWARD) * forward  # FLOPs of a sample, by the MFU's rule
    rates = {f"{mfu:.0%}": plan.world_size * gpu.flops * mfu / useful for mfu in MFUS}
    samples = config.batch.sizes.before(config.steps)
    profiles = {on: predicted_profile(resolved, on) for on in (False, True)}
    return {
        "usable_bytes": limit,
        "context_bytes": CONTEXT_BYTES,
        "samples_per_second": rates,
        "days": {mfu: samples / rate / 86400 for mfu, rate in rates.items()},
        "layouts": layouts(resolved, profiles, limit, gpu.flops * MFUS[1] / forward),
        "engines": engines(resolved, profiles, limit),
    }


def layouts(
    resolved: Resolved, profiles: dict[bool, Any], limit: float, forwards_per_second: float
) -> list[dict[str, Any]]:
    """Ways to cut the batch on the recipe's engine, those that fit first; `auto`: what it would
    choose.
    """
    free = replace(
        resolved,
        given=resolved.given.updated("batch", micro_size="auto", kept_graphs="auto"),
        config=resolved.config.updated("engine", activation_checkpointing="auto"),
    )
    try:
        chosen = decide(free, limit).layout
    except UserError:  # nothing fits: the engines say which would
        return []
    assert chosen is not None
    plan = resolved.plan
    found = []
    for each in candidates(plan.global_size, plan.world_size, chosen.room, profiles):
        k = each.plan.accum_steps
        if k & (k - 1) == 0 or each == chosen:  # a power of 2
            found.append(each)

    def order(layout: Any) -> tuple[bool, float]:
        fits = layout.bytes <= limit
        return not fits, layout.cost if fits else layout.bytes

    return [
        {
            "micro_size": each.plan.micro_size,
            "accum_steps": each.plan.accum_steps,
            "kept_graphs": each.plan.kept_graphs,
            "activation_checkpointing": each.activation_checkpointing,
            "bytes": each.bytes,
            "fits": each.bytes <= limit,
            "seconds": each.cost / forwards_per_second,
            "auto": each == chosen,
        }
        for each in sorted(found, key=order)[:LARGEST_TABLE]
    ]


def engines(resolved: Resolved, profiles: dict[bool, Any], limit: float) -> list[dict[str, Any]]:
    """What each engine holds at each stage, and the largest micro-batch beside it."""
    rows = []
    config, plan = resolved.config, replace(resolved.plan, micro_size=1, kept_graphs=1)
    facts = engine_facts(config, resolved.plan, plan.world_size)
    for kind in ENGINES:
        for stage in (0, 1, 2, 3):
            engine = config.updated("engine", kind=kind, zero_stage=stage, ds_config=None).engine
            if any(find_engine(kind).mistakes(engine, facts)):
                continue
            fixed = estimate_memory(config, engine, plan, resolved.architecture, None)
            left = max(0.0, limit - fixed.total)
            largest = {
                on: int(left // max(each.peak, each.forward)) for on, each in profiles.items()
            }
            rows.append({
                "engine": describe(engine), "kind": kind, **asdict(fixed), "fixed": fixed.total,
                "largest_micro_size": largest[False],
                "with_activation_checkpointing": largest[True],
            })  # fmt: skip
    return rows
