"""The demo's data: captioned shapes.

They are drawn when the demo starts. Equal seeds give equal data. The folder appears completely or
not at all.
"""

import io
import itertools
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFilter

from clip_train.data.tar import write_shards
from clip_train.errors import UserError
from clip_train.places import shipped

RECIPES = shipped("recipes")
Sample = dict[str, Any]
MARKER = "dataset.json"
VERSION = 1  # raise it when the drawings change: folders of another version are drawn again

SIZES = {"small": (0.15, 0.19), "large": (0.29, 0.34)}  # radius, as a fraction of the image's side
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 215, 40),
    "purple": (150, 60, 190),
    "orange": (245, 140, 30),
    "black": (25, 25, 25),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
# Corners of those that are polygons, about the middle, in radii.
OUTLINES = {
    "square": (
        (0.883883, 0.883883), (-0.883883, 0.883883), (-0.883883, -0.883883), (0.883883, -0.883883),
    ),
    "triangle": ((0, -1.3), (1.12583, 0.65), (-1.12583, 0.65)),
    "star": (
        (0, -1.35), (0.323282, -0.444959), (1.28393, -0.417173), (0.523081, 0.169959),
        (0.79351, 1.09217), (0, 0.55), (-0.79351, 1.09217), (-0.523081, 0.169959),
        (-1.28393, -0.417173), (-0.323282, -0.444959),
    ),
    "cross": (
        (-0.38, -1.2), (0.38, -1.2), (0.38, -0.38), (1.2, -0.38), (1.2, 0.38), (0.38, 0.38),
        (0.38, 1.2), (-0.38, 1.2), (-0.38, 0.38), (-1.2, 0.38), (-1.2, -0.38), (-0.38, -0.38),
    ),
}  # fmt: skip
BACKGROUNDS = {
    "gray": (128, 128, 128),
    "pink": (250, 170, 190),
    "brown": (120, 75, 40),
    "cyan": (120, 220, 230),
}
HELD_OUT = 76
NUM_VAL = 8 * HELD_OUT  # images

PHRASE = "{} {} {} on a {} background"  # size, colour, shape, background
EVAL_TEMPLATE = f"a photo of a {PHRASE}"
TEMPLATES = [
    f"a {PHRASE}",
    EVAL_TEMPLATE,
    "{1} {2}, {0}, {3} background",
    "there is a {} {} {} in front of a {} background",
    "a picture of one {} {} {} on {}",
]

Combination = tuple[str, str, str, str]  # size, colour, shape, background


@dataclass(frozen=True)
class SyntheticData:
    """The paths of a synthetic data set."""

    train: str  # for `data.train`
    val: str  # for `data.val`
    classes: str  # {"classnames": [...], "templates": ["a photo of a {}", ...]}, for zero-shot
    num_val: int


def shapes(
    folder: str | os.PathLike[str],
    num_train: int = 20_000,
    *,
    size: int = 64,
    per_shard: int = 2000,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> SyntheticData:
    """Coloured shapes: 2 sizes x 8 colours x 6 shapes x 4 backgrounds = 384 captions, 76 only in
    `val`.

    The splits are written into a temporary folder, which is renamed once it is complete.

    Args:
        size: of the JPEGs, pixels. 20,000 of 64 px take 16 CPU-seconds and 80 MB.
        progress: called after each image.

    Raises:
        UserError: `folder` holds files that this function did not write.
    """
    folder = Path(folder)
    parameters = {
        "kind": "shapes", "num_train": num_train, "size": size, "per_shard": per_shard,
        "seed": seed,
        "version": VERSION,
    }  # fmt: skip
    combinations = list(itertools.product(SIZES, COLORS, SHAPES, BACKGROUNDS))
    random.Random(seed).shuffle(combinations)
    held_out, seen = combinations[:HELD_OUT], combinations[HELD_OUT:]  # 76 and 308
    val = [(combination, EVAL_TEMPLATE) for combination in held_out for _ in range(8)]
    rng = random.Random(seed + 1)
    drawn = ((c, rng.choice(TEMPLATES)) for c in (rng.choice(seen) for _ in range(num_train)))
    there = None
    with suppress(OSError, ValueError):
        there = json.loads((folder / MARKER).read_text())
    if there is None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} is not empty and holds no synthetic data set; name another folder"
        )
    if there != parameters:
        classes = {
            "classnames": [PHRASE.format(*combination) for combination in held_out],
            "templates": [EVAL_TEMPLATE.replace(PHRASE, "{}")],
        }
        part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
        try:
            write_shards(part / "train", _samples(drawn, size, seed + 2, progress), per_shard)
            write_shards(part / "val", _samples(val, size, seed + 3, progress), per_shard)
            (part / "classes.json").write_text(json.dumps(classes, indent=1))
            (part / MARKER).write_text(json.dumps(parameters))
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return SyntheticData(
        train=str(folder / "train/*.tar"),
        val=str(folder / "val/*.tar"),
        classes=str(folder / "classes.json"),
        num_val=len(val),
    )


def _samples(
    items: Iterable[tuple[Combination, str]], size: int, seed: int, progress: Callable[[], None]
) -> Iterator[Sample]:
    rng = random.Random(seed)
    for i, (combination, template) in enumerate(items):
        metadata = dict(zip(("size", "color", "shape", "background"), combination, strict=True))
        metadata["classname"] = PHRASE.format(*combination)
        buffer = io.BytesIO()
        draw_shape(combination, size, rng).save(buffer, "JPEG", quality=90)
        yield {
            "__key__": f"{i:08d}",
            "jpg": buffer.getvalue(),
            "txt": template.format(*combination).encode(),
            "json": json.dumps(metadata).encode(),
        }
        progress()


def draw_shape(combination: Combination, size: int, rng: random.Random) -> Image.Image:
    """One shape, near the middle, on a mottled background. Drawn at twice the size and reduced."""
    size_name, color_name, shape, background_name = combination
    side = 2 * size
    background = _vary(BACKGROUNDS[background_name], 14, rng)
    image = Image.new("RGB", (side, side), background)
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        x, y, r = rng.random() * side, rng.random() * side, rng.uniform(0.1, 0.4) * side
        draw.ellipse((x - r, y - r, x + r, y + r), fill=_vary(background, 15, rng))
    image = image.filter(ImageFilter.GaussianBlur(4))
    draw = ImageDraw.Draw(image)
    r = rng.uniform(*SIZES[size_name]) * side
    x, y = (side * (0.5 + rng.uniform(-0.1, 0.1)) for _ in range(2))
    color = _vary(COLORS[color_name], 20, rng)
    box = (x - r, y - r, x + r, y + r)
    if shape == "circle":
        draw.ellipse(box, fill=color)
    elif shape == "ring":
        draw.ellipse(box, outline=color, width=max(2, int(r * 0.38)))
    else:
        angle = rng.uniform(-0.25, 0.25)  # radians
        cos, sin = math.cos(angle), math.sin(angle)
        corners = [
            (x + r * (a * cos - b * sin), y + r * (a * sin + b * cos)) for a, b in OUTLINES[shape]
        ]
        draw.polygon(corners, fill=color)
    return image.resize((size, size), Image.Resampling.BILINEAR)


def _vary(color: tuple[int, int, int], by: int, rng: random.Random) -> tuple[int, int, int]:
    red, green, blue = (max(0, min(255, channel + rng.randint(-by, by))) for channel in color)
    return red, green, blue
