"""The `optim` section of the recipe, and the torch optimizer it describes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import nn

from clip_train.optim.groups import decay_groups
from clip_train.settings import Settings


class OptimConfig(Settings):
    """The optimizer. The defaults are OpenCLIP's for a ViT."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw for training; sgd for checking gradients (Adam hides their scale)."""
    lr: PositiveFloat = 5e-4
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    eps: PositiveFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.2
    """Decoupled; on matrices and embeddings only (OpenCLIP's groups)."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Of sgd."""
    grad_clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; null to leave gradients alone."""


def build_optimizer(config: OptimConfig, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """`parameters`: (name, parameter) pairs, as from `named_parameters()`."""
    groups = decay_groups(parameters, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
