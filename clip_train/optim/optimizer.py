"""The torch optimizer that the `optim` section describes, over groups of parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch
from torch import nn

from clip_train.engine import MovingAverage
from clip_train.models.freeze import depths, matching
from clip_train.optim.config import OptimConfig
from clip_train.optim.imported import find_class, try_out
from clip_train.optim.lion_lamb import LAMB, Lion
from clip_train.optim.muon import MuonAdamW, is_hidden

# elements: each for itself, so that parameters may be cut and joined. norms: of whole parameters, which a sum over
# ranks gives where each lies apart. parameters: whole ones.
Needs = Literal["elements", "norms", "parameters"]


def lr_factors(config: OptimConfig, names: Collection[str]) -> dict[str, float]:
    """What the learning rate of each parameter is multiplied by. UserError for a pattern that matches none."""
    given, depth = config.lr_multipliers, depths(names)
    written = {glob: factor if factor % 1 else int(factor) for glob, factor in given.items()}
    matched = {glob: matching("optim.lr_multipliers", written, glob, names) for glob in given}
    first = {
        name: next((given[glob] for glob in given if name in matched[glob]), 1.0) for name in names
    }
    return {name: first[name] * config.layer_decay ** depth[name] for name in names}


def spared(config: OptimConfig, names: Collection[str]) -> set[str]:
    """Parameters without decay whatever their shape: OpenCLIP's rule, and `no_decay`. UserError as above."""
    found = {
        name for name in names if any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
    }
    return found.union(
        *(matching("optim.no_decay", config.no_decay, glob, names) for glob in config.no_decay)
    )


def parameter_groups(
    config: OptimConfig, parameters: Iterable[tuple[str, nn.Parameter]]
) -> list[dict]:
    """torch's groups, each with its `weight_decay`, `lr_factor` and, for muon, whether it holds hidden matrices; frozen
    parameters are in none.

    Matrices and embeddings decay, vectors and what is `spared` do not: OpenCLIP's two groups, unless factors differ.
    """
    named = dict(parameters)
    factors, without = lr_factors(config, named), spared(config, named)
    groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    for name, p in named.items():
        if p.requires_grad:
            # Under zero.Init a parameter is an empty placeholder: its true shape is in ds_shape.
            is_matrix = len(getattr(p, "ds_shape", p.shape)) >= 2
            by_muon = config.name == "muon" and is_hidden(name, p)
            groups.setdefault(
                (is_matrix and name not in without, factors[name], by_muon), []
            ).append(p)
    return [
        {
            "params": found,
            "weight_decay": config.weight_decay * decays,
            "lr_factor": factor,
            "muon": by_muon,
        }
        for (decays, factor, by_muon), found in sorted(groups.items(), key=lambda group: group[0])
    ]


def build_optimizer(
    config: OptimConfig, parameters: Iterable[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """`parameters`: (name, parameter) pairs, as from `named_parameters()`."""
    groups = parameter_groups(config, parameters)
    lr, betas = config.lr, (config.beta1, config.beta2)
    # One kernel on a GPU. On a CPU the fused one rounds a tensor's last elements otherwise than those before, by which
    # a run would know how its parameters are laid out.
    adam: dict[str, Any] = {"betas": betas, "eps": config.eps, "fused": torch.cuda.is_available()}
    match config.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr, **adam)
        case "sgd":
            return torch.optim.SGD(groups, lr, momentum=config.momentum)
        case "lion":
            return Lion(groups, lr, betas)
        case "lamb":
            return LAMB(groups, lr, betas, config.eps)
        case "muon":
            return MuonAdamW(groups, lr, **adam)
    return find_class(config.name)(groups, lr=lr, **config.options)  # type: ignore[call-arg]


def needs(config: OptimConfig) -> Needs:
    """What an update has to see at once. UserError for an imported optimizer that cannot be used."""
    if config.is_imported:
        return (
            "elements"
            if try_out(config.name, config.lr, config.options).elementwise
            else "parameters"
        )
    return (
        "norms" if config.name == "lamb" else "parameters" if config.name == "muon" else "elements"
    )


def moment_bytes(config: OptimConfig) -> int:
    """Of the optimizer's state and the moving average, for each trained element (of muon at most)."""
    average = 0 if config.ema_decay is None else 4
    if config.is_imported:
        return average + 4 * try_out(config.name, config.lr, config.options).slots
    return average + {"lion": 4, "sgd": 4 if config.momentum else 0}.get(config.name, 8)


def moving_average(config: OptimConfig) -> MovingAverage | None:
    """For `Engine.ema`."""
    return None if config.ema_decay is None else MovingAverage(config.ema_decay, config.ema_warmup)
