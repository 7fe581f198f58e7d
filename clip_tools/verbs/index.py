"""`clip-train index`: write the index of shards, or compare them with an existing one."""

import argparse

from launcher.cli.arguments import add_help, add_shards
from launcher.cli.process import Process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        "Read shards once and write clip_train_index.json beside them, on disk or on S3.",
        """
        clip-train index 's3://bucket/cc12m/{00000..01242}.tar'
        clip-train index shards/*.tar --check                   check for changes and damage
        clip-train index 'shards/*.tar' --columns json.clip_score,json.uid    for data.keep
        """,
    )
    add_shards(parser)
    parser.add_argument(
        "--caption-key",
        metavar="NAMES",
        help="as data.caption_key: samples with one of these can be used (default: txt)",
    )
    parser.add_argument(
        "--columns",
        metavar="NAMES",
        help="keys of the samples' .json, as json.x,json.y, whose values data.keep can read",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=int,
        help="processes (default: one for each CPU, 2 to 16)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="read again and compare with the index; write nothing",
    )


def run(
    shards: list[str],
    caption_key: str | None,
    columns: str | None,
    workers: int | None,
    check: bool,
    process: Process,
) -> int:
    from clip_tools.shards.index import run_index

    run_index(
        shards,
        caption_key=caption_key.split(",") if caption_key else None,
        workers=workers,
        check=check,
        quiet=process.quiet,
        columns=columns.split(",") if columns else (),
    )
    return 0
