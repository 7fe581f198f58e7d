"""200 image files of 25 odd kinds, made with Pillow from photographs, a screenshot and drawings."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms, ImageDraw, ImageFilter
from sklearn.datasets import load_sample_image

SCREENSHOT = Path(__file__).parents[2] / "docs" / "images" / "report-light-1280.png"
ORIENTATION = 0x0112  # EXIF's tag
# Width and height of a kind's files.
SHAPES = [(300, 200), (200, 300), (224, 224), (97, 331), (500, 140), (60, 64), (448, 447), (31, 40)]
LONG = [
    (900, 30),
    (24, 700),
    (1200, 100),
    (40, 1000),
    (1300, 30),
    (90, 1400),
    (800, 27),
    (33, 1023),
]
TINY = [(1, 1), (1, 300), (300, 1), (2, 2), (3, 7), (7, 2), (1, 33), (16, 1)]
# Resized to 224 px by the shorter side, the longer one keeps an odd number of pixels too many, whose
# halves round up to an even number.
ODD = [(65, 63), (63, 65), (66, 64), (81, 51), (58, 88), (95, 65), (107, 77), (290, 211)]


@dataclass(frozen=True)
class OddImage:
    kind: str
    name: str
    data: bytes  # of the file
    # RGB that the file means, if Pillow's own conversion to RGB is wrong
    meant: Image.Image | None = None


def contents() -> list[Image.Image]:
    """RGB: two photographs, a page of text, and shapes on a gradient with noise."""
    x, y = np.meshgrid(np.linspace(0, 1, 640), np.linspace(0, 1, 480))
    gradient = np.stack([255 * x, 255 * y, 255 * (1 - x) * y], axis=2)
    noise = np.random.default_rng(0).normal(0, 8, gradient.shape)
    drawn = Image.fromarray((gradient + noise).clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(drawn)
    pen.ellipse((60, 50, 300, 290), fill=(250, 210, 20), outline=(0, 0, 0), width=5)
    pen.polygon([(350, 400), (600, 430), (480, 120)], fill=(20, 60, 200))
    pen.line((0, 479, 639, 0), fill=(255, 255, 255), width=3)
    photographs = [
        Image.fromarray(load_sample_image(f"{name}.jpg")) for name in ("china", "flower")
    ]
    with Image.open(SCREENSHOT) as page:
        return [*photographs, page.convert("RGB").crop((0, 0, 1280, 900)), drawn]


def mask(width: int, height: int) -> Image.Image:
    """L: a soft disk, with corners of no opacity at all."""
    out = Image.new("L", (width, height), 0)
    ImageDraw.Draw(out).ellipse((width * 0.1, height * 0.1, width * 0.9, height * 0.9), fill=255)
    return out.filter(ImageFilter.GaussianBlur(min(width, height) / 12))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def levels16(image: Image.Image, seed: int) -> np.ndarray:
    """uint16 [H, W] or [H, W, 3], of which 257 are one level of the 8 bits of an image; with low bits."""
    levels = np.asarray(image).astype(np.int64) * 257
    low = np.random.default_rng(seed).integers(-100, 101, levels.shape)
    return (levels + low).clip(0, 65535).astype(np.uint16)


def png48(levels: np.ndarray) -> bytes:
    """A PNG of 16 bits a color, which Pillow does not write."""
    height, width, _ = levels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def rgba(image: Image.Image) -> Image.Image:
    out = image.convert("RGBA")
    out.putalpha(mask(*image.size))
    return out


def gray_alpha(image: Image.Image) -> Image.Image:
    return Image.merge("LA", (image.convert("L"), mask(*image.size)))


def transparent_palette(image: Image.Image) -> bytes:
    """Three of its 64 colors are transparent, each to another degree."""
    return saved(image.quantize(64), "PNG", transparency=bytes([0, 100, 200] + [255] * 61))


def animation(image: Image.Image) -> bytes:
    others = [image.transpose(way) for way in Image.Transpose][:2]
    return saved(image, "GIF", save_all=True, append_images=others, duration=90)


def with_orientation(image: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return saved(image, "JPEG", quality=93, exif=exif)


def with_profile(image: Image.Image, number: int) -> bytes:
    """A profile that is not sRGB: Lab, or XYZ."""
    name = ("LAB", "XYZ", "sRGB")[number % 3]
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile(name)).tobytes()
    if number % 2:
        return saved(image, "PNG", icc_profile=profile)
    return saved(image, "JPEG", quality=93, icc_profile=profile)


def cmyk(image: Image.Image) -> Image.Image:
    """With black ink, which Pillow's own conversion leaves empty."""
    ink = 255 - np.asarray(image).astype(np.int64)
    black = ink.min(axis=2, keepdims=True) // 2
    colors = (ink - black) * 255 // np.maximum(255 - black, 1)
    return Image.fromarray(
        np.concatenate([colors, black], axis=2).clip(0, 255).astype(np.uint8), "CMYK"
    )


