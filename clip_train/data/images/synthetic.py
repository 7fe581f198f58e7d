"""`data.kind: synthetic`: noise with a caption, by the sample's seed alone, to measure a trainer without any file.

It is one shard that nobody opens, `synthetic://N` of N samples: order, epochs, workers and resumes are those of others.
"""

from __future__ import annotations

import functools
import random

import torch
from torch import Tensor

OFFSETS = (
    1 << 20
)  # at so many places an image begins in one row of noise: copying is all that one costs
WORDS = (
    "a", "the", "of", "on", "in", "with", "and", "photo", "painting", "small", "large", "old", "red", "green", "blue",
    "black", "white", "cat", "dog", "bird", "horse", "boat", "car", "train", "street", "tree", "river", "mountain",
)  # fmt: skip
FEWEST, MOST = 4, 24  # words of a caption


def synthetic_image(seed: int, image_size: int) -> Tensor:
    """uint8 [3, S, S], to be copied: it lies in memory that images share."""
    size = 3 * image_size**2
    at = seed % OFFSETS
    return _noise(size + OFFSETS)[at : at + size].view(3, image_size, image_size)


def synthetic_caption(seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choices(WORDS, k=rng.randint(FEWEST, MOST)))


@functools.cache
def _noise(size: int) -> Tensor:
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
