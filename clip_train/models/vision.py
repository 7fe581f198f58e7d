"""The vision tower: a ViT with a class token. `b` images, `T` patches, `D` features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clip_train.models.blocks import (
    BlockInit,
    LayerNorm,
    OneToken,
    Transformer,
    fill_parameter,
    new_parameter,
    normal,
    uniform,
)
from clip_train.models.config import Architecture
from clip_train.models.dropout import PatchDropout

# Streams of random bits: each use of them in the model has an id of its own.
PATCH_DROPOUT_ID = 1
VISION_DROPOUT_ID = 1 << 16
TEXT_DROPOUT_ID = 2 << 16


class PatchEmbedding(nn.Conv2d):
    """Non-overlapping patches -> vectors, at torch's default initialisation."""

    def reset_parameters(self) -> None:
        fan_in = self.in_channels * self.kernel_size[0] * self.kernel_size[1]
        fill_parameter(self.weight, uniform(fan_in**-0.5))


class VisionTower(nn.Module):
    """Pixels to features that are not yet normalised."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        dropout: float = 0.0,
        patch_dropout: float = 0.0,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        cfg = architecture.vision_cfg
        self.image_mean, self.image_std = architecture.image_mean, architecture.image_std
        self.image_size = cfg.image_size
        scale = cfg.width**-0.5
        self.conv1 = PatchEmbedding(3, cfg.width, cfg.patch_size, stride=cfg.patch_size, bias=False)
        self.class_embedding = new_parameter((cfg.width,), normal(scale))
        self.positional_embedding = new_parameter((1 + cfg.num_patches, cfg.width), normal(scale))
        self.patch_dropout = PatchDropout(patch_dropout, PATCH_DROPOUT_ID)
        self.ln_pre = LayerNorm(cfg.width)
        self.transformer = Transformer(
            cfg.width,
            cfg.heads,
            cfg.layers,
            cfg.mlp_width,
            causal=False,
            quick_gelu=architecture.quick_gelu,
            dropout=dropout,
            first_dropout_id=VISION_DROPOUT_ID,
            init=BlockInit(),  # OpenCLIP leaves this tower at torch's defaults
            activation_checkpointing=activation_checkpointing,
        )
        self.ln_post = LayerNorm(cfg.width)
        self.proj = new_parameter((cfg.width, architecture.embed_dim), normal(scale))

    def forward(self, images: Tensor, sample_seeds: Tensor | None = None) -> Tensor:
        """uint8, or already normalised float, [b, 3, H, W]; int64 [b] -> [b, D]"""
        if images.shape[1:] != (3, self.image_size, self.image_size):
            raise ValueError(f"images must be [b, 3, {self.image_size}, {self.image_size}], not {list(images.shape)}")
        x = self.conv1(self._pixels(images)).flatten(2).transpose(1, 2)  # [b, T, width]
        class_token = self.class_embedding.to(x.dtype).expand(len(x), 1, -1)
        x = torch.cat([class_token, x], dim=1) + self.positional_embedding.to(x.dtype)  # [b, 1 + T, width]
        x = self.ln_pre(self.patch_dropout(x, sample_seeds))
        return self.ln_post(self.transformer(x, sample_seeds, OneToken())) @ self.proj

    def _pixels(self, images: Tensor) -> Tensor:
        dtype = self.conv1.weight.dtype
        if images.dtype != torch.uint8:
            return images.to(dtype)
        # Plain numbers, not buffers: `model.to(bfloat16)` would round a buffer, and the pixels with it.
        # The operations are torchvision's ToTensor and Normalize, in their order: equal to the last bit.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        out = torch.empty(images.shape, dtype=dtype, device=images.device)
        channel = torch.empty_like(images[:, 0], dtype=wide)  # one for all, in place: a third of the time on a CPU
        for c, (mean, std) in enumerate(zip(self.image_mean, self.image_std, strict=True)):
            out[:, c] = channel.copy_(images[:, c]).div_(255).sub_(mean).div_(std)
        return out
