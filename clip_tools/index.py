"""`clip-train index`: makes the shard index, or compares shards with the one that is there."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clip_train.data.config import existing
from clip_train.data.index import look_up
from clip_train.data.inspect import (
    OUT_OF_ORDER,
    differences,
    index_shards,
    try_folders,
    write_indexes,
)
from clip_train.errors import DataError, UserError
from clip_train.storage.config import StorageConfig

SHOWN = 20  # shards named in a message


def run(args: argparse.Namespace) -> int:
    names = args.caption_key.split(",") if args.caption_key else None
    return run_index(
        args.shards,
        caption_key=names,
        workers=args.workers,
        check=args.check,
        quiet=args.quiet,
        overwrite_sizes=args.overwrite_sizes,
    )


def run_index(
    specs: list[str],
    *,
    caption_key: Sequence[str] | None,
    workers: int | None,
    check: bool,
    quiet: bool,
    overwrite_sizes: bool = False,
) -> int:
    """Reads every shard once. UserError for shards that are not there; DataError for what is wrong
    with them.
    """
    sources = [part for spec in specs for part in existing(spec, "SHARDS")]
    shards = list(dict.fromkeys(shard for source in sources for shard in source))
    if workers is not None and workers < 1:
        raise UserError(f"--workers ({workers}) must be at least 1")
    known = look_up([shards], "auto", StorageConfig()).entries if check else {}
    if not check:
        with writing():
            try_folders(shards)
    columns = (TextColumn("indexing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    last = TextColumn("{task.fields[last]}")
    with Progress(*columns, last, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("", total=len(shards), last="")
        found = index_shards(
            shards,
            caption_key=caption_key,
            workers=workers or max(2, min(16, len(os.sched_getaffinity(0)))),
            progress=lambda url: bar.update(task, advance=1, last=url.rsplit("/", 1)[-1]),
        )
    samples = sum(each.entry.samples for each in found.values())
    size = sum(each.entry.checksums.size for each in found.values())
    summary = f"{len(found)} shards, {samples:,} samples, {size / 2**30:.2f} GiB"
    if check:
        compared = {url: differences(known.get(url), each.entry) for url, each in found.items()}
        refuse(f"of {len(found)} shards are not what their index says", compared)
        print(f"{summary}: all as the index says")
        return 0
    with writing():
        written, left = write_indexes(found, overwrite_sizes=overwrite_sizes)
    print(f"{summary}; wrote {', '.join(written)}{'' if left else ' and sizes.json'}")
    if left:
        print(
            f"left as another tool has written it: {', '.join(left)}; --overwrite-sizes writes "
            "these counts into it"
        )
    # samples that others replace
    invalid = sum((each.invalid for each in found.values()), Counter[str]())
    if invalid:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in invalid.most_common())
        print(f"{invalid.total():,} of {samples:,} samples cannot be used as they are: {reasons}")
    if invalid[OUT_OF_ORDER]:
        print(
            "the files of a sample must be neighbours in the tar: write it again with `tar "
            "--sort=name`"
        )
    damage = {url: each.entry.damage for url, each in found.items()}
    refuse("shards are damaged, and were counted up to there", damage)
    if invalid.total() == samples:
        names = next((", ".join(each.names) for each in found.values() if each.names), "nothing")
        raise DataError(
            f"no sample of {len(found)} shards can be used; the first has {names}: name the "
            "caption's with --caption-key NAME here, and with data.caption_key=NAME in the "
            "recipe, or write the shards again"
        )
    return 0


@contextmanager
def writing() -> Iterator[None]:
    """UserError where the index cannot be written."""
    try:
        yield
    except OSError as e:
        raise UserError(
            f"the index cannot be written beside the shards ({type(e).__name__}: {e})"
        ) from e


def refuse(what: str, problems: Mapping[str, str | None]) -> None:
    """DataError with the shards that have a problem."""
    lines = [f"  {url}: {problem}" for url, problem in problems.items() if problem is not None]
    if lines:
        more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        raise DataError("\n".join([f"{len(lines)} {what}", *lines[:SHOWN], *more]))
