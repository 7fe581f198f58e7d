"""Pixels of evaluation beside OpenCLIP's transforms and transformers' processors."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import tests.peers.torchvision_shim  # noqa: F401  before open_clip and transformers
from clip_train.data.images import to_square
from clip_train.data.pixels import decode_image
from clip_train.resizing import Resize
from tests.peers.odd_images import OddImage
from tests.peers.odd_images import odd_images as odd_files
from tests.peers.pixels import evaluated_pixels, openclip_pixels, transformers_pixels

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
open_clip = pytest.importorskip(
    "open_clip", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
transformers = pytest.importorskip(
    "transformers", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
LEVELS = 2  # of 255
SIZE = 64
WHOLE = 224  # of the odd files


def odd_images() -> Iterator[tuple[str, bytes]]:
    """Files of many kinds and shapes. All opaque: what is behind transparency is `data.alpha`."""
    shapes = [(300, 200), (64, 64), (97, 500), (900, 30), (5, 7), (1, 40), (640, 480), (65, 63)]
    for seed, (width, height) in enumerate(shapes):
        rng = np.random.default_rng(seed)
        rough = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        smooth = Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)
        noise = np.asarray(smooth) + rng.normal(0, 12, (height, width, 3))
        noisy = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
        for name, image in (("smooth", smooth), ("noisy", noisy)):
            for mode, kind in (
                ("RGB", "PNG"), ("RGB", "JPEG"), ("L", "PNG"), ("CMYK", "JPEG"), ("RGB", "BMP"),
                ("L", "JPEG"), ("RGB", "WEBP"), ("RGB", "TIFF"),
            ):  # fmt: skip
                file = io.BytesIO()
                options = {"quality": 92} if kind == "JPEG" else {}
                image.convert(mode).save(file, kind, **options)
                yield f"{name} {width} x {height} {mode} {kind}", file.getvalue()


def levels(pixels: Any, mean: float, std: float) -> np.ndarray:
    """Normalized float [3, S, S] -> levels of 255."""
    return (np.asarray(pixels) * std + mean) * 255


def compare(name: str, data: bytes, resize: Resize, theirs: np.ndarray) -> None:
    ours = to_square(decode_image(data), SIZE, resize).numpy().astype(float)
    assert ours.shape == theirs.shape
    difference = abs(ours - theirs).max()
    assert difference <= LEVELS + 1e-3, (name, resize, difference)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
def test_pixels_are_those_of_openclip(mode: Any, interpolation: Any):
    transform = open_clip.transform.image_transform_v2(
        open_clip.transform.PreprocessCfg(
            size=SIZE,
            mean=(0.5,) * 3,
            std=(0.5,) * 3,
            interpolation=interpolation,
            resize_mode=mode,
        ),
        is_train=False,
    )
    for name, data in odd_images():
        image = Image.open(io.BytesIO(data))
        width, height = image.size
        if min(width, height) * 40 < max(width, height) and mode == "longest":
            continue  # a side of no pixel there
        if mode == "longest" and image.mode == "CMYK":
            continue  # padded with white there: no ink
        if max(width, height) > 30 * min(width, height) and mode == "shortest":
            continue  # kept from growing without limit here
        theirs = levels(transform(image), 0.5, 0.5)
        compare(name, data, Resize(interpolation, mode), theirs)


@pytest.mark.parametrize("fast", [False, True])
def test_pixels_are_those_of_transformers(fast: bool):
    suffix = "Fast" if fast else ""
    kinds = {
        Resize("bicubic", "squash"): (f"SiglipImageProcessor{suffix}", 3),
        Resize("bilinear", "squash"): (f"SiglipImageProcessor{suffix}", 2),
        Resize("bicubic", "shortest"): (f"CLIPImageProcessor{suffix}", 3),
    }
    for resize, (kind, resample) in kinds.items():
        crops = resize.resize_mode == "shortest"
        side = {"height": SIZE, "width": SIZE}
        options: dict[str, Any] = {"size": {"shortest_edge": SIZE} if crops else side}
        if crops:
            options["crop_size"] = side
        processor = getattr(transformers, kind)(
            resample=resample, image_mean=[0.5] * 3, image_std=[0.5] * 3, do_convert_rgb=True, **options
        )  # fmt: skip
        for name, data in odd_images():
            image = Image.open(io.BytesIO(data)).convert("RGB")
            if crops and max(image.size) > 30 * min(image.size):
                continue
            found = processor(image, return_tensors="pt")["pixel_values"][0]
            compare(name, data, resize, levels(found, 0.5, 0.5))


@pytest.fixture(scope="module")
def files() -> list[OddImage]:
    return list(odd_files())


def opened(image: OddImage) -> Image.Image:
    """As it is given to a peer: 16 bits of gray, which Pillow's conversion clips, as 8 bits."""
    return image.meant or Image.open(io.BytesIO(image.data))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
def test_odd_files_are_those_of_openclip(
    tmp_path: Path, files: list[OddImage], mode: Any, interpolation: Any
):
    """In RGB, as its loaders of shards and folders give an image to the transform."""
    resize = Resize(interpolation, mode)
    ours = evaluated_pixels(files, tmp_path, resize, WHOLE, "drop")
    theirs = openclip_pixels(resize, WHOLE)
    assert len(ours) == len(files) == 200
    for image in files:
        found = theirs(opened(image).convert("RGB"))
        assert abs(ours[image.name] - found).max() <= LEVELS + 1e-3, image.name


@pytest.mark.parametrize("fast", [False, True])
def test_odd_files_are_those_of_transformers(tmp_path: Path, files: list[OddImage], fast: bool):
    newest = int(transformers.__version__.partition(".")[0]) > 4
    for resize in (Resize(), Resize("bicubic", "squash"), Resize("bilinear", "squash")):
        ours = evaluated_pixels(files, tmp_path, resize, WHOLE, "white" if newest else "drop")
        theirs = transformers_pixels(resize, WHOLE, fast=fast)
        for image in files:
            # half a pixel of margin: rounded down there
            if resize == Resize() and image.kind == "odd margins, PNG" and (newest or not fast):
                continue
            try:
                found = theirs(opened(image))
            except ValueError:  # takes a side of 1 or 3 pixels for the channels
                assert image.kind == "1 x 1 to 1 x 300, PNG" and not fast and not newest
                continue
            limit = LEVELS + 1e-3 if not fast or resize == Resize() else 1e-3
            assert abs(ours[image.name] - found).max() <= limit, image.name


def test_siglips_processor_on_the_hub_reads_rgb_alone(files: list[OddImage]):
    """Its `preprocessor_config.json` has `do_convert_rgb: null`."""
    theirs = transformers_pixels(Resize("bicubic", "squash"), WHOLE, fast=False, convert=None)
    for image in files[::8]:
        picture = Image.open(io.BytesIO(image.data))
        if picture.mode != "RGB" and image.kind != "1 x 1 to 1 x 300, PNG":
            with pytest.raises(ValueError):
                theirs(picture)
