"""From the members of a sample to its caption and its uint8 image. The reasons that make a sample
invalid are here.

JPEG is decoded by simplejpeg, all other formats by Pillow.
"""

import bisect
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor

from clip_train.data.invalid import InvalidSample
from clip_train.data.tar import TarSample

MAX_CAPTION_BYTES = 1 << 15  # in UTF-8; more is a document, which would hold up the tokenizer
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm")
# Not all formats that Pillow reads: for EPS it would start Ghostscript on an unknown file.
Image.init()
FORMATS = ("PNG", "WEBP", "JPEG", "GIF", "BMP", "TIFF", "PPM", "DIB", "MPO", "JPEG2000", "AVIF")
FORMATS_HERE = [name for name in FORMATS if name in Image.OPEN]  # that this build of Pillow knows
MAX_SCANS = 100  # of a progressive JPEG; a small file can hold thousands, each over the whole image
MAX_PIXELS = 89_478_485  # Pillow's own limit (1 GiB / 4 / 3): a larger image is taken for a bomb
STRIP_PIXELS = 1 << 22
DRAWS = 1 << 63  # a sample's seed is below it

CaptionKey = str | Sequence[str] | Mapping[str, float] | None
"""As `data.caption_key`: one name, names to be tried in order, or names with the weights to draw
them with."""


def image_bytes(members: Mapping[str, Any]) -> bytes:
    """The image member's content. InvalidSample."""
    for extension in IMAGE_EXTENSIONS:
        if extension in members:
            if members[extension] is None:
                raise InvalidSample("member is too large")
            if not members[extension]:
                raise InvalidSample("image is empty")
            return members[extension]
    if any(e.rpartition(".")[2] in IMAGE_EXTENSIONS for e in members if not e.startswith("__")):
        # a.b.jpg is the member b.jpg of the sample a
        raise InvalidSample("no image: dots in the key")
    raise InvalidSample("no image")


def captions(members: Mapping[str, Any], caption_key: CaptionKey) -> dict[str, list[str]]:
    """The usable captions by name: the member of that name, or else that key of the `.json`.

    A list of names gives only the first that has any, a mapping all of them. InvalidSample if there
    is none."""
    names = caption_key or ["txt"]
    if isinstance(names, str):
        names = [names]
    usable: dict[str, list[str]] = {}
    reason = "no caption"
    for name in names:
        try:
            value = members.get(name)
            if value is None and name in members:
                raise InvalidSample("member is too large")
            if value is None and name != "txt":
                value = metadata(members, strict=True).get(name.removeprefix("json."))
            if value is not None:
                usable[name] = _texts(value)
        except InvalidSample as e:
            reason = str(e) if reason == "no caption" else reason
        if usable and not isinstance(caption_key, Mapping):
            break
    if not usable:
        raise InvalidSample(reason)
    return usable


def caption(members: Mapping[str, Any], caption_key: CaptionKey, draw: int = 0) -> str:
    """The one of `captions` that `draw`, uniform in [0, DRAWS), falls on; 0: the first.

    A name is drawn by its weight among those of which the sample has a caption, then one of its
    captions.
    """
    usable = captions(members, caption_key)
    weights = caption_key if isinstance(caption_key, Mapping) else dict.fromkeys(usable, 1.0)
    ends = list(itertools.accumulate(weights[name] for name in usable))
    texts = list(usable.values())[bisect.bisect_right(ends[:-1], draw / DRAWS * ends[-1])]
    return texts[draw % len(texts)]


def _texts(value: Any) -> list[str]:
    """The usable captions among a member's or a key's value, or a list of them. InvalidSample if
    there is none."""
    texts: list[str] = []
    reason = "caption is empty"
    for content in value if isinstance(value, list) else [value]:
        try:  # bytes that are not UTF-8 are refused, as by OpenCLIP's loader
            data = content.encode() if isinstance(content, str) else content
            text = data.decode() if isinstance(data, bytes) else None
        except UnicodeError:  # also from JSON, which can spell half a surrogate pair
            reason = "caption is not UTF-8"
            continue
        if text is None:
            reason = "caption is not a text"
        elif len(data) > MAX_CAPTION_BYTES:
            reason = "caption is too long"
        elif not text.strip():
            reason = "caption is empty"
        else:
            texts.append(text)
    if not texts:
        raise InvalidSample(reason)
    return texts


