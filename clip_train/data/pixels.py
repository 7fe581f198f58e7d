"""From the bytes of an image file to RGB pixels: the one decoder of training, evaluation, `embed` and
the library.

simplejpeg decodes JPEGs, and Pillow all other formats. Pillow also looks at the JPEGs that simplejpeg
rejects: it accepts those for which libjpeg only warns.
"""

import io
from typing import Any, Literal

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor

from clip_train.data.formats import FORMATS
from clip_train.data.invalid import InvalidSample

Alpha = Literal["white", "drop"]
"""What transparent pixels become, as `data.alpha`."""

Image.init()
FORMATS_HERE = [name for name in FORMATS if name in Image.OPEN]  # that this build of Pillow knows
MAX_PIXELS = 89_478_485  # Pillow's own limit (1 GiB / 4 / 3): a larger image is taken for a bomb
STRIP_PIXELS = 1 << 22
JPEG_START = b"\xff\xd8"


def jpeg_size(data: Any) -> tuple[int, int] | None:
    """(height, width) of a JPEG; None for anything else, or if its header is damaged."""
    try:
        return simplejpeg.decode_jpeg_header(data)[:2] if data[:2] == JPEG_START else None
    except (ValueError, TypeError):  # the latter: a stage has decoded it
        return None


def decode_image(data: Any, divisor: int = 1, *, alpha: Alpha = "white") -> Tensor:
    """Any image -> RGB uint8 [3, H, W], 16 bits scaled to 8.

    Args:
        data: bytes of a file, or what a stage or a program has decoded: a Pillow image, or an array
            uint8 [H, W, 3].
        divisor: 1, 2, 4 or 8. JPEGs that simplejpeg decodes are decoded at this fraction of their
            sides, rounded up: most of the inverse DCT is left out.
        alpha: white: transparent pixels are blended with white, as in transformers 5. drop: the
            color behind the transparency is kept, as in OpenCLIP and transformers 4.

    Raises:
        InvalidSample: damaged, cut off, of an unknown kind, or with more than MAX_PIXELS.
    """
    if isinstance(data, Image.Image):
        try:
            pixels = _to_rgb(data, alpha)
        except InvalidSample:
            raise
        except Exception as e:  # it may be opened and not read yet
            raise InvalidSample("image does not decode") from e
    elif not isinstance(data, bytes):
        pixels = np.asarray(data)
        if pixels.dtype != np.uint8 or pixels.shape[2:] != (3,):
            raise InvalidSample("image is not uint8 [H, W, 3]")
    else:
        jpeg = _decode_jpeg(data, divisor) if data[:2] == JPEG_START else None
        pixels = _decode_by_pillow(data, alpha) if jpeg is None else jpeg
    # memory stays [H, W, 3]: interpolate is fastest on that
    return torch.from_numpy(pixels).permute(2, 0, 1)


def is_transparent(data: Any) -> bool:
    """Whether an image file has a pixel that is not opaque, which OpenCLIP sees differently. False
    if it does not decode."""
    if not isinstance(data, bytes) or data[:2] == JPEG_START:
        return False
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS_HERE) as image:
            if not _may_be_transparent(image) or image.width * image.height > MAX_PIXELS:
                return False
            if image.mode.startswith("I"):
                return bool((np.asarray(image) == image.info["transparency"]).any())
            return bool(np.asarray(_with_alpha(image).getchannel("A")).min() < 255)
    except Exception:  # as in `_decode_by_pillow`, where it becomes an InvalidSample
        return False


def _decode_jpeg(data: bytes, divisor: int) -> np.ndarray | None:
    """uint8 [H, W, 3]; None for a color space that simplejpeg leaves to Pillow, and for a file that
    it rejects, perhaps by a warning of libjpeg alone."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        if width * height > MAX_PIXELS:
            raise InvalidSample("image has too many pixels")
        if colorspace not in ("YCbCr", "Gray", "GRAY", "RGB"):
            return None
        return simplejpeg.decode_jpeg(
            data, min_height=-(-height // divisor), min_width=-(-width // divisor)
        )
    except ValueError:
        return None


def _decode_by_pillow(data: bytes, alpha: Alpha) -> np.ndarray:
    """uint8 [H, W, 3]"""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS_HERE) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise InvalidSample("image has too many pixels")
            if data[:2] in (b"P1", b"P2", b"P3"):  # Pillow reads these with Python, for seconds
                raise InvalidSample("image is a PPM with its numbers in letters")
            image.load()
            # strip by strip, so that a large image is held twice and not six times
            rows = max(1, STRIP_PIXELS // width)
            out = np.empty((height, width, 3), dtype=np.uint8)
            for top in range(0, height, rows):
                strip = image.crop((0, top, width, min(top + rows, height)))
                out[top : top + rows] = _to_rgb(strip, alpha)
            return out
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise InvalidSample("image has too many pixels") from e
    except InvalidSample:
        raise
    except Exception as e:  # Pillow raises SyntaxError, struct.error, ... on damaged files
        raise InvalidSample("image does not decode") from e


def _may_be_transparent(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info


def _with_alpha(image: Image.Image) -> Image.Image:
    """As RGBA."""
    if image.mode == "La":  # multiplied by its alpha; Pillow converts it to LA only
        image = image.convert("LA")
    return image.convert("RGBA")


def _to_rgb(image: Image.Image, alpha: Alpha) -> np.ndarray:
    """uint8 [h, W, 3]"""
    if image.mode == "F":
        raise InvalidSample("image has floating-point pixels")
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion clips them to white
        levels = np.asarray(image).astype(np.int64)
        gray = ((np.clip(levels, 0, 65535) + 128) // 257).astype(np.uint8)
        if alpha == "white" and "transparency" in image.info:  # the level that is transparent
            gray[levels == image.info["transparency"]] = 255
        return np.repeat(gray[..., None], 3, axis=2)
    if _may_be_transparent(image):
        if alpha == "white":
            over = _with_alpha(image)
            image = Image.new("RGB", over.size, "white")
            image.paste(over, mask=over)
        elif image.mode in ("La", "RGBa"):
            image = _with_alpha(image)
        elif "transparency" in image.info:  # or Pillow warns about some palettes
            image = image.copy()
            del image.info["transparency"]
    return np.array(image.convert("RGB"))  # a writable copy
