"""What GPUs are by their datasheets, and what a run would take on one of them, by arithmetic alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from clip_train.errors import UserError
from clip_train.memory.plan import BACKWARD, GIB, candidates
from clip_train.models.clip import count_parameters, flops_per_sample
from clip_train.models.freeze import trained_parameters
from clip_train.optim.optimizer import moment_bytes
from clip_train.storage.object_store import PART_BYTES
from launcher.config.memory import GPU_MARGIN, decide, estimate_memory, predicted_profile
from launcher.config.recipe import RunConfig
from launcher.config.validate import Checked, engine_facts
from launcher.engines import ENGINES, describe, find_engine

CONTEXT_BYTES = 1.5 * GIB  # CUDA's context, NCCL's buffers, the workspaces of cuBLAS and cuDNN
LAUNCH_SECONDS = (
    5e-6  # of the host for one kernel: a small model's step takes no less than its launches
)
BLOCK_KERNELS = 15  # of a transformer block's forward; its backward launches twice as many
MFUS = (0.3, 0.4, 0.5)  # of the peak in bf16, the backward's 2 forwards counted, no recomputed one
DECODED_PER_CORE = (
    1200.0  # samples/s of a loader on one core: 0.77 to 0.87 ms each in benchmarks/data.py
)
SAMPLE_BYTES = 40e3  # of an image of 256 to 384 pixels with its caption in a shard
LARGEST_TABLE = 16  # rows


@dataclass(frozen=True)
class GPU:
    memory: float  # bytes
    flops: float  # a second, dense bf16, or fp16
    link: float  # bytes a second to the other GPUs of a node, one way; over PCIe where there is no NVLink
    bf16: bool = True


GPUS = {
    "B200": GPU(180e9, 2250e12, 900e9),
    "H200": GPU(141e9, 989.5e12, 450e9),
    "H100": GPU(80e9, 989.5e12, 450e9),
    "A100-80": GPU(80e9, 312e12, 300e9),
    "A100-40": GPU(40e9, 312e12, 300e9),
    "L40S": GPU(48e9, 362e12, 32e9),
    "A10": GPU(24e9, 125e12, 32e9),
    "4090": GPU(24e9, 165e12, 32e9),
    "V100": GPU(32e9, 125e12, 150e9, bf16=False),
}


def find_gpu(name: str) -> GPU:
    if name.upper() not in GPUS:
        raise UserError(
            f"--gpu ({name}) is not known: use one of {', '.join(GPUS)}, or batch.memory_limit=80GB"
        )
    return GPUS[name.upper()]


def usable(gpu: GPU) -> float:
    """Bytes, as `train` would find them."""
    return (gpu.memory - CONTEXT_BYTES) * (1 - GPU_MARGIN)


def estimate(config: RunConfig, checked: Checked, gpu: GPU, forwards: float) -> dict[str, Any]:
    """What `clip-train plan --gpu` adds to a plan: seconds, bytes, rates; a row for each layout and each engine.

    forwards: of a sample, recomputation included. Speed is that of bf16, whatever the recipe says.
    """
    plan, architecture = checked.plan, checked.architecture
    W, P = plan.world_size, count_parameters(architecture)
    trained = trained_parameters(config.model, architecture)
    forward = flops_per_sample(architecture, architecture.vision_cfg.patch_dropout)
    samples = config.batch.sizes.before(config.steps)
    useful = (1 + BACKWARD) * forward  # FLOPs of a sample, by the MFU's rule
    towers = (architecture.vision_cfg, architecture.text_cfg)
    blocks = sum(getattr(tower, "depth", None) or 12 for tower in towers)  # 12: built by OpenCLIP
    kernels = BLOCK_KERNELS * blocks * (1 + BACKWARD) * plan.accum_steps  # of a step
    most = plan.global_size / (kernels * LAUNCH_SECONDS)  # samples/s
    rates = {f"{mfu:.0%}": min(most, W * gpu.flops * mfu / useful) for mfu in MFUS}
    traffic = collectives(config, checked, P, trained)
    saved = 4 * P + moment_bytes(config.optim) * trained
    limit = checked.layout.room.limit if checked.layout else usable(gpu)
    middle = rates[f"{MFUS[1]:.0%}"]
    return {
        "usable_bytes": limit,
        "context_bytes": CONTEXT_BYTES,
        "samples_per_second": rates,
        "launch_bound": [mfu for mfu, rate in rates.items() if rate == most],
        "days": {mfu: samples / rate / 86400 for mfu, rate in rates.items()},
        "collective_bytes": traffic,
        "collective_seconds": {name: size / gpu.link for name, size in traffic.items()},
        "step_seconds": plan.global_size / middle * (forwards + BACKWARD) / (1 + BACKWARD),
        "loader": {
            "cores": middle / W / DECODED_PER_CORE,
            "bytes_per_second": middle / W * SAMPLE_BYTES,
        },
        "checkpoint": {
            "bytes": saved,
            "requests": W * (3 + saved // W // PART_BYTES)
            + 3,  # parts; two manifests; manifest, layout, marker
        },
        "layouts": layouts(config, checked, limit, gpu.flops * MFUS[1] / forward),
        "engines": engines(config, checked, limit),
    }


def collectives(config: RunConfig, checked: Checked, P: int, trained: int) -> dict[str, float]:
    """Bytes that a rank sends in a step, over a ring; benchmarks/communication.py counts the same values."""
    plan, engine = checked.plan, checked.engine
    W, k, m, stage = plan.world_size, plan.accum_steps, plan.kept_graphs, engine.zero_stage
    word = 4 if engine.precision == "fp32" else 2
    fp32_sums = find_engine(engine.kind).sums_fp32(engine) or (
        stage == 1 and engine.precision == "bf16"
    )
    gathered = 0 if config.batch.accumulation == "local" else plan.global_size
    reduced = 4 if fp32_sums else word
    times = 1 if stage < 2 or engine.reduce_gradients == "once" else k
    part = (W - 1) / W  # of a tensor, in an all-gather or a reduce-scatter; an all-reduce is both
    fetched = 0 if stage == 0 else 1 if stage < 3 else 3 * k - m
    return {
        "features": part * 4 * 2 * gathered * checked.architecture.embed_dim,
        "sums": 2 * part * 8 * 2 * gathered,
        "gradients": (2 if stage == 0 else 1) * part * times * reduced * trained,
        "parameters": part * fetched * word * P,
    }


def layouts(
    config: RunConfig, checked: Checked, limit: float, forwards_per_second: float
) -> list[dict[str, Any]]:
    """Ways to cut the batch on the recipe's engine, those that fit first; `auto`: what it would choose."""
    plan, engine = checked.plan, checked.engine
    free = config.model_copy(
        update={
            "batch": config.batch.model_copy(update={"micro_size": "auto", "kept_graphs": "auto"})
        }
    )
    asked = replace(checked, engine=engine.model_copy(update={"activation_checkpointing": "auto"}))
    try:
        chosen = decide(free, asked, limit).layout
    except UserError:  # nothing fits: the engines say which would
        return []
    assert chosen is not None
    profiles = {on: predicted_profile(config, checked, on) for on in (False, True)}
    found = candidates(plan.global_size, plan.world_size, chosen.room, profiles)
    by_k = [
        each
        for each in found
        if each.plan.accum_steps & (each.plan.accum_steps - 1) == 0 or each == chosen
    ]
    near = sorted(
        by_k,
        key=lambda each: (each.bytes > limit, each.cost if each.bytes <= limit else each.bytes),
    )
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
        for each in near[:LARGEST_TABLE]
    ]


def engines(config: RunConfig, checked: Checked, limit: float) -> list[dict[str, Any]]:
    """What each engine holds at each stage, and the largest micro-batch beside it."""
    rows = []
    profiles = {on: predicted_profile(config, checked, on) for on in (False, True)}
    one = replace(checked.plan, micro_size=1, kept_graphs=1)
    for kind in ENGINES:
        for stage in (0, 1, 2, 3):
            at = {
                "kind": kind,
                "zero_stage": stage,
                "ds_config": None,
                "precision": checked.engine.precision,
            }
            engine = config.engine.model_copy(update=at)
            if any(
                find_engine(kind).mistakes(
                    engine, engine_facts(config, checked.plan, checked.plan.world_size)
                )
            ):
                continue
            fixed = estimate_memory(config, engine, one, checked.architecture, None)
            left = max(0.0, limit - fixed.total)
            largest = {
                on: int(left // max(profile.peak, profile.forward))
                for on, profile in profiles.items()
            }
            row = {"engine": describe(engine), "kind": kind, **asdict(fixed), "fixed": fixed.total}
            rows.append(
                row
                | {
                    "largest_micro_size": largest[False],
                    "with_activation_checkpointing": largest[True],
                }
            )
    return rows
