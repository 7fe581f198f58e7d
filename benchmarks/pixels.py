"""Pixels of 200 odd image files as evaluation reads them here, beside OpenCLIP and transformers.

A cell is the largest difference of a kind's eight files at 224 px, in levels of 255, over the ways to resize:
OpenCLIP's shortest, squash and longest, bicubic and bilinear; transformers' processors of CLIP (shortest) and SigLIP
(squash, bicubic and bilinear), with `do_convert_rgb: true`. OpenCLIP's transform is given RGB, as its loaders of shards
and folders do, or the image as `Image.open` returns it, as its README and its CSV loader do. Here `data.alpha` is
`drop`, and `white` beside transformers 5. Two versions of transformers are two runs, with a Pillow before 13:

    .venv-peers/bin/python benchmarks/pixels.py --json pixels.json
    .venv-peers/bin/python -m pip install --target FOLDER 'transformers>=5' 'pillow<13'
    PYTHONPATH=FOLDER .venv-peers/bin/python benchmarks/pixels.py --beside pixels.json --json pixels.json
"""

from __future__ import annotations

import io
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import numpy as np
from common import finish, parser
from PIL import Image

from clip_train.data.pixels import Alpha
from clip_train.resizing import Interpolation, Resize, ResizeMode
from tests.peers.odd_images import OddImage, odd_images
from tests.peers.pixels import Pixels, evaluated_pixels, openclip_pixels, transformers_pixels

SIZE = 224
LEVELS = 2  # of 255
TARGETS = {"pixels": f"at most {LEVELS} levels from each peer, or a reason"}
MODES = [Resize(i, m) for m in get_args(ResizeMode) for i in get_args(Interpolation)]
PROCESSORS = [
    Resize("bicubic", "shortest"),
    Resize("bicubic", "squash"),
    Resize("bilinear", "squash"),
]
AS_8_BITS = ", given as 8 bits"
RGB, OPENED = "OpenCLIP, RGB", "OpenCLIP, opened"
SLOW, FAST = "Pillow", "torchvision"  # the ends of the columns of transformers
PREMULTIPLIED = {OPENED: "resizes colors times alpha"}
NEAREST = {OPENED: "Pillow resizes these by the nearest pixel"}
CLIPPED = {"": "Pillow makes all levels above 255 white"}
INK = {OPENED: "resizes ink, and pads without ink: white"}
# Of each kind of files: the end of columns -> why they differ.
REASONS: dict[str, dict[str, str]] = {
    "RGBA, PNG": PREMULTIPLIED,
    "RGBA, WebP": PREMULTIPLIED,
    "gray and alpha, PNG": PREMULTIPLIED,
    "palette with transparency, PNG": NEAREST,
    "palette, PNG": NEAREST,
    "animated GIF": NEAREST,
    "1 bit, PNG and TIFF": NEAREST,
    "gray of 16 bits, PNG": CLIPPED,
    "gray of 16 bits, TIFF": CLIPPED,
    "CMYK, JPEG": INK,
    "CMYK, TIFF": INK,
    "1 x 1 to 1 x 300, PNG": {SLOW: "takes a side of 1 or 3 pixels for the channels"},
    "odd margins, PNG": dict.fromkeys(
        (SLOW, f"5 {FAST}"), "rounds half a pixel down, and OpenCLIP to an even number"
    ),
}


@dataclass(frozen=True)
class Column:
    name: str
    ways: list[tuple[Resize, Pixels]]
    alpha: Alpha = "drop"


def in_rgb(theirs: Pixels) -> Pixels:
    return lambda image: theirs(image.convert("RGB"))


def columns() -> list[Column]:
    openclip = [(resize, openclip_pixels(resize, SIZE)) for resize in MODES]
    major = version("transformers").partition(".")[0]
    alpha: Alpha = "drop" if int(major) < 5 else "white"
    out = [
        Column(RGB, [(resize, in_rgb(theirs)) for resize, theirs in openclip]),
        Column(OPENED, openclip),
    ]
    for kind in (SLOW, FAST):
        ways = [(r, transformers_pixels(r, SIZE, fast=kind == FAST)) for r in PROCESSORS]
        out.append(Column(f"transformers {major} {kind}", ways, alpha))
    return out


def measure(images: Sequence[OddImage]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, list[float | None]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for column in columns():
            for resize, theirs in column.ways:
                ours = evaluated_pixels(images, Path(name), resize, SIZE, column.alpha)
                for image in images:
                    given = {image.kind: Image.open(io.BytesIO(image.data))}
                    if image.meant is not None:
                        given[image.kind + AS_8_BITS] = image.meant
                    for kind, opened in given.items():
                        cells = found.setdefault(kind, {}).setdefault(column.name, [])
                        cells.append(difference(ours[image.name], theirs, opened))
    return [
        {"files": kind, **{name: cell(values) for name, values in of_kind.items()}}
        for kind, of_kind in found.items()
    ]


def difference(ours: np.ndarray, theirs: Pixels, image: Image.Image) -> float | None:
    """In levels; None if the peer raises."""
    try:
        return float(abs(ours - theirs(image)).max())
    except ValueError:
        return None


def cell(values: Sequence[float | None]) -> int | str:
    worst = round(max(value for value in values if value is not None))
    if None in values:
        return f"{worst}, raises: {values.count(None)} of {len(values)}"
    return worst


def reasons(row: dict[str, Any]) -> dict[str, str]:
    """The columns of a row that are too far off -> why; "" if that is not known."""
    out = {}
    for column, value in row.items():
        if column != "files" and not (isinstance(value, int) and value <= LEVELS):
            known = REASONS.get(row["files"], {})
            out[column] = next((why for end, why in known.items() if column.endswith(end)), "")
    return out


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--beside", metavar="FILE", help="a run whose columns are added")
    args = arguments.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable()
    images = list(odd_images())
    if args.quick:
        images = images[::8]
    rows = measure(images)
    if args.beside:
        before = {row["files"]: row for row in json.loads(Path(args.beside).read_text())["rows"]}
        for row in rows:
            row |= {**before[row["files"]], **row}
            row.pop("why", None)
    missed = [
        f"pixels: {row['files']}: {column}: {row[column]}"
        for row in rows
        for column, why in reasons(row).items()
        if not why
    ]
    for row in rows:
        row["why"] = "; ".join(dict.fromkeys(filter(None, reasons(row).values())))
    return finish("pixels of odd images", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
