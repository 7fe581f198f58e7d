"""`clip-train export`: a checkpoint's weights as a folder for other libraries."""

import argparse

from clip_train.errors import UserError
from launcher.cli.arguments import (
    add_ema,
    add_help,
    add_overrides,
    add_place,
    add_step,
    path_or_url,
)

LIBRARIES = ("open_clip", "transformers", "peft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Write a folder that open_clip, or transformers, loads, without a GPU. A run's
        folder of checkpoints or their URL is enough: no other file of the run is needed.
        """,
        """
        clip-train export runs/clip --output clip-b32           of a run on this disk
        clip-train export s3://bucket/run --step 20000          of a run elsewhere
        clip-train export runs/clip --format transformers       for transformers.CLIPModel
        clip-train export runs/clip --format peft               adapters (model.lora) alone
        """,
    )
    add_place(parser)
    add_overrides(parser)
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=path_or_url,
        help="folder to write (default: <run.dir>/export)",
    )
    add_step(parser)
    add_format(parser)
    add_ema(parser)


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        dest="library",
        choices=LIBRARIES,
        default="open_clip",
        help="for which library (default: open_clip)",
    )


def run(
    place: str,
    overrides: list[str],
    output: str | None,
    step: int | None,
    library: str,
    ema: bool,
) -> int:
    """Write a checkpoint's weights as a folder that `open_clip` loads."""
    from clip_tools.export import write_export
    from clip_train.checkpoint.restore import open_read_only
    from clip_train.recipe.weights import find_run

    config, places, only = find_run(place, overrides)
    if config is None and overrides:
        raise UserError(
            f"{overrides[0]}: a checkpoint is exported as it is; leave it out, or name the recipe"
        )
    found = open_read_only(places, step, only)
    folder = output or ("export" if config is None else str(config.run_dir / "export"))
    return write_export([found], folder, library, ema=ema, config=config)