def gray16(kind: str) -> Callable[[Image.Image, int], bytes]:
    return lambda image, number: saved(Image.fromarray(levels16(image.convert("L"), number)), kind)


def noise(image: Image.Image, number: int) -> bytes:
    rng = np.random.default_rng(number)
    shape = (image.height, image.width, 3)
    return saved(Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)), "PNG")


def one_bit(image: Image.Image, number: int) -> bytes:
    if number % 2:
        return saved(image.convert("1"), "PNG")
    return saved(image.convert("1"), "TIFF", compression="group4")


def jpeg(image: Image.Image, number: int) -> bytes:
    """Of qualities from 30 to 93 with 4:4:4, 4:2:2 and 4:2:0."""
    return saved(image, "JPEG", quality=30 + 9 * number, subsampling=number % 3)


def other(image: Image.Image, number: int) -> bytes:
    return saved(image, ("BMP", "PPM", "JPEG2000")[number % 3])


def png(image: Image.Image, number: int) -> bytes:
    return saved(image, "PNG")


# A kind -> the file of an image, and of the image's number.
KINDS: dict[str, Callable[[Image.Image, int], bytes]] = {
    "RGBA, PNG": lambda image, _: saved(rgba(image), "PNG"),
    "RGBA, WebP": lambda image, _: saved(rgba(image), "WEBP", lossless=True, exact=True),
    "gray and alpha, PNG": lambda image, _: saved(gray_alpha(image), "PNG"),
    "palette with transparency, PNG": lambda image, _: transparent_palette(image),
    "transparent color, PNG": lambda image, _: saved(
        image, "PNG", transparency=image.getpixel((0, 0))
    ),
    "gray of 16 bits, PNG": gray16("PNG"),
    "gray of 16 bits, TIFF": gray16("TIFF"),
    "RGB of 16 bits, PNG": lambda image, number: png48(levels16(image, number)),
    "palette, PNG": lambda image, _: saved(image.quantize(48), "PNG"),
    "animated GIF": lambda image, _: animation(image),
    "1 bit, PNG and TIFF": one_bit,
    "CMYK, JPEG": lambda image, _: saved(cmyk(image), "JPEG", quality=93),
    "CMYK, TIFF": lambda image, _: saved(cmyk(image), "TIFF"),
    "EXIF orientation 1 to 8, JPEG": lambda image, number: with_orientation(image, number + 1),
    "ICC profile, JPEG and PNG": with_profile,
    "progressive JPEG": lambda image, _: saved(image, "JPEG", quality=80, progressive=True),
    "JPEG, 4:4:4 to 4:2:0": jpeg,
    "gray JPEG": lambda image, _: saved(image.convert("L"), "JPEG", quality=90),
    "gray PNG": lambda image, _: saved(image.convert("L"), "PNG"),
    "WebP": lambda image, number: saved(image, "WEBP", lossless=bool(number % 2)),
    "BMP, PPM, JPEG 2000": other,
    "12 to 43 times as long, PNG": png,
    "1 x 1 to 1 x 300, PNG": png,
    "odd margins, PNG": png,
    "noise, PNG": noise,
}
SHAPES_OF = {
    "12 to 43 times as long, PNG": LONG, "1 x 1 to 1 x 300, PNG": TINY, "odd margins, PNG": ODD,
}  # fmt: skip


def odd_images() -> Iterator[OddImage]:
    """The same on every call."""
    sources = contents()
    for kind, file_of in KINDS.items():
        for number, size in enumerate(SHAPES_OF.get(kind, SHAPES)):
            source = sources[(number + len(kind)) % len(sources)]
            image = source.resize(size, Image.Resampling.BICUBIC)
            meant = None
            if kind.startswith("gray of 16 bits"):
                levels = levels16(image.convert("L"), number)
                meant = Image.fromarray(np.rint(levels / 257).astype(np.uint8)).convert("RGB")
            name = f"{kind} {number}, {size[0]} x {size[1]}"
            yield OddImage(kind, name, file_of(image, number), meant)
