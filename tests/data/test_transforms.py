"""Decoding and resizing against Pillow, which OpenCLIP uses."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter

from clip_train.data.images import TrainTransform, to_square
from clip_train.data.invalid import InvalidSample
from clip_train.data.pixels import decode_image, jpeg_size
from clip_train.resizing import Resize


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth areas with edges and some noise."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(
        (width, height), Image.BICUBIC
    )
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = rng.integers(0, width), rng.integers(0, height)
        draw.ellipse(
            (x, y, x + width // 4, y + height // 3),
            fill=tuple(int(v) for v in rng.integers(0, 256, 3)),
        )
    image = image.filter(ImageFilter.GaussianBlur(1))
    noisy = np.asarray(image).astype(float) + rng.normal(0, 4, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def array(image: torch.Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = np.mean((a.astype(float) - b.astype(float)) ** 2)
    return 99.0 if error == 0 else 10 * np.log10(255**2 / error)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("width,height", [(300, 200), (128, 170), (512, 512)])
def test_train_crop_equals_pillow(width, height, seed):
    data = encoded(photograph(width, height, seed), quality=90)
    transform = TrainTransform(96, (0.3, 1.0))
    ours = transform(decode_image(data), seed)
    top, left, h, w = transform.crop(height, width, random.Random(seed))
    pillow = Image.open(io.BytesIO(data)).convert("RGB").crop((left, top, left + w, top + h))
    assert ours.shape == (3, 96, 96) and ours.dtype == torch.uint8 and ours.is_contiguous()
    assert psnr(array(ours), np.asarray(pillow.resize((96, 96), Image.BICUBIC))) >= 54


@pytest.mark.parametrize("width,height", [(300, 200), (201, 333), (96, 96), (97, 500), (40, 30)])
def test_eval_equals_pillow(width, height):
    data = encoded(photograph(width, height), quality=90)
    ours = to_square(decode_image(data), 96)
    # torchvision's Resize and CenterCrop, written out
    new = (96, int(96 * height / width)) if width <= height else (int(96 * width / height), 96)
    pillow = Image.open(io.BytesIO(data)).convert("RGB").resize(new, Image.BICUBIC)
    left, top = round((new[0] - 96) / 2.0), round((new[1] - 96) / 2.0)
    assert psnr(array(ours), np.asarray(pillow.crop((left, top, left + 96, top + 96)))) >= 54


def test_a_side_of_a_half_is_rounded_as_in_openclip():
    """384 x 210 at 224 px: round(210 / (384 / 224)) is 122, and round(210 * (224 / 384)) is 123."""
    white = torch.full((3, 210, 384), 255, dtype=torch.uint8)
    rows = to_square(white, 224, Resize(resize_mode="longest"))[0, :, 0]
    assert int((rows > 0).sum()) == 122


@pytest.mark.parametrize("width,height", [(33, 1), (47, 1), (101, 3), (200, 5)])
def test_a_very_long_image_keeps_its_middle(width, height):
    """Only 32 squares of it are resized, and their middle is that of the whole image."""
    image = photograph(300, 200).resize((width, height))
    ours = array(to_square(torch.from_numpy(np.array(image)).permute(2, 0, 1), 96)).astype(int)
    long = int(96 * width / height)
    left = round((long - 96) / 2.0)
    pillow = image.resize((long, 96), Image.Resampling.BICUBIC).crop((left, 0, left + 96, 96))
    assert abs(ours - np.asarray(pillow).astype(int)).max() <= 4


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("mode", ["squash", "longest"])
@pytest.mark.parametrize("width,height", [(300, 200), (97, 500), (40, 30), (96, 96)])
def test_other_ways_to_resize_equal_pillow(width, height, mode, interpolation):
    image = photograph(width, height)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    ours = array(to_square(pixels, 96, Resize(interpolation, mode))).astype(int)
    new, corner = (96, 96), (0, 0)
    if mode == "longest":  # OpenCLIP's ResizeKeepRatio(longest=1) and CenterCropOrPad
        new = tuple(round(side / (max(width, height) / 96)) for side in (width, height))
        corner = ((96 - new[0]) // 2, (96 - new[1]) // 2)
    pillow = Image.new("RGB", (96, 96))
    pillow.paste(image.resize(new, Image.Resampling[interpolation.upper()]), corner)
    assert abs(ours - np.asarray(pillow).astype(int)).max() <= 2


def test_training_can_squash_the_whole_image():
    pixels = torch.from_numpy(np.array(photograph(300, 200))).permute(2, 0, 1)
    whole = TrainTransform(96, (1.0, 1.0), (1.0, 1.0), relative_ratio=True)
    assert torch.equal(whole(pixels, 7), to_square(pixels, 96, Resize(resize_mode="squash")))
    parts = TrainTransform(96, (0.9, 0.9), (0.95, 1.05), relative_ratio=True)
    for seed in range(20):
        _, _, height, width = parts.crop(200, 300, random.Random(seed))
        assert 0.94 < width / height / 1.5 < 1.06
        assert width * height == pytest.approx(0.9 * 60_000, rel=0.01)


def test_crop_is_drawn_as_torchvision_does():
    transform = TrainTransform(
        32, (0.3, 0.7)
    )  # never larger than a square image: no draw is rejected
    areas, ratios = [], []
    for seed in range(2000):
        top, left, h, w = transform.crop(640, 640, random.Random(seed))
        assert 0 <= top <= 640 - h and 0 <= left <= 640 - w
        areas.append(h * w / 640**2)
        ratios.append(np.log(w / h))
    assert 0.29 < min(areas) < 0.31 and 0.69 < max(areas) < 0.71
    assert abs(np.mean(areas) - 0.5) < 0.02
    assert min(ratios) > np.log(3 / 4) - 0.01 and max(ratios) < np.log(4 / 3) + 0.01
    assert transform.crop(480, 640, random.Random(7)) == transform.crop(480, 640, random.Random(7))


@pytest.mark.parametrize(
    "height,width,expected", [(10, 1000, (10, 13)), (1000, 10, (13, 10)), (1, 1, (1, 1))]
)
def test_fallback_is_the_middle(height, width, expected):
    top, left, h, w = TrainTransform(32, (0.9, 1.0)).crop(height, width, random.Random(0))
    assert (h, w) == expected
    assert abs(top - (height - h) / 2) < 1 and abs(left - (width - w) / 2) < 1


def test_extreme_shapes_do_not_explode():
    assert to_square(torch.zeros(3, 1, 60_000, dtype=torch.uint8), 32).shape == (
        3,
        32,
        32,
    )
    assert to_square(torch.zeros(3, 5000, 2, dtype=torch.uint8), 32).shape == (3, 32, 32)
    assert TrainTransform(32)(torch.zeros(3, 1, 5000, dtype=torch.uint8), 0).shape == (3, 32, 32)


def test_jpeg_decodes_as_pillow_does():
    for mode in ("RGB", "L"):
        for options in ({"quality": 85}, {"quality": 95, "progressive": True}):
            data = encoded(photograph(90, 61).convert(mode), **options)
            assert (
                psnr(
                    array(decode_image(data)),
                    np.asarray(Image.open(io.BytesIO(data)).convert("RGB")),
                )
                > 50
            )


@pytest.mark.parametrize(
    "width,height,scale,divisors",
    [
        (512, 512, (0.9, 1.0), {4}),
        (241, 407, (0.3, 1.0), {1, 2}),
        (790, 900, (0.9, 1.0), {4, 8}),
        (90, 120, (0.9, 1.0), {1}),
    ],
)
def test_a_scaled_decode_is_near_the_full_one(width, height, scale, divisors):
    """Against Pillow's full decode of the same box, to a pixel of the smaller image."""
    transform, seen = TrainTransform(96, scale, scaled_decode=True), set()
    for seed in range(6):
        data = encoded(photograph(width, height, seed), quality=90)
        size = jpeg_size(data)
        assert size == (height, width)
        divisor = transform.divisor(*size, seed)
        small = decode_image(data, divisor)
        assert small.shape[1:] == (-(-height // divisor), -(-width // divisor))
        top, left, h, w = transform.crop(height, width, random.Random(seed))
        assert divisor == 1 or min(h, w) >= 96 * divisor
        assert divisor == 8 or min(h, w) < 96 * 2 * divisor
        left, top, w, h = (divisor * round(edge / divisor) for edge in (left, top, w, h))
        box = (left, top, left + w, top + h)
        pillow = Image.open(io.BytesIO(data)).crop(box).resize((96, 96), Image.BICUBIC)
        ours = transform(small, seed, size)
        assert ours.shape == (3, 96, 96)
        assert psnr(array(ours), np.asarray(pillow)) > 30
        if divisor == 1:
            assert torch.equal(ours, transform(decode_image(data), seed))
        seen.add(divisor)
    assert seen == divisors


def test_what_is_not_decoded_smaller_is_cropped_alike():
    for data in (
        encoded(photograph(600, 500).convert("CMYK"), quality=95),
        encoded(photograph(600, 500), "PNG"),
    ):
        image = decode_image(data, 4)
        assert torch.equal(
            TrainTransform(96)(image, 3, jpeg_size(data)), TrainTransform(96)(decode_image(data), 3)
        )
    assert jpeg_size(b"\xff\xd8 no header") is None


def test_cmyk_jpeg_goes_through_pillow():
    data = encoded(photograph(40, 30).convert("CMYK"), quality=95)
    assert np.array_equal(
        array(decode_image(data)), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    )


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_other_kinds(kind):
    image = photograph(40, 30).convert("P").convert("RGB")
    data = encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {}))
    assert psnr(array(decode_image(data)), np.asarray(image)) > 30


