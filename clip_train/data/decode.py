"""From the members of a sample to a caption and a uint8 image; what makes a sample invalid is decided here.

JPEG is decoded by simplejpeg, the rest by Pillow.
"""

from __future__ import annotations

import base64
import bisect
import functools
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

MAX_CAPTION_BYTES = 1 << 15  # in UTF-8; more is a document, and would hold up the tokenizer
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm")
# Not all that Pillow reads: for EPS it would start Ghostscript on what a stranger wrote.
FORMATS = ("PNG", "WEBP", "JPEG", "GIF", "BMP", "TIFF", "PPM", "DIB", "MPO", "JPEG2000", "AVIF")
MAX_SCANS = 100  # of a progressive JPEG; each goes over the whole image, and a small file can hold thousands
MAX_PIXELS = 89_478_485  # Pillow's own limit (1 GiB / 4 / 3): what is larger is taken for a bomb
STRIP_PIXELS = 1 << 22
PICTURE = 160  # pixels of the longest side
DRAWS = 1 << 63  # a sample's seed is below it

CaptionKey = str | Sequence[str] | Mapping[str, float] | None
"""As `data.caption_key`: one name, names to be tried in order, or names with what each is drawn with."""


def image_bytes(members: Mapping[str, Any]) -> bytes:
    """The image member's content. InvalidSample where there is none, or an empty one."""
    for extension in IMAGE_EXTENSIONS:
        if extension in members:
            if not members[extension]:
                raise InvalidSample("image is empty")
            return members[extension]
    if any(e.rpartition(".")[2] in IMAGE_EXTENSIONS for e in members if not e.startswith("__")):
        raise InvalidSample(
            "no image: dots in the key"
        )  # a.b.jpg is the member b.jpg of the sample a
    raise InvalidSample("no image")


def captions(members: Mapping[str, Any], caption_key: CaptionKey) -> list[str]:
    """The usable captions, at least one: of names in order those of the first that has any, of names to be drawn all.

    Raises:
        InvalidSample: there is none.
    """
    found = captions_by_name(members, caption_key)
    return [text for texts in found.values() for text in texts]


def caption(members: Mapping[str, Any], caption_key: CaptionKey, draw: int = 0) -> str:
    """The one of `captions` that `draw`, uniform in [0, DRAWS), falls on; 0: the first.

    A name is drawn by its weight among those of which the sample has a caption, then one of its captions.
    """
    found = captions_by_name(members, caption_key)
    weights = caption_key if isinstance(caption_key, Mapping) else dict.fromkeys(found, 1.0)
    ends = list(itertools.accumulate(weights[name] for name in found))
    texts = list(found.values())[bisect.bisect_right(ends[:-1], draw / DRAWS * ends[-1])]
    return texts[draw % len(texts)]


def captions_by_name(members: Mapping[str, Any], caption_key: CaptionKey) -> dict[str, list[str]]:
    """The usable captions under each name that has any, in order. InvalidSample where none has."""
    names = (
        ["txt"]
        if caption_key is None
        else [caption_key]
        if isinstance(caption_key, str)
        else caption_key
    )
    found: dict[str, list[str]] = {}
    reason = "no caption"
    for name in names:
        try:
            found[name] = _texts(members, name)
        except InvalidSample as e:
            reason = e.reason if reason == "no caption" else reason
        if found and not isinstance(caption_key, Mapping):
            break
    if not found:
        raise InvalidSample(reason)
    return found


def _texts(members: Mapping[str, Any], name: str) -> list[str]:
    """Of the member `name`, or else of that key of the `.json`, a text or a list of texts. InvalidSample."""
    value = members.get(name)
    if value is None and name != "txt":
        value = metadata(members).get(name.removeprefix("json."))
    if value is None:
        raise InvalidSample("no caption")
    texts: list[str] = []
    reason = "caption is empty"
    for item in value if isinstance(value, list) else [value]:
        try:
            texts.append(_usable_text(item))
        except InvalidSample as e:
            reason = e.reason
    if not texts:
        raise InvalidSample(reason)
    return texts


def metadata(members: Mapping[str, Any]) -> dict[str, Any]:
    """The `.json` member; {} where there is none. InvalidSample if it is no JSON object."""
    if "json" not in members:
        return {}
    content = members["json"]  # a user's stage may have parsed it
    try:
        parsed = json.loads(content) if isinstance(content, bytes | str) else content
    except (ValueError, RecursionError):  # the latter: brackets nested thousands deep
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidSample("json does not parse")
    return parsed


