"""The communication part of `clip-train plan`: bytes as a recorder counts them, milliseconds over
the links of GPUs and nodes, and the engine with the least exposed time."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from operator import itemgetter
from typing import Any

import torch

from clip_train.engines.compile import units
from clip_train.engines.config import KINDS, describe_sharding
from clip_train.engines.traffic import Collective, Links, Shapes
from clip_train.errors import UserError
from clip_train.memory.plan import BACKWARD, RECOMPUTED
from clip_train.models.clip import build_model
from clip_train.models.freeze import depths, freeze, frozen_towers
from clip_train.optim.muon import assign_matrices
from clip_train.optim.optimizer import parameter_groups
from clip_train.recipe.memory import choose_layout
from clip_train.recipe.resolve import Resolved, engine_mistakes
from clip_train.task import IMAGE_TEXT

PLACES = ("forward", "loss", "backward", "last backward", "step")
SMALLEST = 1024  # bytes of a call that counts
NETWORK_SHARE = 0.9  # of the adapters' nominal rate


def network_bytes(text: str) -> float:
    """Bytes a second of `--network`: of a node, all of its adapters together."""
    found = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)Gb", text)
    if found is None:
        raise UserError(
            f"--network ({text}) must be the Gbit/s of a node, such as 400Gb, or 8x400Gb for eight "
            "adapters"
        )
    return int(found[1] or 1) * float(found[2]) * 1e9 / 8 * NETWORK_SHARE


def shapes_of(resolved: Resolved) -> Shapes:
    config = resolved.config
    with torch.device("meta"):
        model = build_model(resolved.architecture)
    freeze(model, config.model)
    inside = [[*unit.parameters()] for unit in units(model)]
    others = [p for p in model.parameters() if p not in set(chain(*inside))]
    groups = parameter_groups(config.optim, model.named_parameters())
    names = {p: name for name, p in model.named_parameters()}
    depth, frozen = depths(names.values()), frozen_towers(config.model, resolved.architecture)
    # tower, and layers below its top
    places = {p: (IMAGE_TEXT.group(name), depth[name]) for p, name in names.items()}
    units_at = [places[part[0]] for part in inside]
    trained = {places[p] for p in names if p.requires_grad}
    return Shapes(
        [*inside, others],
        [sum(p.numel() for p in g["params"]) for g in groups],
        [*(tower not in frozen for tower, _ in units_at), True],
        [
            *(any(t == tower and d >= below for t, d in trained) for tower, below in units_at),
            True,
        ],
        {name: shape for g in groups if g["muon"] for name, shape in g["shapes"].items()},
    )


def of_loss(resolved: Resolved) -> Iterator[Collective]:
    """Features, and the sums of the softmaxes. A loss by import path counts as info_nce."""
    config, plan, loss = resolved.config, resolved.plan, resolved.config.loss
    W, rows = plan.world_size, plan.world_size * plan.per_rank  # padded
    if loss.exchange == "ring":  # texts, and their gradients, which return
        size = plan.per_rank * resolved.architecture.embed_dim
        yield Collective("loss", "send", "fp32", size, W, 2 * W - 1)
        if loss.kind == "info_nce":  # a round before, and sums over columns in both
            yield Collective("loss", "send", "fp64", plan.per_rank, W, W)
            yield Collective("loss", "send", "fp32", size + plan.per_rank, W, W - 1)
        return
    banked = loss.bank_size if loss.kind == "memory_bank" else 0
    if banked:
        yield Collective("loss", "all_gather", "int64", rows, W)
    for width in [resolved.architecture.embed_dim, *config.teacher_widths]:
        yield Collective("loss", "all_gather", "fp32", 2 * rows * width, W)
        if loss.kind != "sigmoid":
            yield Collective("loss", "all_reduce", "fp64", 2 * (plan.global_size + banked), W)


def of_optimizer(resolved: Resolved, shapes: Shapes) -> Iterator[Collective]:
    """Muon's: each round's matrices to their owners, and back. At ZeRO 1 and 2 most of these bytes
    stay on their rank."""
    engine, matrices = resolved.config.engine, shapes.matrices
    S = 1 if engine.zero_stage == 0 else engine.shard_ranks or resolved.plan.world_size
    for names in assign_matrices(matrices, [{}] * S):
        sizes = [math.prod(matrices.get(name, (0,))) for name in names]
        # rank 0 gathers the first, and sends its part of each
        size = max(sizes[0], sum(sizes) // S)
        yield Collective("step", "all_to_all", "bf16", size, S, 2)


def collectives(resolved: Resolved, shapes: Shapes) -> list[Collective]:
    """All of one step that send at least 1 KB."""
    engine = resolved.config.engine
    sent = engine.package.traffic(engine, resolved.plan, shapes)
    return [
        call
        for call in chain(sent, of_loss(resolved), of_optimizer(resolved, shapes))
        if call.ranks > 1 and call.times and call.call_bytes >= SMALLEST
    ]


def table(calls: list[Collective], links: Links | None) -> list[dict[str, Any]]:
    """A row for each operator in each place; seconds where the links are known."""
    rows: dict[tuple, dict[str, Any]] = {}
    for call in sorted(calls, key=lambda call: PLACES.index(call.place)):
        key = call.place, call.operator, call.dtype, call.ranks
        row = rows.setdefault(key, {
            "place": call.place,
            "operator": call.operator,
            "dtype": call.dtype,
            "ranks": call.ranks,
            "calls": 0,
            "bytes": 0,
            "seconds": 0.0,
        })  # fmt: skip
        row["calls"] += call.times
        row["bytes"] += call.bytes
        row["seconds"] += call.times * links.seconds(call) if links else 0.0
    return [*rows.values()]


def exposed(
    resolved: Resolved, calls: list[Collective], links: Links, forward_seconds: float
) -> dict[str, float]:
    """Seconds of a step in which GPUs wait for each place's collectives.

    forward_seconds: of one sample.
    """
    micro = resolved.plan.micro_size * forward_seconds
    again = RECOMPUTED[resolved.config.engine.recompute]
    backward = micro * (BACKWARD + again)
    computation = {"forward": micro, "backward": backward, "last backward": backward}
    out = {}
    for place in PLACES:
        its = [call for call in calls if call.place == place]
        passes = max((call.times for call in its), default=0)
        out[place] = passes * links.exposed(its, computation.get(place, 0.0))
    return out


def alternatives(
    resolved: Resolved, shapes: Shapes, limit: float, links: Links, forward_seconds: float
) -> list[dict[str, Any]]:
    """Every engine, stage and group that the recipe allows, each with its best micro-batches, the
    fastest first. limit: bytes of a rank."""
    rows = []
    recipe = resolved.recipe.updated(batch={"micro_size": "auto", "kept_graphs": "auto"})
    for kind, stage, ranks in product(KINDS, range(4), (None, links.per_node)):
        held = {"kind": kind, "zero_stage": stage, "shard_ranks": ranks}
        config = resolved.config.updated(engine={**held, "activation_checkpointing": "auto"})
        W, engine = resolved.plan.world_size, config.engine
        offloads_nothing = stage == 0 and engine.offload != "none"
        if offloads_nothing or ranks == W or engine_mistakes(config, engine, resolved.plan, W):
            continue
        try:
            other = choose_layout(replace(resolved, recipe=recipe, config=config), limit)
        except UserError:  # nothing fits
            continue
        assert other.layout is not None
        calls = collectives(other, shapes)
        waits = sum(exposed(other, calls, links, forward_seconds).values())
        sends = sum(call.times * links.seconds(call) for call in calls)
        forwards = other.layout.forwards_per_sample + BACKWARD
        keys = {**held, **other.config.engine.model_dump(include={"activation_checkpointing"})}
        rows.append({
            "engine": describe_sharding(engine.model_dump()),
            "keys": {
                **{f"engine.{key}": value for key, value in keys.items()},
                "batch.micro_size": other.plan.micro_size,
                "batch.kept_graphs": other.plan.kept_graphs,
            },
            "bytes": other.layout.bytes,
            "communication_seconds": sends,
            "exposed_seconds": waits,
            "seconds": other.plan.per_rank * forwards * forward_seconds + waits,
        })  # fmt: skip
    return sorted(rows, key=itemgetter("seconds"))


def communication(
    resolved: Resolved, links: Links | None, forward_seconds: float, limit: float | None
) -> dict[str, Any] | None:
    """The part of a plan; None on one rank. Seconds are known where the links are."""
    plan = resolved.plan
    if plan.world_size == 1:
        return None
    shapes = shapes_of(resolved)
    calls = collectives(resolved, shapes)
    out: dict[str, Any] = {
        "collectives": table(calls, links),
        "bytes": sum(call.bytes for call in calls),
    }
    if links is not None and limit is not None:
        out["between_nodes_bytes"] = sum(call.bytes for call in calls if links.crosses(call))
        out["exposed_seconds"] = exposed(resolved, calls, links, forward_seconds)
        rows = alternatives(resolved, shapes, limit, links, forward_seconds)
        as_fast = [row for row in rows if row["seconds"] <= 1.01 * rows[0]["seconds"]]
        out["alternatives"] = rows
        # the least dependent on overlap
        out["recommended"] = min(as_fast, key=itemgetter("communication_seconds"), default=None)
    return out
