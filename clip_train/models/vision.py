"""The vision tower: a ViT with a class token. `b` images, `T` patches, `D` features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clip_train.models.blocks import Block, Transformer, normal_parameter
from clip_train.models.config import Architecture
from clip_train.models.dropout import PATCH_DROPOUT_ID, VISION_DROPOUT_ID, PatchDropout


class VisionTower(nn.Module):
    """Pixels to features that are not yet normalised. OpenCLIP leaves blocks and patches at torch's initialisation."""

    def __init__(
        self, architecture: Architecture, *, dropout: float, patch_dropout: float, activation_checkpointing: bool
    ) -> None:
        super().__init__()
        cfg, quick_gelu = architecture.vision_cfg, architecture.quick_gelu
        self.image_mean, self.image_std = architecture.image_mean, architecture.image_std
        self.image_size = cfg.image_size
        scale = cfg.width**-0.5
        self.conv1 = nn.Conv2d(3, cfg.width, cfg.patch_size, stride=cfg.patch_size, bias=False)
        self.class_embedding = normal_parameter(cfg.width, std=scale)
        self.positional_embedding = normal_parameter(1 + cfg.num_patches, cfg.width, std=scale)
        self.patch_dropout = PatchDropout(patch_dropout, PATCH_DROPOUT_ID)
        self.ln_pre = nn.LayerNorm(cfg.width)
        blocks = (
            Block(cfg, causal=False, quick_gelu=quick_gelu, dropout=dropout, dropout_id=VISION_DROPOUT_ID + 2 * i)
            for i in range(cfg.layers)
        )
        self.transformer = Transformer(blocks, activation_checkpointing)
        self.ln_post = nn.LayerNorm(cfg.width)
        self.proj = normal_parameter(cfg.width, architecture.embed_dim, std=scale)

    def forward(self, images: Tensor, sample_seeds: Tensor | None = None) -> Tensor:
        """uint8, or already normalised float, [b, 3, H, W]; int64 [b] -> [b, D]"""
        if images.shape[1:] != (3, self.image_size, self.image_size):
            raise ValueError(f"images must be [b, 3, {self.image_size}, {self.image_size}], not {list(images.shape)}")
        x = self.conv1(self._pixels(images)).flatten(2).transpose(1, 2)  # [b, T, width]
        class_token = self.class_embedding.to(x.dtype).expand(len(x), 1, -1)
        x = torch.cat([class_token, x], dim=1) + self.positional_embedding.to(x.dtype)  # [b, 1 + T, width]
        x = self.ln_pre(self.patch_dropout(x, sample_seeds))
        first = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return self.ln_post(self.transformer(x, sample_seeds, first)) @ self.proj

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
