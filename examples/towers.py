"""A model of your own, for `model.name`: a convolutional image tower, and a text tower over bytes.

    clip-train train recipes/demo_shapes.yaml run.name=towers model.name=examples.towers.Towers

docs/extending.md says what the module is called with, and which attributes are read.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from clip_train.models.blocks import outputs

LENGTH = 48


def byte_tokens(texts: list[str]) -> Tensor:
    """b texts -> int64 [b, LENGTH]: bytes of UTF-8 from 1 to 256, then zeros."""
    rows = [[byte + 1 for byte in text.encode()[:LENGTH]] for text in texts]
    return torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows], dtype=torch.int64)


class Residual(nn.Module):
    """x + conv(relu(norm(x)))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.norm(x).relu())


class ImageTower(nn.Module):
    """float [b, 3, S, S], normalized by the statistics below -> [b, D]"""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(3))
        self.proj = nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.proj(x.mean((2, 3)))


class Towers(nn.Module):
    """The parameters below `visual` are the image tower's, all others the text tower's."""

    embed_dim = 32  # D
    image_size = 32  # S
    image_mean = image_std = (0.5, 0.5, 0.5)
    context_length = LENGTH
    tokenizer = byte_tokens

    def __init__(self) -> None:
        super().__init__()
        self.visual = ImageTower(64, self.embed_dim)
        self.bytes = nn.Embedding(257, 64, padding_idx=0)
        self.mixer = nn.Conv1d(64, 64, 5, padding=2)
        self.text_projection = nn.Linear(64, self.embed_dim)
        # a buffer that no checkpoint holds
        self.register_buffer("places", torch.linspace(-1, 1, LENGTH)[:, None], persistent=False)
        self.logit_scale = nn.Parameter(torch.full((1,), math.log(1 / 0.07)))
        # with a bias: a parameter logit_bias, [1], and the attribute init_logit_bias

    def encode_text(self, texts: Tensor) -> Tensor:
        x = self.bytes(texts) + self.places.to(self.bytes.weight.dtype)  # [b, L, width]
        return self.text_projection(self.mixer(x.mT).relu().mean(2))

    def forward(self, images: Tensor | None, texts: Tensor | None, sample_seeds=None):
        image = None if images is None else self.visual(images)
        text = None if texts is None else self.encode_text(texts)
        return outputs(self, image, text)  # normalizes, and adds exp(logit_scale)
