"""`clip-train caption`: captions of the images in a folder, by a CoCa."""

import argparse
import json
import sys
from pathlib import Path

from clip_train.data.formats import SkippedFiles, is_image, walk_files
from clip_train.errors import UserError, unreadable
from launcher.cli.arguments import (
    add_ema,
    add_help,
    add_overrides,
    add_place,
    add_step,
    add_weights,
    path_or_url,
)
from launcher.runtime.log import warn

CAPTIONED = 64  # images at a time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Print a line of JSON for each image in --images and the folders below it: its file, and the
        caption that the model's decoder writes. PLACE is as for evaluate.
        """,
        """
        clip-train caption open_clip:coca_ViT-B-32/laion2b_s13b_b90k --images photos
        clip-train caption open_clip:coca_ViT-L-14/laion2b_s13b_b90k --images photos
        """,
    )
    add_place(parser)
    add_overrides(parser)
    parser.add_argument(
        "--images",
        metavar="DIR",
        type=path_or_url,
        default=".",
        help="the folder (default: the current one)",
    )
    add_weights(parser)
    add_step(parser)
    add_ema(parser)


def run(
    place: str,
    overrides: list[str],
    images: str,
    weights: str | None,
    step: int | None,
    ema: bool,
) -> int:
    """Print a line of JSON for each image of `images`, and of the folders in it, by name: its
    file and its caption. 1 if one cannot be read."""
    import torch

    from clip_tools.embed import load

    try:
        paths = [Path(images, name) for name in walk_files(images)]
    except OSError as e:
        raise unreadable(e, f"--images ({images}) cannot be listed: {e}") from e
    files = [path for path in paths if is_image(path)]
    skipped = SkippedFiles.of(path for path in paths if not is_image(path))
    if not files:
        raise UserError(f"--images ({images}): no folder with images; correct it")
    if skipped.counts:
        warn(f"--images ({images}): skipped {skipped}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(place, *overrides, weights=weights, step=step, ema=ema, device=device)
    status = 0
    for start in range(0, len(files), CAPTIONED):
        decoded = {}
        for file in files[start : start + CAPTIONED]:
            try:
                decoded[file] = model.preprocess(file.read_bytes())
            except (UserError, OSError) as e:
                status = 1
                warn(f"{file} cannot be read: {e}")
        captions = model.captions(torch.stack([*decoded.values()])) if decoded else []
        for file, caption in zip(decoded, captions, strict=True):
            print(to_json({"file": str(file), "caption": caption}, sys.stdout.encoding))
        sys.stdout.flush()
    return status


def to_json(record: dict[str, str], encoding: str) -> str:
    """A line of JSON. All that is not ASCII is escaped if the encoding lacks a character of it, such
    as a byte of a file's name that is not UTF-8."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(record)
    return line
