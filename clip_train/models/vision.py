"""The vision tower: a ViT with a class token. `b` images, `T` patches, `D` features."""

import torch
from torch import Tensor, nn

from clip_train.models.blocks import Block, Transformer, linear, normal_parameter
from clip_train.models.config import Architecture
from clip_train.models.dropout import PATCH_DROPOUT_ID, VISION_DROPOUT_ID, PatchDropout


def normalised(channel: Tensor, mean: float, std: float, wide: torch.dtype) -> Tensor:
    """uint8 pixels of one channel, normalised in `wide`; float pixels are already normalised.

    The operations are torchvision's ToTensor and Normalize, in their order: equal to the last bit.
    """
    if channel.dtype != torch.uint8:
        return channel
    return channel.to(wide).div_(255).sub_(mean).div_(std)


def check_size(images: Tensor, size: int) -> None:
    if images.shape[1:] != (3, size, size):
        raise ValueError(f"images must be [b, 3, {size}, {size}], not {list(images.shape)}")


class PatchEmbedding(nn.Conv2d):
    """A convolution whose stride is its kernel, computed as a matrix product.

    It normalizes decoded pixels while it cuts them into patches: one kernel if compiled.
    """

    def __init__(self, architecture: Architecture) -> None:
        cfg = architecture.vision_cfg
        super().__init__(3, cfg.width, cfg.patch_size, stride=cfg.patch_size, bias=False)
        # Plain numbers: `model.to(bfloat16)` would round a buffer, and the pixels with it.
        self.image_mean, self.image_std = architecture.image_mean, architecture.image_std

    def forward(self, images: Tensor) -> Tensor:
        """uint8, or already normalised float, [b, 3, H, W] -> [b, T, width]"""
        side, dtype = self.kernel_size[0], self.weight.dtype
        rows, columns = images.shape[2] // side, images.shape[3] // side
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # [b, rows, columns, 3, side, side]: in the order of the kernel's weights
        patches = torch.empty(
            len(images), rows, columns, 3, side, side, dtype=dtype, device=images.device
        )
        for c, (mean, std) in enumerate(zip(self.image_mean, self.image_std, strict=True)):
            channel = normalised(images[:, c, : rows * side, : columns * side], mean, std, wide)
            patches[:, :, :, c] = (
                channel.unflatten(2, (columns, side)).unflatten(1, (rows, side)).transpose(2, 3)
            )
        return linear(patches.flatten(3).flatten(1, 2), self.weight.flatten(1))


class VisionTower(nn.Module):
    """Pixels to features that are not yet normalized.

    Blocks and patches have torch's initialization, as in OpenCLIP.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        dropout: float,
        patch_dropout: float,
        activation_checkpointing: bool,
    ) -> None:
        super().__init__()
        cfg, quick_gelu = architecture.vision_cfg, architecture.quick_gelu
        self.image_size = cfg.image_size
        scale = cfg.width**-0.5
        self.conv1 = PatchEmbedding(architecture)
        self.class_embedding = normal_parameter(cfg.width, std=scale)
        self.positional_embedding = normal_parameter(1 + cfg.num_patches, cfg.width, std=scale)
        self.patch_dropout = PatchDropout(patch_dropout, PATCH_DROPOUT_ID)
        self.ln_pre = nn.Identity() if cfg.no_ln_pre else nn.LayerNorm(cfg.width)
        blocks = (
            Block(cfg, quick_gelu=quick_gelu, dropout=dropout, dropout_id=VISION_DROPOUT_ID + 2 * i)
            for i in range(cfg.layers)
        )
        self.averaged, self.norm_after = cfg.pool_type == "avg", cfg.final_ln_after_pool
        self.transformer = Transformer(
            blocks, activation_checkpointing, one_token=not self.averaged
        )
        self.ln_post = nn.LayerNorm(cfg.width)
        self.proj = normal_parameter(cfg.width, architecture.embed_dim, std=scale)

    def forward(self, images: Tensor, sample_seeds: Tensor | None = None) -> Tensor:
        """uint8, or already normalised float, [b, 3, H, W]; int64 [b] -> [b, D]"""
        check_size(images, self.image_size)
        x = self.conv1(images)  # [b, T, width]
        class_token = self.class_embedding.to(x.dtype).expand(len(x), 1, -1)
        x = torch.cat([class_token, x], dim=1) + self.positional_embedding.to(
            x.dtype
        )  # [b, 1 + T, width]
        x = self.ln_pre(self.patch_dropout(x, sample_seeds))
        first = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        x = self.transformer(x, sample_seeds, first)  # [b, 1, width]; averaged: [b, 1 + T, width]
        if not self.averaged:
            return self.ln_post(x[:, 0]) @ self.proj
        x = x[:, 1:]  # the class token is no patch
        x = self.ln_post(x.mean(dim=1)) if self.norm_after else self.ln_post(x).mean(dim=1)
        return x @ self.proj
