"""torchvision's ColorJitter and Grayscale on Pillow's operations, as OpenCLIP's `--aug-cfg` has them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor

ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
HUE = len(ENHANCERS)  # the fourth operation


def augment_color(
    image: Tensor,
    rng: random.Random,
    color_jitter: Sequence[float] | None,
    color_jitter_prob: float,
    gray_scale_prob: float,
) -> Tensor:
    """uint8 [3, H, W] -> uint8 [3, H, W]: jittered with one probability, then gray with the other.

    color_jitter: as in `operations`; None: never.
    """
    jittered = rng.random() < color_jitter_prob and color_jitter is not None
    gray = rng.random() < gray_scale_prob
    if not jittered and not gray:
        return image
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    if jittered and color_jitter is not None:
        picture = jitter(picture, rng, color_jitter)
    if gray:
        picture = picture.convert("L").convert("RGB")
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def jitter(image: Image.Image, rng: random.Random, strengths: Sequence[float]) -> Image.Image:
    """torchvision's ColorJitter."""
    for operation, factor in operations(rng, strengths):
        image = adjust(image, operation, factor)
    return image


def operations(rng: random.Random, strengths: Sequence[float]) -> list[tuple[int, float]]:
    """What it does, in random order, each by a factor of its own.

    strengths: of brightness, contrast and saturation, whose factors are uniform in [max(0, 1 - s), 1 + s], and of hue,
        whose is in [-s, s]; 0 leaves an operation out.
    """
    order = rng.sample(range(HUE + 1), HUE + 1)
    factors = [rng.uniform(max(0.0, 1 - s), 1 + s) for s in strengths[:HUE]]
    factors.append(rng.uniform(-strengths[HUE], strengths[HUE]))
    return [(operation, factors[operation]) for operation in order if strengths[operation]]


def adjust(image: Image.Image, operation: int, factor: float) -> Image.Image:
    """torchvision's adjust_brightness (0), adjust_contrast (1) and adjust_saturation (2), of which 1 changes nothing,
    and adjust_hue (3), which turns it by `factor` of a whole circle."""
    if operation < HUE:
        return ENHANCERS[operation](image).enhance(factor)
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(each + int(factor * 255)) % 256 for each in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")
