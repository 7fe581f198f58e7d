"""The plan of a run, for `clip-train plan`; and `clip-train train --dry-run`, which also checks it.

A plan touches no GPU and no shard.
"""

import json
import os
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from clip_tools.communication import communication, network_bytes
from clip_train.checkpoint import restore
from clip_train.engines.config import describe_sharding
from clip_train.engines.traffic import Links
from clip_train.memory.plan import GIB, RECOMPUTED
from clip_train.metrics.gpus import GPU
from clip_train.models.clip import count_parameters, flops_per_sample
from clip_train.models.freeze import trained_parameters
from clip_train.recipe.memory import (
    choose_layout,
    estimate_memory,
    memory_limit,
    predicted_profile,
    usable,
)
from clip_train.recipe.recipe import Recipe
from clip_train.recipe.resolve import Resolved, resolve
from clip_train.recipe.resume import compare_with
from clip_train.recipe.teachers import load_teachers
from clip_train.recipe.weights import digest_of_base
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import open_storage
from launcher.checks import require_places
from launcher.runtime.environment import require_usable_gpu
from launcher.runtime.log import log

CONTEXT_BYTES = 1.5 * GIB  # CUDA's context, NCCL's buffers, the workspaces of cuBLAS and cuDNN
MFU = 0.4  # of the peak in bf16, the backward's 2 forwards counted, no recomputed one


def make_plan(
    resolved: Resolved,
    gpu: GPU | None = None,
    network: str | None = None,
    per_node: int = 8,
) -> dict[str, Any]:
    """The whole plan as one JSON-able dict; sizes in bytes. network: of a node, in Gbit/s."""
    # bytes, as `train` would find them
    limit = usable(resolved, gpu.memory - CONTEXT_BYTES) if gpu else None
    if limit is None or resolved.config.batch.memory_limit is not None:
        limit = memory_limit(resolved, None)
    resolved = choose_layout(resolved, limit)
    config, plan, architecture = resolved.config, resolved.plan, resolved.architecture
    engine, layout, teachers = config.engine, resolved.layout, config.model.teacher_architectures()
    checkpointing = engine.recompute
    profile = predicted_profile(resolved, checkpointing)
    memory = estimate_memory(config, engine, plan, architecture, profile)
    T = config.data.num_texts
    forward = flops_per_sample(architecture, architecture.vision_cfg.patch_dropout, T)
    forwards = plan.forwards_per_sample + RECOMPUTED[checkpointing]
    of_teachers = sum(flops_per_sample(teacher, num_texts=T) for teacher in teachers)
    samples = config.batch.sizes.before(config.steps)
    links = None
    if gpu and (network or plan.world_size <= per_node):
        links = Links(gpu.link, network_bytes(network) if network else 0.0, per_node)
    forward_seconds = forward / (gpu.flops * MFU) if gpu else 0.0
    return {
        "name": config.run.name,
        "model": config.model.name,
        "parameters": count_parameters(architecture),
        "trained_parameters": trained_parameters(config.model, architecture),
        "world_size": plan.world_size,
        "engine": describe_sharding(engine.model_dump()),
        "global_size": plan.global_size,  # the largest
        "schedule": str(config.batch.sizes) if config.batch.schedule else None,
        "per_rank": plan.per_rank,
        "micro_size": plan.micro_size,
        "accum_steps": plan.accum_steps,
        "kept_graphs": plan.kept_graphs,
        "forwards_per_sample": forwards,
        "activation_checkpointing": checkpointing,
        "reduce_gradients": "once" if engine.reduces_once else "each_backward",
        "memory_limit_bytes": layout.room.limit if layout else None,
        "reason": f"{', '.join(resolved.recipe.chosen)} = auto: {layout.describe()}"
        if layout
        else None,
        "lanes": config.data.lanes,
        "steps": config.steps,
        "samples": samples,
        "epochs": samples / config.data.num_samples if config.data.num_samples else None,
        "flops_per_step": plan.global_size * (forward * (2 + forwards) + of_teachers),
        "memory_bytes": {**asdict(memory), "total": memory.total},
        "communication": communication(resolved, links, forward_seconds, limit),
        "usable_bytes": limit if gpu else None,
        "notes": resolved.notes(),
    }


