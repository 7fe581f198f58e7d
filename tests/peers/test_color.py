"""Colour jitter and gray scale against torchvision's own, on Pillow images as OpenCLIP trains with them: equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import tests.peers.torchvision_shim  # noqa: F401  before torchvision
from clip_train.data.images import TrainTransform, adjust_color

pytestmark = pytest.mark.peer


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "hue"])
def test_every_operation(name):
    from torchvision.transforms import functional as F

    operation = ["brightness", "contrast", "saturation", "hue"].index(name)
    rng = np.random.default_rng(0)
    for size in ((64, 48), (1, 1)):
        image = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
        for factor in (
            (-0.5, -0.31, -0.01, 0.0, 0.27, 0.5) if name == "hue" else (0.0, 0.4, 1.0, 1.32, 3.0)
        ):
            theirs = getattr(F, f"adjust_{name}")(image, factor)
            assert np.array_equal(
                np.asarray(adjust_color(image, operation, factor)), np.asarray(theirs)
            ), factor


def test_gray_scale():
    from torchvision.transforms import Grayscale

    pixels = np.random.default_rng(1).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    whole = TrainTransform(32, (1.0, 1.0), (1.0, 1.0), gray_scale_prob=1.0)
    ours = whole(torch.from_numpy(pixels).permute(2, 0, 1), 0)
    theirs = Grayscale(num_output_channels=3)(Image.fromarray(pixels))
    assert np.array_equal(ours.permute(1, 2, 0).numpy(), np.asarray(theirs))
