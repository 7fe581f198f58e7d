"""`clip-train report`: a page about a run."""

import argparse
from pathlib import Path

from clip_train.errors import UserError
from launcher.cli.arguments import add_help, path_or_url
from launcher.runtime.log import log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Write report.html of a run: health, scores, curves, validation images, attempts, and
        differences from the defaults. It works while the run trains; at its end, a run writes the
        page itself.
        """,
        """
        clip-train report runs/clip
        clip-train report my.yaml                               the run of that recipe
        """,
    )
    parser.add_argument(
        "place", metavar="RUN", type=path_or_url, help="a run's folder, or its recipe"
    )


def run(place: str) -> int:
    """Write the page anew."""
    from clip_train.metrics.report import write_report

    log(f"written: {write_report(folder_of(place))}")
    return 0


def folder_of(place: str) -> Path:
    """The folder of a run, or of a recipe's run. UserError if it contains no run."""
    from clip_train.recipe.recipe import load_config

    path = Path(place).expanduser()
    folder = load_config(place).run_dir if path.is_file() else path
    if not any((folder / name).exists() for name in ("recipe.yaml", "metrics.jsonl")):
        raise UserError(
            f"{place} has no run (no recipe.yaml, no metrics.jsonl): give a run's folder, or "
            "its recipe"
        )
    return folder
