"""The torch optimizer that the `optim` section describes, over OpenCLIP's two groups of parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from clip_train.optim.config import OptimConfig


def decay_groups(parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict]:
    """torch's groups, by OpenCLIP's rule: gains, biases and `logit_scale` without decay; matrices and embeddings with
    `weight_decay`; frozen parameters in neither."""
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, p in parameters:
        if p.requires_grad:
            # Under zero.Init a parameter is an empty placeholder: its true shape is in ds_shape.
            is_matrix = len(getattr(p, "ds_shape", p.shape)) >= 2
            groups[is_matrix and not any(part in name for part in ("bn", "ln", "bias", "logit_scale"))].append(p)
    return [{"params": found, "weight_decay": weight_decay * decays} for decays, found in groups.items() if found]


def build_optimizer(config: OptimConfig, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """`parameters`: (name, parameter) pairs, as from `named_parameters()`."""
    groups = decay_groups(parameters, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    # One kernel on a GPU. On a CPU the fused one rounds a tensor's last elements otherwise than those before, by which
    # a run would know how its parameters are laid out.
    fused = torch.cuda.is_available()
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
