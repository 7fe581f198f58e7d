"""`clip-train average`: the mean of checkpoints' weights, as an export."""

import argparse
import re

from clip_tools.verbs.export import add_format
from launcher.cli.arguments import add_ema, add_help, add_output, paths_or_urls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Average the weights of checkpoints of one run or of several, in fp32 and one tensor at a time.
        The folder is what export writes: evaluate and model.init_from take it.
        """,
        """
        clip-train average runs/clip@18000,runs/clip@20000 --output mean
        clip-train average runs/a@20000,runs/b@20000
        """,
    )
    parser.add_argument(
        "checkpoints",
        metavar="PLACE@STEP,...",
        type=paths_or_urls,
        help="folders or URLs of runs, each with a step",
    )
    add_output(parser, "average")
    add_format(parser)
    add_ema(parser)


def run(checkpoints: str, output: str, library: str, ema: bool) -> int:
    """Write the mean of checkpoints' weights as `export` writes one's."""
    from clip_tools.export import write_export
    from clip_train.checkpoint.restore import open_read_only
    from clip_train.recipe.weights import find_run

    found = []
    for checkpoint in checkpoints.split(","):
        run_place, *step = re.split(r"@(?=\d+$)", checkpoint)
        _, storages, only = find_run(run_place, [])
        found.append(open_read_only(storages, int(step[0]) if step else None, only))
    write_export(found, output, library, ema=ema)
    return 0
