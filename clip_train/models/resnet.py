"""CLIP's ResNet (2103.00020), under OpenCLIP's names. `b` images, `D` features.

Three convolutions make the stem; what strides is preceded by a mean over its window; attention makes a feature of the
last feature map, asked by the map's mean.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clip_train.models.batch_norm import BatchNorm2d
from clip_train.models.blocks import normal_parameter
from clip_train.models.config import Architecture
from clip_train.models.vision import check_size, normalised_images

EXPANSION = 4  # a block's outer channels, of its inner ones
STRIDE = 32  # pixels of the image to one of the last feature map


def norm(kind: str, channels: int) -> nn.Module:
    """group: 32 groups, or as many as divide the channels."""
    return (
        BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(math.gcd(32, channels), channels)
    )


def convolution(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)


class Bottleneck(nn.Module):
    """x + conv(conv(conv(x))); x itself is scaled down or widened where need be."""

    def __init__(self, channels: int, inner: int, stride: int, kind: str) -> None:
        super().__init__()
        outer = EXPANSION * inner
        self.conv1, self.bn1 = convolution(channels, inner, 1), norm(kind, inner)
        self.conv2, self.bn2 = convolution(inner, inner, 3), norm(kind, inner)
        self.avgpool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.conv3, self.bn3 = convolution(inner, outer, 1), norm(kind, outer)
        nn.init.zeros_(self.bn3.weight)  # type: ignore[arg-type]  # a block begins as the identity
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or channels != outer:
            parts = [nn.AvgPool2d(stride), convolution(channels, outer, 1), norm(kind, outer)]
            self.downsample = nn.Sequential(OrderedDict(zip(("-1", "0", "1"), parts, strict=True)))

    def forward(self, x: Tensor) -> Tensor:
        """[b, channels, height, width] -> [b, 4 inner, height / stride, width / stride]"""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.avgpool(F.relu(self.bn2(self.conv2(y)), inplace=True))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class AttentionPool2d(nn.Module):
    """One token, the mean of all, asks for attention."""

    def __init__(self, side: int, width: int, heads: int, embed_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.positional_embedding = normal_parameter(side**2 + 1, width, std=width**-0.5)
        self.k_proj, self.q_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.c_proj = nn.Linear(width, embed_dim)
        for each in (self.k_proj, self.q_proj, self.v_proj, self.c_proj):
            nn.init.normal_(each.weight, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[b, width, side, side] -> [b, D]"""
        x = x.flatten(2).transpose(1, 2)  # [b, side^2, width]
        x = torch.cat([x.mean(dim=1, keepdim=True), x], dim=1) + self.positional_embedding.to(
            x.dtype
        )
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(
                1, 2
            )  # [b, heads, 1 or 1 + side^2, width / heads]
            for part in (self.q_proj(x[:, :1]), self.k_proj(x), self.v_proj(x))
        )
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(1))


class ResNetTower(nn.Module):
    """Pixels to features that are not yet normalised."""

    def __init__(self, architecture: Architecture, *, activation_checkpointing: bool) -> None:
        super().__init__()
        cfg = architecture.vision_cfg
        self.image_size, self.activation_checkpointing = cfg.image_size, activation_checkpointing
        self.image_mean, self.image_std = architecture.image_mean, architecture.image_std
        width, half = cfg.width, cfg.width // 2
        self.conv1, self.bn1 = convolution(3, half, 3, stride=2), norm(cfg.norm, half)
        self.conv2, self.bn2 = convolution(half, half, 3), norm(cfg.norm, half)
        self.conv3, self.bn3 = convolution(half, width, 3), norm(cfg.norm, width)
        channels = width
        for i, depth in enumerate(cfg.stages):
            inner = width << i
            blocks = nn.ModuleList()  # its members are an engine's units
            for j in range(depth):
                blocks.append(Bottleneck(channels, inner, 2 if i and not j else 1, cfg.norm))
                channels = EXPANSION * inner
            self.add_module(f"layer{i + 1}", blocks)
        self.attnpool = AttentionPool2d(
            cfg.image_size // STRIDE, channels, cfg.heads, architecture.embed_dim
        )

    def blocks(self) -> Iterator[nn.Module]:
        for i in range(1, 5):
            yield from self.get_submodule(f"layer{i}").children()

    def forward(self, images: Tensor, sample_seeds: Tensor | None = None) -> Tensor:
        """uint8, or already normalised float, [b, 3, H, W]; int64 [b], which it does not need -> [b, D]"""
        check_size(images, self.image_size)
        wide = torch.float64 if self.conv1.weight.dtype == torch.float64 else torch.float32
        x = normalised_images(images, self.image_mean, self.image_std, wide).to(
            self.conv1.weight.dtype
        )
        for i in (1, 2, 3):
            x = F.relu(getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(x)), inplace=True)
        x = F.avg_pool2d(x, 2)  # [b, width, H / 4, W / 4]
        for block in self.blocks():
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return self.attnpool(x)


def resnet_flops(architecture: Architecture) -> float:
    """Of one image going forward, 2 for each MAC."""
    cfg = architecture.vision_cfg
    width, half, pixels = cfg.width, cfg.width // 2, (cfg.image_size / 2) ** 2
    macs = pixels * 9 * (3 * half + half * half + half * width)
    channels, pixels = width, pixels / 4
    for i, depth in enumerate(cfg.stages):
        inner = width << i
        for j in range(depth):
            before = pixels
            pixels /= 4 if i and not j else 1
            macs += before * (channels * inner + 9 * inner**2) + pixels * inner * EXPANSION * inner
            macs += pixels * channels * EXPANSION * inner * (j == 0)  # x itself
            channels = EXPANSION * inner
    tokens = pixels + 1
    macs += (
        (1 + 2 * tokens) * channels**2 + 2 * tokens * channels + channels * architecture.embed_dim
    )
    return 2.0 * macs
