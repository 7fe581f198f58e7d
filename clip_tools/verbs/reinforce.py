"""`clip-train reinforce`: shards with teachers' features, stored augmentations, synthetic captions."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, get_args

from clip_train.errors import UserError
from launcher.cli.arguments import add_help, add_shards, path_or_url, paths_or_urls
from launcher.cli.process import Process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Write SHARDS again: each sample with stored augmentations, and with the features that one or
        more teachers have of each of them and of its captions. data.reinforced trains on them. Under
        torchrun each rank writes its share. The same line again continues after an interruption. A
        teacher is any PLACE that evaluate takes.
        """,
        """
        clip-train reinforce 'cc12m/*.tar' --teacher open_clip:ViT-L-14/openai --to cc12m-dr
        clip-train reinforce 's3://b/{00..99}.tar' --teacher runs/large,runs/other --to s3://b/dr
        """,
    )
    add_shards(parser)
    parser.add_argument(
        "--teacher",
        metavar="PLACES",
        type=paths_or_urls,
        help="the teachers, separated by commas",
    )
    parser.add_argument(
        "--to", metavar="PLACE", type=path_or_url, help="the folder or URL for the shards"
    )
    parser.add_argument(
        "--augmentations",
        metavar="N",
        type=int,
        default=10,
        help="augmentations per image (default: 10)",
    )
    parser.add_argument(
        "--crop",
        metavar="AREA",
        type=float,
        default=0.08,
        help="the smallest fraction of an image in a crop (default: 0.08)",
    )
    parser.add_argument(
        "--synthetic-key",
        metavar="NAME",
        default="syn.json",
        help="where synthetic captions are, as data.caption_key (default: syn.json)",
    )
    parser.add_argument(
        "--alpha",
        metavar="KIND",
        default="white",
        help="transparent pixels, as data.alpha in training: white or drop (default: white)",
    )
    parser.add_argument(
        "--half",
        action="store_true",
        help="write features with 16 bits; loss curves then differ by this rounding",
    )


def run(
    shards: list[str],
    teacher: str | None,
    to: str | None,
    augmentations: int,
    crop: float,
    synthetic_key: str,
    alpha: Any,
    half: bool,
    process: Process,
) -> int:
    """Write every missing shard; under torchrun each rank writes its share."""
    places = (teacher or "").split(",")
    if not all(places) or not to or not 1 <= augmentations <= 1000 or not 0 < crop <= 1:
        raise UserError(
            f"--teacher ({teacher}) and --to ({to}) must be given, --augmentations "
            f"({augmentations}) be from 1 to 1000, and --crop ({crop}) from 0 to 1"
        )

    from clip_tools.embed import load
    from clip_tools.reinforce import Options, write_missing
    from clip_train import dist
    from clip_train.data.config import expand_existing
    from clip_train.data.pixels import Alpha

    if alpha not in get_args(Alpha):
        raise UserError(f"--alpha ({alpha}) must be white or drop, as data.alpha in training")
    sources = [source for spec in shards for source in expand_existing(spec, "SHARDS")]
    shard_of = {Path(shard).name: shard for source in sources for shard in source}
    if len(shard_of) < sum(map(len, sources)):
        raise UserError(f"SHARDS ({' '.join(shards)}): two have one name; write them apart")
    options = Options(augmentations, crop, synthetic_key, alpha, half)
    with process.as_rank() as device:
        teachers = [load(place, device=str(device)) for place in places]
        if any(each.patches is not None for each in teachers):
            raise UserError(
                f"--teacher ({teacher}): a teacher was trained at native resolution, and the stored "
                "crops are squares; take one that was trained on squares"
            )
        sizes = {each.image_size for each in teachers}
        if len(sizes) > 1:
            raise UserError(
                f"--teacher ({teacher}): teachers of one shard see the same pixels, and their "
                f"image_size is {sizes}; write shards for each"
            )
        share = [*shard_of.items()][dist.rank() :: dist.world_size()]
        dist.agreed(partial(write_missing, to, share, teachers, options))
        if dist.is_main():
            widths = [each.texts([""]).shape[1] for each in teachers]
            scales = [
                round(each.model.get_parameter("logit_scale").exp().item(), 4) for each in teachers
            ]
            alpha_key = "" if alpha == "white" else f" data.alpha={alpha}"
            print(
                f"next: clip-train index '{to}/*.tar', and train with "
                f"data.train='{to}/*.tar' data.reinforced='{widths}' "
                f"loss.teacher_scales='{scales}'{alpha_key}"
            )
    return 0
