"""`clip-train mine`: shards with hard negatives, found among the texts that `embed` wrote."""

import argparse
from typing import Literal

from clip_train.errors import UserError
from launcher.cli.arguments import add_help, path_or_url
from launcher.cli.process import Process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Write the shards that embed read again, with the captions that are most similar to each image
        without being its own, as a list in the sample's .json. data.negative_texts trains on them.
        The same line again continues after an interruption. The options are those of
        sentence-transformers' mine_hard_negatives: docs/data.md.
        """,
        """
        clip-train mine features --to cc12m-hard --relative-margin 0.05
        clip-train mine features --to s3://bucket/hard --range-max 50 --sampling-strategy random
        """,
    )
    parser.add_argument(
        "features",
        metavar="FEATURES",
        type=path_or_url,
        help="the folder that embed wrote",
    )
    parser.add_argument(
        "--to", metavar="PLACE", type=path_or_url, help="the folder or URL for the shards"
    )
    parser.add_argument(
        "--key",
        metavar="NAME",
        default="negatives",
        help="the key of the .json for the list (default: negatives)",
    )
    parser.add_argument(
        "--num-negatives",
        metavar="N",
        type=int,
        default=3,
        help="negatives of each image, at most (default: 3)",
    )
    parser.add_argument(
        "--relative-margin",
        metavar="X",
        type=float,
        help="a negative scores at most (1 - X) times the image's own caption",
    )
    parser.add_argument(
        "--absolute-margin",
        metavar="X",
        type=float,
        help="a negative scores at most X less than the image's own caption",
    )
    parser.add_argument(
        "--max-score", metavar="X", type=float, help="the highest score of a negative"
    )
    parser.add_argument(
        "--min-score", metavar="X", type=float, help="the lowest score of a negative"
    )
    parser.add_argument(
        "--range-min",
        metavar="N",
        type=int,
        default=0,
        help="skip the N best captions that scores and margins leave (default: 0)",
    )
    parser.add_argument(
        "--range-max",
        metavar="N",
        type=int,
        help="consider only the N captions with the highest scores (default: all; for random "
        "range-min + 10 num-negatives)",
    )
    parser.add_argument(
        "--sampling-strategy",
        choices=("top", "random"),
        default="top",
        help="take the best of them, or draw (default: top)",
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="of the draws (default: 0)"
    )


def run(
    features: str,
    to: str | None,
    key: str,
    num_negatives: int,
    relative_margin: float | None,
    absolute_margin: float | None,
    max_score: float | None,
    min_score: float | None,
    range_min: int,
    range_max: int | None,
    sampling_strategy: Literal["top", "random"],
    seed: int,
    process: Process,
) -> int:
    """Mine negatives and write every missing shard."""
    name = key.removeprefix("json.")
    if not to or not name:
        raise UserError(f"--to ({to}) and --key ({key}) must be given")

    from clip_tools.mine import write_mined
    from clip_train.mine import Selection

    selection = Selection(
        num_negatives=num_negatives,
        range_min=range_min,
        range_max=range_max,
        max_score=max_score,
        min_score=min_score,
        absolute_margin=absolute_margin,
        relative_margin=relative_margin,
        sampling_strategy=sampling_strategy,
        seed=seed,
    )
    print(write_mined(features, to, name, selection, quiet=process.quiet))
    print(
        f"next: clip-train index '{to}/*.tar', and train with data.train='{to}/*.tar' "
        f"data.negative_texts='{{json.{name}: {num_negatives}}}'"
    )
    return 0
