"""The torch optimizer that the `optim` section describes, over groups of parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from clip_train.models.freeze import depths, matching
from clip_train.optim.config import OptimConfig


def lr_factors(config: OptimConfig, names: Collection[str]) -> dict[str, float]:
    """What the learning rate of each parameter is multiplied by. UserError for a pattern that matches none."""
    given, depth = config.lr_multipliers, depths(names)
    written = {glob: factor if factor % 1 else int(factor) for glob, factor in given.items()}
    matched = {glob: matching("optim.lr_multipliers", written, glob, names) for glob in given}
    first = {name: next((given[glob] for glob in given if name in matched[glob]), 1.0) for name in names}
    return {name: first[name] * config.layer_decay ** depth[name] for name in names}


def spared(config: OptimConfig, names: Collection[str]) -> set[str]:
    """Parameters without decay whatever their shape: OpenCLIP's rule, and `no_decay`. UserError as above."""
    found = {name for name in names if any(part in name for part in ("bn", "ln", "bias", "logit_scale"))}
    return found.union(*(matching("optim.no_decay", config.no_decay, glob, names) for glob in config.no_decay))


def parameter_groups(config: OptimConfig, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict]:
    """torch's groups, each with its `weight_decay` and `lr_factor`; frozen parameters are in none.

    Matrices and embeddings decay, vectors and what is `spared` do not: OpenCLIP's two groups, unless factors differ.
    """
    named = dict(parameters)
    factors, without = lr_factors(config, named), spared(config, named)
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, p in named.items():
        if p.requires_grad:
            # Under zero.Init a parameter is an empty placeholder: its true shape is in ds_shape.
            is_matrix = len(getattr(p, "ds_shape", p.shape)) >= 2
            groups.setdefault((is_matrix and name not in without, factors[name]), []).append(p)
    return [
        {"params": found, "weight_decay": config.weight_decay * decays, "lr_factor": factor}
        for (decays, factor), found in sorted(groups.items(), key=lambda group: group[0])
    ]


def build_optimizer(config: OptimConfig, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """`parameters`: (name, parameter) pairs, as from `named_parameters()`."""
    groups = parameter_groups(config, parameters)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    # One kernel on a GPU. On a CPU the fused one rounds a tensor's last elements otherwise than those before, by which
    # a run would know how its parameters are laid out.
    fused = torch.cuda.is_available()
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
