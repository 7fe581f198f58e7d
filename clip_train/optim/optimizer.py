"""The torch optimizer that the `optim` section describes, over OpenCLIP's two groups of parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from clip_train.optim.config import OptimConfig


def decays(name: str, parameter: nn.Parameter) -> bool:
    """OpenCLIP's rule: gains, biases and `logit_scale` do not decay; matrices and embeddings do."""
    # Under zero.Init a parameter is an empty placeholder: its true shape is in ds_shape.
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return not (len(shape) < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale")))


def decay_groups(parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict]:
    """Two torch parameter groups: without decay and with `weight_decay`; frozen parameters in neither."""
    trainable = [(name, p) for name, p in parameters if p.requires_grad]
    groups = [
        {"params": [p for name, p in trainable if not decays(name, p)], "weight_decay": 0.0},
        {"params": [p for name, p in trainable if decays(name, p)], "weight_decay": weight_decay},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(config: OptimConfig, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """`parameters`: (name, parameter) pairs, as from `named_parameters()`."""
    groups = decay_groups(parameters, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