def test_transparency_is_laid_over_white():
    image = Image.new("RGBA", (4, 1))
    for x, pixel in enumerate(
        [(200, 0, 0, 255), (200, 0, 0, 0), (0, 0, 0, 128), (255, 255, 255, 0)]
    ):
        image.putpixel((x, 0), pixel)
    out = array(decode_image(encoded(image, "PNG")))[0].astype(int)
    assert np.abs(out - [[200, 0, 0], [255, 255, 255], [127, 127, 127], [255, 255, 255]]).max() <= 1
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 0, 0, 0])
    palette.putpixel((1, 0), 1)
    out = array(decode_image(encoded(palette, "PNG", transparency=1)))[0]
    assert out.tolist() == [[10, 20, 30], [255, 255, 255]]


def test_sixteen_bits_are_scaled():
    values = np.array([[0, 257, 128 * 257, 65535, 300]], dtype=np.uint16)
    out = array(decode_image(encoded(Image.fromarray(values), "PNG")))[0]
    assert out.tolist() == [[v, v, v] for v in (0, 1, 128, 255, 1)]


def test_large_images_are_converted_in_strips():
    """Strip by strip as its halves at once, in every mode. A strip has at most 4 million pixels."""
    width, height = 2100, 2104
    deep = np.resize(np.arange(40 * 31, dtype=np.uint16) * 50, (height, width))
    plain = photograph(210, 210).resize((width, height))
    images = [plain.convert(mode) for mode in ("RGB", "L", "1", "P", "RGBA", "LA", "CMYK")]
    cases = [(image, "TIFF", {}) for image in [*images, Image.fromarray(deep)]]
    cases += [(images[3], "PNG", {"transparency": 3, "compress_level": 1}), (images[3], "GIF", {})]
    for image, kind, options in cases:
        halves = [image.crop((0, top, width, top + height // 2)) for top in (0, height // 2)]
        at_once = [decode_image(encoded(half, kind, **options)) for half in halves]
        assert torch.equal(decode_image(encoded(image, kind, **options)), torch.cat(at_once, 1)), (
            image.mode,
            kind,
        )


def test_exif_rotation_is_left_alone_as_openclip_does():
    """Its loader is webdataset's "pilrgb": Image.open and convert, no exif_transpose."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter to see it upright
    data = encoded(photograph(40, 30), quality=95, exif=exif)
    assert decode_image(data).shape == (3, 30, 40)
    assert (
        psnr(array(decode_image(data)), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
        > 50
    )


def bomb(side: int) -> bytes:
    """The header of a PNG of side x side pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))
    )


def jpeg_bomb() -> bytes:
    data = bytearray(encoded(photograph(16, 16)))
    at = data.index(b"\xff\xc0") + 5  # height and width in the frame header
    data[at : at + 4] = struct.pack(">HH", 20_000, 20_000)
    return bytes(data)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    "data,reason",
    [
        (b"", "decode"),
        (b"not an image", "decode"),
        (b"\xff\xd8\xff", "decode"),
        (encoded(photograph(64, 64))[:-200], "decode"),
        (encoded(photograph(64, 64), "PNG")[:-200], "decode"),
        (encoded(photograph(64, 64), "GIF")[:60], "decode"),
        (bomb(12_000), "too many pixels"),
        (bomb(60_000), "too many pixels"),
        (jpeg_bomb(), "too many pixels"),
    ],
)
def test_bad_images_have_a_reason(data, reason):
    with pytest.raises(InvalidSample, match=reason):
        decode_image(data)