def metadata(members: Mapping[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """The `.json` member; {} if there is none. If it is not a JSON object: {}, or with `strict`
    InvalidSample."""
    content = members.get("json", {})  # a user's stage may have parsed it
    try:
        parsed = json.loads(content) if isinstance(content, bytes | str) else content
    except (ValueError, RecursionError):  # the latter: brackets nested thousands deep
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    if strict:
        raise InvalidSample("member is too large" if content is None else "json does not parse")
    return {}


def why_invalid(sample: TarSample, caption_key: CaptionKey) -> str | None:
    """Why this sample cannot be used; None if it can, as far as one can see without
    decoding its image."""
    if sample.duplicate:
        return "duplicate key"
    try:
        image_bytes(sample.members)
        captions(sample.members, caption_key)
    except InvalidSample as e:
        return str(e)
    return None


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """(height, width) of a JPEG; None for anything else, or if its header is damaged."""
    try:
        return simplejpeg.decode_jpeg_header(data)[:2] if data[:2] == b"\xff\xd8" else None
    except ValueError:
        return None


def decode_image(data: bytes, divisor: int = 1) -> Tensor:
    """Any image file -> RGB uint8 [3, H, W], transparency over white, 16 bits scaled to 8.

    Args:
        divisor: 1, 2, 4 or 8. JPEGs that simplejpeg decodes are decoded at this fraction of their
            sides, rounded up: most of the inverse DCT is left out.

    Raises:
        InvalidSample: damaged, cut off, of an unknown kind, or with more than MAX_PIXELS.
    """
    pixels = _decode_jpeg(data, divisor) if data[:2] == b"\xff\xd8" else None
    if pixels is None:
        pixels = _decode_other(data)
    # memory stays [H, W, 3]: interpolate is fastest on that
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _decode_jpeg(data: bytes, divisor: int) -> np.ndarray | None:
    """uint8 [H, W, 3]; None for the color spaces that simplejpeg leaves to Pillow."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        _check_size(width, height)
        if data.count(b"\xff\xda") > MAX_SCANS:
            raise InvalidSample("image has too many scans")
        if colorspace not in ("YCbCr", "Gray", "GRAY", "RGB"):
            return None
        least = {"min_height": -(-height // divisor), "min_width": -(-width // divisor)}
        return simplejpeg.decode_jpeg(data, **least)
    except ValueError as e:
        raise InvalidSample("image does not decode") from e


def _decode_other(data: bytes) -> np.ndarray:
    """uint8 [H, W, 3]"""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS_HERE) as image:
            _check_size(*image.size)
            image.load()
            # strip by strip, so that a large image is held twice and not six times
            width, height = image.size
            rows = max(1, STRIP_PIXELS // width)
            out = np.empty((height, width, 3), dtype=np.uint8)
            for top in range(0, height, rows):
                strip = image.crop((0, top, width, min(top + rows, height)))
                out[top : top + rows] = _strip_to_rgb(strip)
            return out
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise InvalidSample("image has too many pixels") from e
    except InvalidSample:
        raise
    except Exception as e:  # Pillow raises SyntaxError, struct.error, ... on damaged files
        raise InvalidSample("image does not decode") from e


def _strip_to_rgb(image: Image.Image) -> np.ndarray:
    """uint8 [h, W, 3]"""
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion clips them to white
        gray = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return np.repeat(((gray + 128) // 257).astype(np.uint8)[..., None], 3, axis=2)
    if image.mode == "F":
        raise InvalidSample("image has floating-point pixels")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        over = image.convert("RGBA")
        image = Image.new("RGB", over.size, "white")
        image.paste(over, mask=over)
    return np.array(image.convert("RGB"))  # a writable copy


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise InvalidSample("image has too many pixels")
