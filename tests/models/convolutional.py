"""A CLIP whose image tower has batch norms: plain convolutions of torch's, behind the model's interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clip_train.models.batch_norm import BatchNorm2d
from clip_train.models.clip import CLIP
from clip_train.models.openclip.config import IMAGE_MEAN, IMAGE_STD
from tests.models.small import small_architecture

CHANNELS = 8
STRIDES = (2, 1, 2)  # of the blocks


def norm(kind: str) -> nn.Module:
    return BatchNorm2d(CHANNELS) if kind == "batch" else nn.GroupNorm(4, CHANNELS)


class Block(nn.Module):
    """relu(norm(convolution(x)))"""

    def __init__(self, channels: int, stride: int, kind: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, CHANNELS, 3, stride, padding=1, bias=False)
        self.bn = norm(kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).relu()


class Convolutions(nn.Module):
    """Blocks, the mean over all pixels, and a projection."""

    def __init__(self, embed_dim: int, kind: str, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        channels = (3, *[CHANNELS] * len(STRIDES))
        self.blocks = nn.ModuleList(  # its members are an engine's units
            Block(before, stride, kind) for before, stride in zip(channels, STRIDES, strict=False)
        )
        self.proj = nn.Linear(CHANNELS, embed_dim)

    def forward(self, images: Tensor, sample_seeds: Tensor | None = None) -> Tensor:
        dtype = self.proj.weight.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        mean, std = (
            torch.tensor(v, dtype=wide, device=images.device).view(3, 1, 1)
            for v in (IMAGE_MEAN, IMAGE_STD)
        )
        x = ((images.to(wide) / 255 - mean) / std).to(dtype)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.proj(x.mean((2, 3)))


def convolutional_clip(kind: str = "batch", checkpointing: bool = False) -> CLIP:
    """Images of any size, 16 as everywhere here; drawn from torch's generator."""
    architecture = small_architecture()
    model = CLIP(architecture, activation_checkpointing=checkpointing)
    tower: Any = Convolutions(architecture.embed_dim, kind, checkpointing)
    model.visual = tower
    return model
