"""Arguments that several verbs take, and the types of arguments. Imports nothing heavy."""

import argparse
import textwrap
from typing import Any

from clip_train.errors import UserError
from clip_train.places import expanded


def add_help(parser: argparse.ArgumentParser, description: str, examples: str) -> None:
    """The texts of `clip-train VERB --help`. examples: lines that can be typed, one below the other."""
    parser.description = textwrap.dedent(description).strip()
    parser.epilog = "examples:\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  ")


def path_or_url(text: str) -> str:
    """The type of an argument that is a path or a URL."""
    try:
        return expanded(text)
    except UserError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def paths_or_urls(text: str) -> str:
    """The type of an argument that is several paths or URLs, separated by commas."""
    return ",".join(path_or_url(each) for each in text.split(","))


def add_recipe(parser: argparse.ArgumentParser, **more: Any) -> None:
    """RECIPE. more: for `add_argument`."""
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        type=path_or_url,
        help="a recipe (YAML); recipes/ has examples",
        **more,
    )


def add_place(parser: argparse.ArgumentParser) -> None:
    """PLACE: a run, or its checkpoints."""
    parser.add_argument(
        "place",
        metavar="PLACE",
        type=path_or_url,
        help="a recipe, a run's folder, or a URL of checkpoints",
    )


def add_shards(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shards",
        metavar="SHARDS",
        type=path_or_url,
        nargs="+",
        help="as data.train: paths, URLs, braces, globs",
    )


def add_output(parser: argparse.ArgumentParser, default: str | None, shown: str = "") -> None:
    """--output. default: None if it follows from other arguments; `shown` in the help then."""
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=path_or_url,
        default=default,
        help=f"folder to write (default: {default or shown})",
    )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """`key.path=value`, behind the other arguments; `launcher.cli.main.parse` also finds those
    that follow options."""
    parser.add_argument(
        "overrides",
        metavar="key.path=value",
        nargs="*",
        default=[],  # else argparse names them among what is missing
        help="overrides of the recipe, such as batch.global_size=4096 optim.lr=1e-3",
    )


def add_weights(
    parser: argparse.ArgumentParser,
    text: str = "weights instead of the run's newest checkpoint",
) -> None:
    """--weights. text: its help."""
    parser.add_argument("--weights", metavar="PLACE", type=path_or_url, help=text)


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step",
        metavar="N",
        type=int,
        help="the checkpoint of this step (default: the newest)",
    )


def add_ema(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ema",
        action="store_true",
        help="the moving average of its weights (optim.ema_decay)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
