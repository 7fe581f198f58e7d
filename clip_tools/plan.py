"""`clip-train plan`: what a run would do, before anything is submitted; and `train --dry-run`,
which checks all of it.

A plan touches no GPU and no shard.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from clip_tools.gpus import CONTEXT_BYTES, estimate, find_gpu
from clip_train.checkpoint import restore
from clip_train.checkpoint.inspect import open_to_look, places_of
from clip_train.data.config import resolve_streams
from clip_train.errors import UserError
from clip_train.memory.plan import GIB, RECOMPUTED
from clip_train.metrics.progress import format_seconds
from clip_train.models.clip import count_parameters, flops_per_sample
from clip_train.models.freeze import trained_parameters
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import open_storage
from launcher.checks import require_places
from launcher.config.memory import (
    GPU_MARGIN,
    decide,
    estimate_memory,
    memory_limit,
    predicted_profile,
)
from launcher.config.recipe import RunConfig, load_config
from launcher.config.resolve import Resolved, advice, resolve
from launcher.config.resume import compare_with
from launcher.engines import describe as describe_engine
from launcher.runtime.launch import local_ranks


def make_plan(
    resolved: Resolved,
    rate: float | None = None,
    gpu: str | None = None,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """All of it as one JSON-able dict; sizes in bytes, rates over all ranks. device: whose memory
    is the limit.
    """
    found = find_gpu(gpu) if gpu is not None else None
    # bytes, as `train` would find them
    usable = (found.memory - CONTEXT_BYTES) * (1 - GPU_MARGIN) if found else None
    chosen = ", ".join(resolved.given.chosen)
    if chosen:
        if usable is None or resolved.config.batch.memory_limit is not None:
            usable = memory_limit(resolved.config, device)
        resolved = decide(resolved, usable)
    config, plan, architecture = resolved.config, resolved.plan, resolved.architecture
    engine, layout, teacher = config.engine, resolved.layout, config.model.teacher_architecture()
    checkpointing = bool(engine.activation_checkpointing)
    profile = predicted_profile(resolved, checkpointing)
    memory = estimate_memory(config, engine, plan, architecture, profile)
    forward = flops_per_sample(architecture, architecture.vision_cfg.patch_dropout)
    forwards = plan.forwards_per_sample + RECOMPUTED * checkpointing
    flops = forward * (2 + forwards) + (flops_per_sample(teacher) if teacher else 0)
    samples = config.batch.sizes.before(config.steps)
    streams = resolve_streams(config.data.lanes, config.batch.sizes)
    return {
        "name": config.run.name,
        "model": config.model.name,
        "parameters": count_parameters(architecture),
        "trained_parameters": trained_parameters(config.model, architecture),
        "world_size": plan.world_size,
        "engine": describe_engine(engine),
        "global_size": plan.global_size,  # the largest
        "schedule": str(config.batch.sizes) if config.batch.schedule else None,
        "per_rank": plan.per_rank,
        "micro_size": plan.micro_size,
        "accum_steps": plan.accum_steps,
        "kept_graphs": plan.kept_graphs,
        "forwards_per_sample": forwards,
        "activation_checkpointing": checkpointing,
        "reduce_gradients": engine.reduce_gradients if engine.zero_stage >= 2 else "once",
        "memory_limit_bytes": layout.room.limit if layout else None,
        "reason": f"{chosen} = auto: {layout.describe()}" if layout else None,
        "advice": advice(resolved),
        "lanes": streams,
        "steps": config.steps,
        "samples": samples,
        "epochs": samples / config.data.num_samples if config.data.num_samples else None,
        "flops_per_step": plan.global_size * flops,
        "memory_bytes": {**asdict(memory), "total": memory.total},
        "samples_per_second": rate,
        "eta_seconds": samples / rate if rate else None,
        "gpu": {"name": gpu, **estimate(resolved, found, usable)} if found and usable else None,
    }


def run(args: argparse.Namespace) -> int:
    config = load_config(args.recipe, args.overrides)
    said = os.environ.get("WORLD_SIZE", "1")
    if args.world_size is None and not said.isdigit():
        raise UserError(
            f"WORLD_SIZE ({said}) must be a whole number; unset it, or give --world-size"
        )
    world_size = args.world_size if args.world_size is not None else int(said)
    if world_size < 1:
        raise UserError(f"--world-size ({world_size}) must be at least 1")
    if args.gpu is not None:
        engine = config.engine.on(find_gpu(args.gpu).bf16)
        config = config.model_copy(update={"engine": engine})
    resolved = resolve(config, world_size, read_data=False)
    plan = make_plan(resolved, args.samples_per_second, args.gpu)
    if args.json:
        print(json.dumps(plan, indent=2))
    else:
        show(plan)
    return 0


def dry_run(args: argparse.Namespace) -> int:
    """Check what can be checked before ranks meet, with the first shard and this machine's devices,
    and print it.
    """
    config = load_config(args.recipe, args.overrides)
    ranks = local_ranks(args.ranks, os.environ)
    resolved = resolve(config, ranks, is_rank=True)
    require_places(config)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else None
    show(make_plan(resolved, device=device))
    precision = resolved.config.engine.precision
    config = resolved.given.updated("engine", precision=precision)
    resumed = would_resume(config)
    if resumed is not None:
        notes = compare_with(config, resumed, ranks, resumed.state.get("teacher"))
        print("\n".join([resumed.describe(), *notes]))
    source = resolved.source
    assert source is not None  # read_data
    print(f"data.train: {source.index.describe()}; the first caption: {source.first_caption!r}")
    print("nothing was started or written: the same line without --dry-run trains")
    return 0


def would_resume(config: RunConfig) -> restore.Resumed | None:
    """The checkpoint that `train` would resume from, only looked at; None: it would start fresh.

    UserError, CheckpointError."""
    mode, remote = config.checkpoint.resume, config.checkpoint.remote
    folder = config.run_dir / "checkpoints"
    if mode == "never":
        return None
    local = LocalStorage(folder) if folder.is_dir() else None
    places = restore.Places(local, open_storage(remote) if remote else None)
    found = restore.resolve(places)[0] if any(places) else None
    if found is not None or mode == "auto":
        return found
    if mode == "must":
        raise UserError(
            f"checkpoint.resume (must): there is no checkpoint under {folder}; set it to auto to "
            "start fresh"
        )
    other, only = places_of(mode)
    return open_to_look(other, only=only)


def show(plan: dict[str, Any]) -> None:
    console = Console(width=None if os.isatty(1) else 160)
    table = Table(title=f"{plan['name']}: {plan['model']}", box=None, show_header=False)
    for name, value in describe(plan):
        table.add_row(name, value)
    console.print(table)
    gpu = plan["gpu"]
    if gpu is None:
        return
    title = f"layouts on {gpu['name']}, {gpu['usable_bytes'] / GIB:.0f} GiB usable"
    heads = ("b", "k", "m", "checkpointing", "GiB", "fits", "s/step at 40%", "")
    rows = [
        [
            f"{row['micro_size']:,}", str(row["accum_steps"]), str(row["kept_graphs"]),
            "yes" if row["activation_checkpointing"] else "no", f"{row['bytes'] / GIB:.1f}",
            "yes" if row["fits"] else "no", f"{row['seconds']:.3g}",
            "<- auto" if row["auto"] else "",
        ]
        for row in gpu["layouts"]
    ]  # fmt: skip
    console.print(right_aligned(title, heads, rows))
    parts = ("parameters", "gradients", "optimizer", "buffers", "fixed")
    heads = ("engine", *parts[:-1], "fixed GiB", "largest b", "checkpointed")
    rows = []
    for row in gpu["engines"]:
        sizes = [f"{row[part] / GIB:.2f}" for part in parts]
        largest = [row["largest_micro_size"], row["with_activation_checkpointing"]]
        rows.append([f"{row['kind']}: {row['engine']}", *sizes, *(f"{n:,}" for n in largest)])
    console.print(right_aligned("engines", heads, rows))
    rates = gpu["samples_per_second"]
    rows = [[mfu, f"{rates[mfu]:,.0f}", f"{gpu['days'][mfu]:.2f}"] for mfu in rates]
    console.print(right_aligned("speed in bf16", ("MFU", "samples/s", "days"), rows))


def right_aligned(title: str, heads: Sequence[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, box=None)
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def describe(plan: dict[str, Any]) -> list[tuple[str, str]]:
    memory = plan["memory_bytes"]
    parts = ", ".join(
        f"{name} {size / GIB:.2f}" for name, size in memory.items() if name != "total"
    )
    epochs = f", {plan['epochs']:.1f} epochs" if plan["epochs"] else ""
    eta = (
        f"{format_seconds(plan['eta_seconds'])} at {plan['samples_per_second']:,.0f} samples/s"
        if plan["eta_seconds"]
        else "unknown: give --samples-per-second (a run's metrics.jsonl has it)"
    )
    uneven = f"{plan['per_rank'] - 1:,} or " if plan["global_size"] % plan["world_size"] else ""
    trained = (
        f", {plan['trained_parameters']:,} trained"
        if plan["trained_parameters"] < plan["parameters"]
        else ""
    )
    return [
        ("parameters", f"{plan['parameters']:,}{trained}"),
        *([("batch schedule", plan["schedule"])] if plan["schedule"] else []),
        (
            "largest global batch" if plan["schedule"] else "global batch",
            f"{plan['global_size']:,} = {plan['world_size']} ranks x {uneven}{plan['per_rank']:,}, "
            f"in {plan['accum_steps']} micro-batches of {plan['micro_size']} with "
            f"{plan['kept_graphs']} graphs kept",
        ),
        ("engine", plan["engine"]),
        ("forwards per sample", f"{plan['forwards_per_sample']:.2f}"),
        ("streams", f"{plan['lanes']}"),
        ("length", f"{plan['steps']:,} steps, {plan['samples']:,} samples{epochs}"),
        ("arithmetic", f"{plan['flops_per_step'] / 1e12:,.3g} TFLOP per step"),
        ("memory per rank", f"about {memory['total'] / GIB:.2f} GiB ({parts})"),
        ("duration", eta),
        *([("chosen", plan["reason"])] if plan["reason"] else []),
        *([("advice", plan["advice"])] if plan["advice"] else []),
    ]
