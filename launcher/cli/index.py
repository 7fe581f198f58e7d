"""`clip-train index`: makes the shard index, or compares shards with the one that is there."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clip_train.data.index import ShardEntry, find_index
from clip_train.data.indexing import differences, index_shards, try_folders, write_indexes
from clip_train.data.sources import expand, missing_files
from clip_train.errors import DataError, UserError
from clip_train.storage import StorageConfig

SHOWN = 20  # shards named in a message


def run(args: argparse.Namespace) -> int:
    return run_index(args.shards, caption_key=args.caption_key, workers=args.workers, check=args.check)


def run_index(specs: list[str], *, caption_key: str | None, workers: int | None, check: bool) -> int:
    """Reads every shard once. UserError for shards that are not there; DataError for what is wrong with them."""
    shards = list(dict.fromkeys(shard for spec in specs for shard in expand(spec, "SHARDS")))
    missing = missing_files(shards)
    if missing:
        raise UserError(f"SHARDS: {len(missing)} of {len(shards)} are not there, the first is {missing[0]}")
    if workers is not None and workers < 1:
        raise UserError(f"--workers ({workers}) must be at least 1")
    known = find_index(shards, StorageConfig()).entries if check else {}
    if not check:
        with writing():
            try_folders(shards)
    entries = read(shards, caption_key, workers or max(2, min(16, len(os.sched_getaffinity(0)))))
    samples = sum(entry.samples for entry in entries.values())
    summary = f"{len(entries)} shards, {samples:,} samples, {total_bytes(entries) / 2**30:.2f} GiB"
    if check:
        wrong = {url: why for url, entry in entries.items() if (why := differences(known.get(url), entry))}
        if wrong:
            raise DataError(listing(f"{len(wrong)} of {len(entries)} shards are not what their index says", wrong))
        print(f"{summary}: all as the index says")
        return 0
    with writing():
        written = write_indexes(entries)
    print(f"{summary}; wrote sizes.json and {', '.join(written)}")
    damaged = {url: entry.damage for url, entry in entries.items() if entry.damage is not None}
    if damaged:
        raise DataError(listing(f"{len(damaged)} shards are damaged, and were counted up to there", damaged))
    unusable = sum(entry.unusable for entry in entries.values())
    if unusable:
        print(f"{unusable:,} more samples have no image or no caption and are not counted")
    return 0


@contextmanager
def writing() -> Iterator[None]:
    """UserError where the index cannot be written."""
    try:
        yield
    except OSError as e:
        raise UserError(f"the index cannot be written beside the shards ({type(e).__name__}: {e})") from e


def read(shards: list[str], caption_key: str | None, workers: int) -> dict[str, ShardEntry]:
    """The entries, with a progress bar."""
    columns = (TextColumn("indexing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[last]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(shards), last="")
        return index_shards(
            shards,
            caption_key=caption_key,
            workers=workers,
            progress=lambda url, entry: bar.update(task, advance=1, last=url.rsplit("/", 1)[-1]),
        )


def total_bytes(entries: Mapping[str, ShardEntry]) -> int:
    return sum(entry.checksums.size for entry in entries.values())


def listing(head: str, rows: Mapping[str, str]) -> str:
    lines = [f"  {url}: {why}" for url, why in list(rows.items())[:SHOWN]]
    return "\n".join([head, *lines, *([f"  and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else [])])