def json_of(members: Mapping[str, Any]) -> dict[str, Any]:
    """As `metadata`; {} also where it cannot be read."""
    try:
        return metadata(members)
    except InvalidSample:
        return {}


def why_invalid(
    sample: TarSample, caption_key: CaptionKey, needs_caption: bool = True
) -> str | None:
    """Why this sample cannot be used; None if it can, as far as one sees without decoding."""
    if sample.duplicate:
        return "duplicate key"
    try:
        image_bytes(sample.members)
        if needs_caption:
            captions(sample.members, caption_key)
    except InvalidSample as e:
        return "member is too large" if sample.too_large else e.reason
    return None


def _usable_text(content: Any) -> str:
    """A caption that a tokenizer can take. Bytes that are no UTF-8 are refused, as OpenCLIP's loader does."""
    if not isinstance(content, bytes | str):
        raise InvalidSample("caption is not a text")
    try:  # JSON can spell half a surrogate pair, which nothing can encode
        data = content if isinstance(content, bytes) else content.encode()
        if len(data) > MAX_CAPTION_BYTES:
            raise InvalidSample("caption is too long")
        text = data.decode()
    except UnicodeError as e:
        raise InvalidSample("caption is not UTF-8") from e
    if not text.strip():
        raise InvalidSample("caption is empty")
    return text


def decode_image(data: bytes) -> Tensor:
    """Any image file -> RGB uint8 [3, H, W], transparency over white, 16 bits scaled to 8.

    Raises:
        InvalidSample: damaged, cut off, of an unknown kind, or of more than MAX_PIXELS.
    """
    return torch.from_numpy(_pixels(data)).permute(
        2, 0, 1
    )  # memory stays [H, W, 3]: interpolate is fastest on that


def _pixels(data: bytes, strict: bool = True) -> np.ndarray:
    """uint8 [H, W, 3]. strict: not of a JPEG that is cut off."""
    pixels = _decode_jpeg(data, strict) if data[:2] == b"\xff\xd8" else None
    return _decode_other(data) if pixels is None else pixels


def _decode_jpeg(data: bytes, strict: bool) -> np.ndarray | None:
    """uint8 [H, W, 3]; None for the colour spaces that simplejpeg leaves to Pillow."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        _check_size(width, height)
        if data.count(b"\xff\xda") > MAX_SCANS:
            raise InvalidSample("image has too many scans")
        if colorspace not in ("YCbCr", "Gray", "GRAY", "RGB"):
            return None
        return simplejpeg.decode_jpeg(data, strict=strict)
    except ValueError as e:
        raise InvalidSample("image does not decode") from e


def _decode_other(data: bytes) -> np.ndarray:
    """uint8 [H, W, 3]"""
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            _check_size(*image.size)
            return _to_rgb(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise InvalidSample("image has too many pixels") from e
    except InvalidSample:
        raise
    except (
        Exception
    ) as e:  # Pillow's decoders raise SyntaxError, struct.error, KeyError, ... on damaged files
        raise InvalidSample("image does not decode") from e


@functools.cache
def _formats() -> list[str]:
    """Those of FORMATS that this build of Pillow knows."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _to_rgb(image: Image.Image) -> np.ndarray:
    """uint8 [H, W, 3] of an opened image; strip by strip, so that a large one is held twice and not six times."""
    width, height = image.size
    rows = max(1, STRIP_PIXELS // width)
    image.load()
    out = np.empty((height, width, 3), dtype=np.uint8)
    for top in range(0, height, rows):
        out[top : top + rows] = _strip_to_rgb(image.crop((0, top, width, min(top + rows, height))))
    return out


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


def picture_of(members: Mapping[str, Any]) -> str:
    """`picture` of a sample's image, a cut-off one too; "" where nothing can be seen."""
    try:
        return picture(_pixels(image_bytes(members), strict=False))
    except InvalidSample:
        return ""


def picture(pixels: np.ndarray) -> str:
    """uint8 [H, W, 3] as a small JPEG in a data URI."""
    image = Image.fromarray(pixels)
    image.thumbnail((PICTURE, PICTURE))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise InvalidSample("image has too many pixels")
    if width * height == 0:
        raise InvalidSample("image does not decode")