def dry_run(config: Recipe, ranks: int) -> int:
    """Check everything that a single rank can check, with the first shard and this machine's
    devices, and print it.
    """
    resolved = resolve(config, ranks, is_rank=True)
    require_places(config)
    require_usable_gpu(os.environ)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else None
    resolved = choose_layout(resolved, memory_limit(resolved, device))
    show(make_plan(resolved))
    config = resolved.recipe
    folder, remote = config.run_dir / "checkpoints", config.checkpoint.remote
    stores = restore.Stores(
        LocalStorage(folder) if folder.is_dir() else None,
        open_storage(remote) if remote is not None else None,
    )
    # without a cache, the checkpoint is read but not fetched
    resumed = restore.select(config.checkpoint.resume, stores, cache=None, log=log)
    if resumed is not None:
        _, teacher = load_teachers(resolved.config, torch.device("cpu"))
        digests = {"teacher": teacher, "init_from": digest_of_base(config)}
        notes = compare_with(config, resumed, ranks, digests, resolved.chosen_values)
        print("\n".join([resumed.describe(), *notes]))
    source = resolved.source
    assert source is not None  # read_data
    print(f"data.train: {source.index.describe()}; the first caption: {source.caption_start!r}")
    print("nothing was started or written; run the same command without --dry-run to train")
    return 0


def show(plan: dict[str, Any]) -> None:
    console = Console(width=None if os.isatty(1) else 160)
    table = Table(title=f"{plan['name']}: {plan['model']}", box=None, show_header=False)
    for name, value in describe(plan):
        table.add_row(name, value)
    console.print(table)
    if plan["communication"]:
        show_communication(console, plan["communication"], plan["world_size"])
    if plan["usable_bytes"] is not None:
        console.print(f"{plan['usable_bytes'] / GIB:.0f} GiB of the GPU are usable")
    for note in plan["notes"]:
        print(f"note: {note}")


def show_communication(console: Console, found: dict[str, Any], world_size: int) -> None:
    waits, shown = found.get("exposed_seconds"), set()
    table = Table(title=f"communication of a step, {world_size} ranks", box=None)
    for head in ("place", "operator", "type", "ranks", "calls", "GB", "ms", "exposed ms"):
        table.add_column(head, justify="left" if head in ("place", "operator") else "right")
    for row in found["collectives"]:
        first = row["place"] not in shown  # exposed time belongs to the whole place
        shown.add(row["place"])
        table.add_row(
            row["place"],
            row["operator"],
            row["dtype"],
            str(row["ranks"]),
            f"{row['calls']:,}",
            f"{row['bytes'] / 1e9:,.3g}",
            f"{row['seconds'] * 1000:,.3g}" if waits else "",
            f"{waits[row['place']] * 1000:,.3g}" if waits and first else "",
        )
    console.print(table)
    if waits is None:
        console.print(
            f"{found['bytes'] / 1e9:,.4g} GB in all; --gpu and --network give the milliseconds"
        )
        return
    total = sum(row["seconds"] for row in found["collectives"])
    console.print(
        f"{found['bytes'] / 1e9:,.4g} GB in all, {found['between_nodes_bytes'] / 1e9:,.4g} GB "
        f"between nodes: {total:,.3g} s, of which {sum(waits.values()):,.3g} s are exposed and the "
        "rest is hidden under computation at 40% MFU"
    )
    row = found["recommended"]
    if row is not None:
        values = {key: json.dumps(value).strip('"') for key, value in row["keys"].items()}
        keys = " ".join(f"{key}={value}" for key, value in values.items())
        console.print(
            f"recommended, {row['seconds']:,.3g} s a step at 40% MFU with "
            f"{row['exposed_seconds']:,.3g} s exposed, {row['bytes'] / GIB:.1f} GiB: {keys}"
        )


def describe(plan: dict[str, Any]) -> list[tuple[str, str]]:
    memory = plan["memory_bytes"]
    parts = ", ".join(
        f"{name} {size / GIB:.2f}" for name, size in memory.items() if name != "total"
    )
    epochs = f", {plan['epochs']:.1f} epochs" if plan["epochs"] else ""
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
        *([("chosen", plan["reason"])] if plan["reason"] else []),
    ]
