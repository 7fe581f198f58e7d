"""`clip-train shards`: a table or a folder of images with captions becomes indexed WebDataset shards."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from clip_train.errors import DataError, UserError
from launcher.cli.index import run_index
from launcher.convert import Written, make_shards, read_rows, same_settings


def run(args: argparse.Namespace) -> int:
    source, folder = Path(args.source).expanduser(), Path(args.out).expanduser()
    per_shard, workers = args.per_shard or 1000, args.workers or len(os.sched_getaffinity(0))
    if per_shard < 1 or workers < 1:
        raise UserError(f"--per-shard ({per_shard}) and --workers ({workers}) must be at least 1")
    caption_keys = args.caption_key.split(",") if args.caption_key else []
    rows = read_rows(source, args.image_key, caption_keys)
    root = (
        Path(args.images).expanduser()
        if args.images
        else source
        if source.is_dir()
        else source.parent
    )
    size = source.stat().st_size if source.is_file() else None
    settings = {"source": str(source.absolute()), "bytes": size, "per_shard": per_shard}
    same_settings(folder, settings | {"image_key": args.image_key, "caption_key": args.caption_key})
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[samples]:,} samples in {task.completed:,.0f} shards"),
    )
    samples, done = 0, list[Written]()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None, samples=0)
        for written in make_shards(rows, folder, root, per_shard=per_shard, workers=workers):
            done.append(written)
            samples += written.samples
            bar.update(task, advance=1, samples=samples)
    reasons = Counter(reason for each in done for _, reason in each.left_out)
    if not samples:
        raise DataError(f"no sample could be made: {', '.join(sorted(reasons))}")
    if reasons:
        print(f"{reasons.total():,} rows were left out:")
        for reason, count in reasons.most_common():
            example = next(image for each in done for image, why in each.left_out if why == reason)
            print(f"  {count:,} {reason}, such as {example}")
        print("all of them are in the NNNNN_stats.json beside the shards")
    pattern = (
        f"{folder}/{{{done[0].path.stem}..{done[-1].path.stem}}}.tar"
        if len(done) > 1
        else str(done[0].path)
    )
    status = run_index(
        [str(each.path) for each in done], caption_key=None, workers=workers, check=False
    )
    print(f"next: clip-train train recipes/vit_b32.yaml data.train='{pattern}'")
    return status
