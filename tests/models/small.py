"""A model of two layers that runs in milliseconds, and inputs for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clip_train.models.clip import CLIP
from clip_train.models.config import Architecture, parse_architecture


def small_architecture(**changes: Any) -> Architecture:
    content = {
        "embed_dim": 24,
        "vision_cfg": {
            "image_size": 16,
            "layers": 2,
            "width": 32,
            "head_width": 16,
            "patch_size": 4,
        },
        "text_cfg": {"context_length": 8, "vocab_size": 100, "width": 20, "heads": 2, "layers": 2},
    }
    return parse_architecture({**content, **changes}, "test")


def small_model(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> CLIP:
    torch.manual_seed(seed)
    return CLIP(options.pop("architecture", small_architecture()), **options).to(dtype)


def inputs(num: int, seed: int = 1, size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [num, 3, size, size], int64 [num, 8] that end at token 99 and are padded with 0, int64 [num]"""
    g = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (num, 3, size, size), dtype=torch.uint8, generator=g)
    texts = torch.randint(1, 99, (num, 8), generator=g)
    for i in range(num):
        end = 2 + i % 6
        texts[i, end], texts[i, end + 1 :] = 99, 0
    return images, texts, torch.randint(-(2**62), 2**62, (num,), generator=g)
