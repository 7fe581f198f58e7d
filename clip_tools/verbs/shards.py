"""`clip-train shards`: a table or a folder of images with captions becomes indexed WebDataset
shards.
"""

import argparse
import itertools
import json
from collections import Counter
from pathlib import Path

from clip_train.data.formats import SkippedFiles
from clip_train.errors import DataError, UserError
from clip_train.processes import usable_cores
from launcher.cli.arguments import add_help, path_or_url
from launcher.cli.process import Process

RECIPE = "recipes/small.yaml"
LARGE_RECIPE = "recipes/vit_b32.yaml"
LARGE = 1_000_000  # samples
INSTALLED = Path(__file__).resolve().parents[2]  # a checkout, or site-packages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_help(
        parser,
        """
        Write WebDataset shards and their index. Rows whose image or caption cannot be used are left
        out and reported. After an interruption, run it again to continue. For URLs, use
        img2dataset.
        """,
        """
        clip-train shards captions.csv shards                   columns are found, or --image-key ...
        clip-train shards photos shards                         each x.jpg with its x.txt
        clip-train shards birds.csv birds --label-key kind      with birds/classes.json
        """,
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        type=path_or_url,
        help="a .csv, .tsv, .jsonl or .parquet; a folder of images",
    )
    parser.add_argument("out", metavar="OUT", type=path_or_url, help="folder for the shards")
    parser.add_argument(
        "--image-key",
        metavar="NAME",
        help="column of the image's path or bytes (default: filepath, file_name, image, ...)",
    )
    parser.add_argument(
        "--caption-key",
        metavar="NAMES",
        help="columns of captions: the first with one counts, all are kept by name (default: "
        "title, ...)",
    )
    parser.add_argument(
        "--label-key",
        metavar="NAME",
        help="column of labels for evaluation: numbers become .cls, names this field of the .json",
    )
    parser.add_argument(
        "--keep-columns",
        metavar="NAMES",
        help="further columns, separated by commas, for the .json",
    )
    parser.add_argument(
        "--images",
        metavar="DIR",
        type=path_or_url,
        help="base folder of relative paths (default: SOURCE's folder)",
    )
    parser.add_argument(
        "--per-shard", metavar="N", type=int, help="rows in a shard (default: 1000)"
    )
    parser.add_argument(
        "--workers", metavar="N", type=int, help="processes (default: one for each CPU)"
    )


def run(
    source: str,
    out: str,
    image_key: str | None,
    caption_key: str | None,
    label_key: str | None,
    keep_columns: str | None,
    images: str | None,
    per_shard: int | None,
    workers: int | None,
    process: Process,
) -> int:
    per_shard, workers = per_shard or 1000, workers or usable_cores()
    if per_shard < 1 or workers < 1:
        raise UserError(f"--per-shard ({per_shard}) and --workers ({workers}) must be at least 1")

    import numpy as np
    from rich.console import Console
    from rich.progress import track

    from clip_tools.shards.convert import (
        NO_DIGEST,
        STATS_SUFFIX,
        make_shards,
        read_rows,
        same_settings,
    )
    from clip_tools.shards.index import run_index
    from clip_tools.shards.summary import describe_labels, describe_repeats

    source_path, folder = Path(source).expanduser(), Path(out).expanduser()
    caption_keys = caption_key.split(",") if caption_key else []
    keep = keep_columns.split(",") if keep_columns else []
    skipped = SkippedFiles()
    read = read_rows(
        source_path, image_key, caption_keys, label_key, keep, skipped=skipped, out=folder
    )
    first = list(itertools.islice(read, 1))  # UserError before anything is written
    settings = {
        "source": str(source_path.absolute()),
        "bytes": source_path.stat().st_size if source_path.is_file() else None,
        "per_shard": per_shard,
        "image_key": image_key,
        "caption_key": caption_key,
    }
    further = {"label_key": label_key, "keep_columns": keep_columns}
    same_settings(folder, settings | {key: value for key, value in further.items() if value})
    base = source_path if source_path.is_dir() else source_path.parent
    if images:
        base = Path(images).expanduser()
    written = make_shards(
        itertools.chain(first, read), folder, base, per_shard=per_shard, workers=workers
    )
    stderr = Console(stderr=True)
    paths = list(track(written, "writing shards", console=stderr, disable=process.quiet))
    stats, digests = [], bytearray()
    for path in paths:
        shard = json.loads(path.with_name(path.stem + STATS_SUFFIX).read_text())
        digests += bytes.fromhex(shard.pop("digests", NO_DIGEST * shard["count"]))
        stats.append(shard)
    left_out = [image_and_reason for shard in stats for image_and_reason in shard["left_out"]]
    reasons = Counter(reason for _, reason in left_out)
    if not any(shard["successes"] for shard in stats):
        raise DataError(f"no sample could be made: {', '.join(sorted(reasons))}")
    if reasons:
        print(f"{reasons.total():,} rows were left out:")
        for reason, count in reasons.most_common():
            example = next(image for image, why in left_out if why == reason)
            print(f"  {count:,} {reason}, such as {example}")
        print("all of them are in the NNNNN_stats.json beside the shards")
    if skipped.counts:
        print(f"skipped {skipped}, which no row names as an image")
    transparent = sum(shard.get("transparent", 0) for shard in stats)
    if transparent:
        print(
            f"{transparent:,} images have transparent pixels: data.alpha=white (the default) "
            "blends them with white; OpenCLIP ignores the transparency, as data.alpha=drop does"
        )
    several_lines = sum(shard.get("several_lines", 0) for shard in stats)
    if several_lines:
        print(
            f"{several_lines:,} captions have several lines: training reads all lines as one text. "
            "If only the first line is the caption, remove the others; if each line is a caption, "
            "put them into a table as a list (docs/your_data.md)"
        )
    again = read_rows(source_path, image_key, caption_keys, None, [], out=folder)
    describe_repeats(np.frombuffer(digests, np.uint64), (row.image for row in again))
    run_index(
        [*map(str, paths)], caption_key=None, workers=workers, check=False, quiet=process.quiet
    )
    if label_key:
        labels = sum((Counter(shard.get("labels", {})) for shard in stats), Counter[str]())
        found = sum((Counter(shard.get("templates", {})) for shard in stats), Counter[str]())
        named = first[0].label_key is not None
        describe_labels(label_key, labels, found, folder, named=named)
    samples = sum(shard["successes"] for shard in stats)
    name = RECIPE if samples < LARGE else LARGE_RECIPE
    recipe = name if Path(name).is_file() else INSTALLED / name
    length = "" if samples < LARGE else " data.num_samples=null"  # the index has it
    names = f"{{{paths[0].stem}..{paths[-1].stem}}}" if len(paths) > 1 else "00000"
    print(f"next: clip-train train {recipe} data.train='{folder}/{names}.tar'{length}")
    return 0
