"""`clip-train plan`: what a run would do, before anything is submitted. Touches no GPU and no shard."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from clip_train.batch import BatchPlan
from clip_train.contrastive.tiles import auto_side
from clip_train.data import times_read
from clip_train.errors import UserError
from clip_train.metrics import read_jsonl
from clip_train.metrics.progress import format_seconds
from clip_train.models import Architecture, count_parameters, flops_per_sample
from launcher.config import RunConfig
from launcher.ds_config import reduces_once
from launcher.train import check

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs; an estimate (activations to about a third)."""

    parameters: float  # a teacher's included, which no stage divides
    gradients: float
    optimizer: float  # fp32 master weights and moments, on the CPU if offloaded
    activations: float  # of the kept graphs
    features: float  # the gathered features, their gradients, memory banks, and two tiles of logits

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.features


def estimate_memory(config: RunConfig, plan: BatchPlan, architecture: Architecture) -> Memory:
    """From the sizes alone. Reference: ZeRO (arXiv 1910.02054), activations as in arXiv 2205.05198."""
    teacher = config.model.teacher_architecture()
    P, W, stage = count_parameters(architecture), plan.world_size, config.engine.zero_stage
    word = 4 if config.engine.precision == "fp32" else 2
    accumulation = 4 if config.engine.precision == "bf16" else word
    whole_gradient = stage < 2 or reduces_once(config.engine)
    moments = 8 if config.optim.name == "adamw" else 4 if config.optim.momentum else 0
    master = 0 if stage == 0 else 4
    offloaded = config.engine.offload == "optimizer"
    kept_samples = min(plan.kept_graphs * plan.micro_size, plan.per_rank)
    return Memory(
        parameters=word * (P / (W if stage == 3 else 1) + (count_parameters(teacher) if teacher else 0)),
        gradients=accumulation * P / (1 if whole_gradient else W),
        optimizer=0 if offloaded else (master + moments) * P / (W if stage >= 1 else 1),
        activations=kept_samples * activation_bytes(architecture, word, config.engine.activation_checkpointing),
        features=4 * architecture.embed_dim * (2 * plan.global_size + 4 * plan.per_rank + 2 * banked(config))
        + 8 * (config.loss.tile or auto_side(plan.per_rank, plan.global_size)) ** 2,
    )


def banked(config: RunConfig) -> int:
    """Pairs in the memory banks, which every rank holds."""
    return config.loss.bank_size if config.loss.kind == "memory_bank" else 0


def activation_bytes(architecture: Architecture, word: int, checkpointing: bool) -> float:
    """Per sample: 17 words for each token and channel of a block; with checkpointing its input alone."""
    vision, text = architecture.vision_cfg, architecture.text_cfg
    towers = (
        (vision.kept_patches(vision.patch_dropout) + 1, vision.width, vision.layers),
        (text.context_length, text.width, text.layers),
    )
    total = 0.0
    for tokens, width, layers in towers:
        block = 17 * word * tokens * width
        total += layers * word * tokens * width + block if checkpointing else layers * block
    return total


def measured_rate(config: RunConfig) -> float | None:
    """Median samples per second of an earlier attempt of this run, or None."""
    try:
        records = read_jsonl(config.run_dir / "metrics.jsonl")
    except FileNotFoundError:
        return None
    rates = [r["samples_per_second"] for r in records if r.get("samples_per_second")]
    return median(rates) if rates else None


def make_plan(config: RunConfig, world_size: int, rate: float | None) -> dict[str, Any]:
    """All of it as one JSON-able dict; sizes in bytes, rates over all ranks."""
    checked = check(config, world_size, read_data=False)
    plan, architecture = checked.plan, checked.architecture
    memory = estimate_memory(config, plan, architecture)
    forward = flops_per_sample(architecture, architecture.vision_cfg.patch_dropout)
    recomputed = 1 if config.engine.activation_checkpointing else 0
    forwards = 1 if config.batch.accumulation == "local" else plan.forwards_per_sample
    teacher = config.model.teacher_architecture()
    taught = flops_per_sample(teacher) if teacher else 0
    rate = rate or measured_rate(config)
    samples = config.batch.sizes.before(config.steps)
    return {
        "model": config.model.name,
        "parameters": count_parameters(architecture),
        "world_size": world_size,
        "global_size": plan.global_size,  # the largest
        "schedule": str(config.batch.sizes) if config.batch.schedule else None,
        "per_rank": plan.per_rank,
        "micro_size": plan.micro_size,
        "accum_steps": plan.accum_steps,
        "kept_graphs": plan.kept_graphs,
        "forwards_per_sample": forwards + recomputed,
        "lanes": checked.lanes,
        "times_read": times_read(config.batch.sizes, checked.lanes, world_size),
        "steps": config.steps,
        "samples": samples,
        "epochs": samples / config.data.num_samples if config.data.num_samples else None,
        "flops_per_step": plan.global_size * (forward * (2 + forwards + recomputed) + taught),
        "memory_bytes": {**memory.__dict__, "total": memory.total},
        "samples_per_second": rate,
        "eta_seconds": samples / rate if rate else None,
    }


def print_plan(config: RunConfig, world_size: int | None, rate: float | None, *, as_json: bool) -> int:
    world_size = world_size if world_size is not None else int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 1:
        raise UserError(f"--world-size ({world_size}) must be at least 1")
    plan = make_plan(config, world_size, rate)
    if as_json:
        print(json.dumps(plan, indent=2))
        return 0
    table = Table(title=f"{config.run.name}: {plan['model']}", box=None, show_header=False)
    for name, value in describe(plan):
        table.add_row(name, value)
    Console().print(table)
    return 0


def describe(plan: dict[str, Any]) -> list[tuple[str, str]]:
    memory = plan["memory_bytes"]
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.items() if name != "total")
    epochs = f", {plan['epochs']:.1f} epochs" if plan["epochs"] else ""
    eta = (
        f"{format_seconds(plan['eta_seconds'])} at {plan['samples_per_second']:,.0f} samples/s"
        if plan["eta_seconds"]
        else "unknown: give --samples-per-second, or plan again when the run has some steps"
    )
    uneven = f"{plan['per_rank'] - 1:,} or " if plan["global_size"] % plan["world_size"] else ""
    return [
        ("parameters", f"{plan['parameters']:,}"),
        *([("batch schedule", plan["schedule"])] if plan["schedule"] else []),
        (
            "largest global batch" if plan["schedule"] else "global batch",
            f"{plan['global_size']:,} = {plan['world_size']} ranks x {uneven}{plan['per_rank']:,}, in "
            f"{plan['accum_steps']} micro-batches of {plan['micro_size']} with {plan['kept_graphs']} graphs kept",
        ),
        ("forwards per sample", f"{plan['forwards_per_sample']:.2f}"),
        ("lanes", f"{plan['lanes']}, each read by {plan['times_read']:.3g} ranks in the mean"),
        ("length", f"{plan['steps']:,} steps, {plan['samples']:,} samples{epochs}"),
        ("arithmetic", f"{plan['flops_per_step'] / 1e12:,.3g} TFLOP per step"),
        ("memory per rank", f"about {memory['total'] / GIB:.2f} GiB ({parts})"),
        ("duration", eta),
    ]
