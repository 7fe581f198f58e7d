"""Colour jitter and gray scale: torchvision's formulas in float64, and what is drawn, from the sample's seed alone."""

from __future__ import annotations

import collections
import colorsys
import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image

from clip_train.data import images
from clip_train.data.images import TrainTransform
from clip_train.errors import UserError

FACTORS = (0.0, 0.3, 0.9, 1.0, 1.4, 2.5)


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    """uint8 [24, 24, 3]: noise over the whole range, with some grays."""
    out = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    out[0] = out[0, :, :1]
    return out


def adjusted(pixels: np.ndarray, operation: int, factor: float) -> np.ndarray:
    return np.asarray(images.adjust_color(Image.fromarray(pixels), operation, factor)).astype(float)


def gray(pixels: np.ndarray) -> np.ndarray:
    """ITU-R 601: [H, W, 1] of [H, W, 3]."""
    return (pixels.astype(float) @ [0.299, 0.587, 0.114])[..., None]


@pytest.mark.parametrize("factor", FACTORS)
def test_brightness_contrast_and_saturation_are_blends(pixels, factor):
    """torchvision: clip(factor * image + (1 - factor) * other), of black, the mean gray, and each pixel's gray."""
    x = pixels.astype(float)
    others = (0.0, round(gray(pixels).mean()), gray(pixels))
    for operation, other in enumerate(others):
        expected = np.clip(factor * x + (1 - factor) * other, 0, 255)
        tolerance = 1 + 0.5 * abs(1 - factor)  # of the result, and of the rounded gray
        assert np.abs(adjusted(pixels, operation, factor) - expected).max() <= tolerance, operation


@pytest.mark.parametrize("factor", [-0.5, -0.1, 0.0, 0.08, 0.3])
def test_hue_is_turned(pixels, factor):
    def turned(rgb: np.ndarray) -> tuple[float, float, float]:
        h, s, v = colorsys.rgb_to_hsv(*(rgb / 255.0))
        return colorsys.hsv_to_rgb((h + factor) % 1.0, s, v)

    expected = 255 * np.apply_along_axis(turned, 2, pixels.astype(float))
    error = np.abs(adjusted(pixels, images.HUE, factor) - expected)
    assert (
        error.max() <= 6 * 2.5 and error.mean() < 3
    )  # hue has 255 steps: 6 levels of a saturated channel each


def test_red_becomes_green():
    red = np.zeros((1, 1, 3), dtype=np.uint8)
    red[..., 0] = 255
    assert adjusted(red, images.HUE, 1 / 3).tolist() == [[[0, 255, 0]]]


def drawn(strengths, seeds: int) -> list[list[tuple[int, float]]]:
    """For each seed the operations with their factors, in order."""
    return [images.color_operations(random.Random(seed), strengths) for seed in range(seeds)]


def test_orders_and_factors_are_drawn_as_torchvision_does():
    seen = drawn((0.4, 0.3, 1.5, 0.1), 2400)
    orders = collections.Counter(tuple(operation for operation, _ in each) for each in seen)
    assert len(orders) == 24 and all(50 < count < 150 for count in orders.values())
    for operation, (low, high) in enumerate([(0.6, 1.4), (0.7, 1.3), (0.0, 2.5), (-0.1, 0.1)]):
        factors = np.array([dict(each)[operation] for each in seen])
        width = high - low
        assert (
            low <= factors.min() < low + 0.01 * width
            and high - 0.01 * width < factors.max() <= high
        )
        assert abs(factors.mean() - (low + high) / 2) < 0.03 * width


def test_a_strength_of_zero_leaves_an_operation_out():
    assert {operation for each in drawn((0.4, 0, 0, 0.1), 50) for operation, _ in each} == {
        0,
        images.HUE,
    }


@pytest.fixture(scope="module")
def image(pixels) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(2, 0, 1)


def test_the_crop_is_the_same_with_and_without(image):
    plain, idle = (
        TrainTransform(16, (0.3, 1.0)),
        TrainTransform(16, (0.3, 1.0), color_jitter=(0, 0, 0, 0)),
    )
    for seed in range(20):
        assert torch.equal(plain(image, seed), idle(image, seed))


def test_probabilities_hold_and_the_seed_decides(image):
    plain = TrainTransform(16, (0.3, 1.0))
    both = TrainTransform(
        16, (0.3, 1.0), color_jitter=(0.5, 0, 0, 0), color_jitter_prob=0.8, gray_scale_prob=0.3
    )
    grays = jittered = 0
    for seed in range(1000):
        out = both(image, seed)
        assert out.dtype == torch.uint8 and out.shape == (3, 16, 16) and out.is_contiguous()
        if seed < 50:
            assert torch.equal(out, both(image, seed))
        is_gray = bool((out[0] == out[1]).all() and (out[1] == out[2]).all())
        grays += is_gray
        jittered += not is_gray and not torch.equal(out, plain(image, seed))
    assert abs(grays - 300) < 60 and abs(jittered - 560) < 65


def test_flips_and_erased_rectangles(image):
    """Each with its probability; the crop is the same with and without."""
    plain = TrainTransform(16, (0.3, 1.0))
    both = TrainTransform(16, (0.3, 1.0), flip_prob=0.4, erase_prob=0.25)
    mean = torch.tensor([122, 116, 104], dtype=torch.uint8)[:, None, None]
    flips = erased = 0
    for seed in range(800):
        out, crop = both(image, seed), plain(image, seed)
        hidden = (out == mean).all(0)
        erased += bool(hidden.any())
        rows, cols = hidden.any(1).nonzero().flatten(), hidden.any(0).nonzero().flatten()
        if len(rows):
            assert hidden[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1].all()
            assert 1 <= hidden.sum() <= 0.4 * 256
        is_flipped = torch.equal(out[:, ~hidden], crop.flip(2)[:, ~hidden])
        assert is_flipped or torch.equal(out[:, ~hidden], crop[:, ~hidden])
        flips += is_flipped
    assert abs(flips - 320) < 60 and abs(erased - 200) < 50


def noisy(picture, strength):
    """Draws from all three generators."""
    noise = torch.rand(()) + random.random() + np.random.rand()
    return (picture + strength * noise).to(torch.uint8)


def test_an_augmentation_of_ones_own_follows_the_seed(image):
    own = TrainTransform(
        16, augmentation=images.own_augmentation(f"{__name__}.noisy", {"strength": 40})
    )
    again = pickle.loads(pickle.dumps(own))
    random.seed(1)
    before = random.getstate(), torch.get_rng_state()
    first, second = own(image, 2**40 + 3), own(image, 2**40 + 4)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    torch.rand(5)
    assert torch.equal(again(image, 2**40 + 3), first) and not torch.equal(first, second)
    wrong = TrainTransform(16, augmentation=images.own_augmentation("torch.flatten", {}))
    with pytest.raises(UserError, match=r"data.aug_own returned torch.uint8 \[768\] for"):
        wrong(image, 0)


def test_gray_is_the_gray_of_the_crop(image):
    for seed in range(5):
        crop = TrainTransform(16)(image, seed).permute(1, 2, 0).numpy()
        out = TrainTransform(16, gray_scale_prob=1.0)(image, seed).permute(1, 2, 0).numpy()
        assert np.abs(out - gray(crop)).max() <= 1


def test_the_crops_ratio(image):
    wide = TrainTransform(16, (0.1, 0.2), (2.0, 3.0))
    ratios = [
        w / h for _, _, h, w in (wide.crop(300, 300, random.Random(seed)) for seed in range(200))
    ]
    assert 1.9 < min(ratios) < 2.1 and 2.9 < max(ratios) < 3.1
