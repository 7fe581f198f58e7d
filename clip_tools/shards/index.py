"""`clip-train index`: makes the shard index, or compares shards with the one that is there."""

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clip_tools.shards.shard_index import (
    OUT_OF_ORDER,
    differences,
    index_shards,
    try_folders,
    write_indexes,
)
from clip_train.data.config import existing
from clip_train.data.index import look_up
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
    )


def run_index(
    specs: list[str],
    *,
    caption_key: Sequence[str] | None,
    workers: int | None,
    check: bool,
    quiet: bool,
) -> int:
    """Reads every shard once. quiet: without a progress bar. UserError for shards that are not
    there; DataError for shards that are damaged, unusable, or not what their index says."""
    sources = [source for spec in specs for source in existing(spec, "SHARDS")]
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
        indexed = index_shards(
            shards,
            caption_key=caption_key,
            workers=workers or max(2, min(16, len(os.sched_getaffinity(0)))),
            progress=lambda url: bar.update(task, advance=1, last=url.rsplit("/", 1)[-1]),
        )
    num, entries = len(indexed), {url: result.entry for url, result in indexed.items()}
    samples = sum(entry.samples for entry in entries.values())
    size = sum(entry.checksums.size for entry in entries.values())
    summary = f"{num} shards, {samples:,} samples, {size / 2**30:.2f} GiB"
    if check:
        wrong = {url: differences(known.get(url), entry) for url, entry in entries.items()}
        refuse(wrong, "are not what their index says")
        print(f"{summary}: all as the index says")
        return 0
    with writing():
        written = write_indexes(indexed)
    print(f"{summary}; wrote {', '.join(written)}")
    invalid = Counter[str]()  # these are replaced by other samples
    for result in indexed.values():
        invalid += result.invalid
    if invalid:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in invalid.most_common())
        print(f"{invalid.total():,} of {samples:,} samples cannot be used as they are: {reasons}")
    if invalid[OUT_OF_ORDER]:
        remedy = "write it again with `tar --sort=name`"
        print(f"the files of a sample must be neighbors in the tar: {remedy}")
    damaged = {url: entry.damage for url, entry in entries.items()}
    refuse(damaged, "are damaged, and were counted up to there")
    if invalid.total() == samples:
        names = [", ".join(result.names) for result in indexed.values() if result.names]
        raise DataError(
            f"no sample of {num} shards can be used; the first has {[*names, 'nothing'][0]}: name "
            "the caption's with --caption-key NAME here, and with data.caption_key=NAME in the "
            "recipe, or write the shards again"
        )
    return 0


@contextmanager
def writing() -> Iterator[None]:
    """UserError if the index cannot be written."""
    try:
        yield
    except OSError as e:
        raise UserError(
            f"the index cannot be written beside the shards ({type(e).__name__}: {e})"
        ) from e


def refuse(reasons: Mapping[str, str | None], what: str) -> None:
    """DataError that lists the shards with a reason, if there are any."""
    lines = [f"  {url}: {reason}" for url, reason in reasons.items() if reason is not None]
    if not lines:
        return
    head = f"{len(lines)} of {len(reasons)} shards {what}"
    more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    raise DataError("\n".join([head, *lines[:SHOWN], *more]))
