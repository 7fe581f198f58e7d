"""Pixels of image files here, in OpenCLIP's transforms and in transformers' processors."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import tests.peers.torchvision_shim  # noqa: F401  before open_clip and transformers
from clip_train.data.formats import extension_for
from clip_train.data.pixels import Alpha
from clip_train.data.validation import ValLoader
from clip_train.resizing import Resize
from tests.data.shards import counted, write_shard
from tests.peers.odd_images import OddImage

HALF = (0.5,) * 3  # mean and std of all models here
RESAMPLE = {"bicubic": 3, "bilinear": 2}  # Pillow's numbers
Pixels = Callable[[Image.Image], np.ndarray]


def levels(pixels: Any) -> np.ndarray:
    """Normalized float [3, S, S] -> levels of 255."""
    return (np.asarray(pixels, dtype=np.float64) * 0.5 + 0.5) * 255


def openclip_pixels(resize: Resize, size: int) -> Pixels:
    """Its transform for evaluation, which is given an image as it was opened or as RGB."""
    import open_clip

    config = open_clip.transform.PreprocessCfg(
        size=size,
        mean=HALF,
        std=HALF,
        interpolation=resize.interpolation,
        resize_mode=resize.resize_mode,
    )
    transform = open_clip.transform.image_transform_v2(config, is_train=False)
    return lambda image: levels(transform(image))


def transformers_pixels(
    resize: Resize, size: int, *, fast: bool, convert: bool | None = True
) -> Pixels:
    """CLIP's or SigLIP's processor, by Pillow (slow) or torchvision (fast).

    convert: `do_convert_rgb`; None: as in SigLIP's folders on the hub."""
    import transformers

    crops = resize.resize_mode == "shortest"
    kind = "CLIPImageProcessor" if crops else "SiglipImageProcessor"
    if hasattr(transformers, f"{kind}Pil"):  # version 5
        name = kind if fast else f"{kind}Pil"
    else:
        name = f"{kind}Fast" if fast else kind
    square = {"height": size, "width": size}
    options: dict[str, Any] = {"size": {"shortest_edge": size} if crops else square}
    if crops:
        options["crop_size"] = square
    processor = getattr(transformers, name)(
        resample=RESAMPLE[resize.interpolation],
        image_mean=list(HALF),
        image_std=list(HALF),
        do_convert_rgb=convert,
        **options,
    )
    return lambda image: levels(processor(image, return_tensors="pt")["pixel_values"][0])


def evaluated_pixels(
    images: Sequence[OddImage], folder: Path, resize: Resize, size: int, alpha: Alpha
) -> dict[str, np.ndarray]:
    """The name of each image -> uint8 [3, S, S] as evaluation reads it from a shard, which is written
    into the folder unless it is there."""
    shard = folder / "odd.tar"
    if not shard.exists():
        members = []
        for number, image in enumerate(images):
            with Image.open(io.BytesIO(image.data)) as opened:
                extension = extension_for(opened.format)
            members.append((f"{number:06d}.{extension}", image.data))
            members.append((f"{number:06d}.txt", image.name.encode()))
        write_shard(shard, members)
    loader = ValLoader(
        counted(shard),
        image_size=size,
        context_length=8,
        batch_size=50,
        alpha=alpha,
        resize=resize,
    )
    found = {}
    for batch in loader:
        for pixels, (name,) in zip(batch.images, batch.captions, strict=True):
            found[name] = pixels.numpy()
    return found
