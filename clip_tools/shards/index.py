"""Read whole shards in several processes and write their index, or compare them with it."""

import contextlib
import difflib
import hashlib
import io
import itertools
import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from clip_tools.shards.equal import BATCHES, describe, sketch
from clip_train.data import decode, index
from clip_train.data.config import expand_existing
from clip_train.data.fields import key_of, metadata
from clip_train.data.index import FolderIndex, ShardEntry, look_up
from clip_train.data.index_columns import (
    ColumnFile,
    column_file,
    column_of,
    joined,
    places_in,
    read_column,
)
from clip_train.data.invalid import InvalidSample
from clip_train.data.keep import UID
from clip_train.data.shards import open_shard, split_name
from clip_train.data.tar import TarError, iter_samples
from clip_train.errors import DataError, UserError
from clip_train.processes import fork_server, usable_cores
from clip_train.storage.blocks import BlockFile, Checksums, block_sum
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import MissingError, StorageError
from clip_train.storage.urls import open_storage

SHOWN = 20  # shards named in a message
LOOKED_AT = 1000  # samples of the first shard, for the keys that it has
BLOCK_BYTES = 4 << 20
OUT_OF_ORDER = "members out of order (write the tar again with `tar --sort=name`)"

_log = logging.getLogger(__name__)


def run_index(
    specs: list[str],
    *,
    caption_key: Sequence[str] | None,
    workers: int | None,
    check: bool,
    quiet: bool,
    columns: Sequence[str] = (),
) -> None:
    """Reads every shard once. quiet: without a progress bar. columns: keys of the samples' `.json`.
    UserError for missing shards; DataError for shards that are damaged, unusable, or differ from
    their index."""
    sources = [source for spec in specs for source in expand_existing(spec, "SHARDS")]
    shards = list(dict.fromkeys(shard for source in sources for shard in source))
    found = look_up([shards], "auto", StorageConfig()) if check else None
    columns = tuple(dict.fromkeys(map(key_of, columns)))
    if check:
        check_columns(shards)
        columns = ()
    else:
        check_keys(shards[0], columns)
        check_writable(shards)  # UserError before hours of reading
        # an index keeps the columns that it has, for new and changed shards too
        columns = tuple(dict.fromkeys([*columns, *known_columns(shards)]))
    workers = workers or max(2, min(16, usable_cores()))
    indexed = index_shards(
        shards, caption_key=caption_key, workers=workers, quiet=quiet, columns=columns
    )
    entries = {url: result.entry for url, result in indexed.items()}
    damage = {url: entry.damage for url, entry in entries.items()}
    damaged = "are damaged; only the samples before the damage were counted"
    samples = sum(entry.samples for entry in entries.values())
    size = sum(entry.checksums.size for entry in entries.values())
    summary = f"{len(indexed)} shards, {samples:,} samples, {size / 2**30:.2f} GiB"
    if found is not None:
        known = {shard: found.shard(number).entry for number, shard in enumerate(shards)}
        refuse(
            {url: differences(known[url], entry) for url, entry in entries.items()},
            "differ from their index",
        )
        refuse(damage, damaged)
        print(f"{summary}: all match the index")
        return
    written = write_indexes(indexed)
    # samples that training replaces by others
    invalid = sum((result.invalid for result in indexed.values()), Counter[str]())
    used = samples - invalid.total()
    batches = sorted({min(batch, used) for batch in BATCHES})
    results = indexed.values()
    equal_captions = describe(
        [each.captions for each in results], [each.used for each in results], batches
    )
    print(f"{summary}; wrote {', '.join(written)}{equal_captions}")
    for name in columns:
        arrays = [result.columns[name] for result in results]
        print(f"column {name}: {describe_column(arrays)}")
    if invalid:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in invalid.most_common())
        print(f"{invalid.total():,} of {samples:,} samples cannot be used as they are: {reasons}")
    refuse(damage, damaged)
    without_image = sum(count for why, count in invalid.items() if why.startswith("no image"))
    is_without_images = samples > 0 and without_image == samples  # as `data.inputs` may want it
    if used == 0 and not is_without_images:
        names = [", ".join(result.names) for result in results if result.names]
        first = names[0] if names else "nothing"
        raise DataError(
            f"no sample of {len(indexed)} shards can be used; the first has {first}: name the "
            "caption's with --caption-key NAME here, and with data.caption_key=NAME in the recipe, "
            "or write the shards again"
        )


def refuse(reasons: Mapping[str, str | None], what: str) -> None:
    """DataError that lists the shards with a reason, if there are any."""
    lines = [f"  {url}: {reason}" for url, reason in reasons.items() if reason is not None]
    if not lines:
        return
    head = f"{len(lines)} of {len(reasons)} shards {what}"
    more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    raise DataError("\n".join([head, *lines[:SHOWN], *more]))


# -- columns


def known_columns(shards: Sequence[str]) -> list[str]:
    """The columns in the indexes of these shards."""
    names: dict[str, None] = {}
    for folder in dict.fromkeys(split_name(shard)[0] for shard in shards):
        names |= dict.fromkeys(index.load(folder, StorageConfig()).columns)
    return list(names)


def check_columns(shards: Sequence[str]) -> None:
    """UserError if a column of their indexes is missing or damaged."""
    for folder in dict.fromkeys(split_name(shard)[0] for shard in shards):
        for name, column in index.load(folder, StorageConfig()).columns.items():
            read_column(folder, name, column, StorageConfig())


def check_keys(shard: str, columns: Sequence[str]) -> None:
    """UserError for the first of these keys that is in no .json of the first samples. DataError if
    the shard cannot be read. Called before hours of reading."""
    if not columns:
        return
    keys: set[str] = set()
    try:
        with open_shard(shard) as file:
            for sample in itertools.islice(iter_samples(file), LOOKED_AT):
                keys |= metadata(sample.members).keys()
    except OSError as e:
        raise cannot_index(shard, e) from e
    except TarError:
        if not keys:
            return  # `index_shard` names the damage
    for name in columns:
        if name in keys:
            continue
        near = difflib.get_close_matches(name, keys, n=1)
        remedy = f"did you mean json.{near[0]}?" if near else "take it out"
        raise UserError(
            f"--columns json.{name}: none of the first {LOOKED_AT} samples of {shard} has it in its "
            f".json (its keys: {', '.join(sorted(keys)) or 'none'}); {remedy}"
        )


def describe_column(arrays: Sequence[Any]) -> str:
    """Its kind, and how many samples have a value."""
    column = joined(arrays)
    if column.dtype == UID:
        known = np.count_nonzero(column["f0"] | column["f1"])  # a missing uid is 0 in both halves
        return f"uids of {known:,} of {len(column):,} samples"
    if column.dtype.kind == "S":
        return f"texts of {np.count_nonzero(column != b''):,} of {len(column):,} samples"
    numbers = column[~np.isnan(column)]
    limits = f", {numbers.min():g} to {numbers.max():g}" if len(numbers) else ""
    return f"numbers of {len(numbers):,} of {len(column):,} samples{limits}"


# -- reading shards


@dataclass(frozen=True)
class Indexed:
    """The result of reading one shard."""

    entry: ShardEntry
    invalid: Counter[str]  # reason -> samples that cannot be used, as far as seen without decoding
    captions: Any  # by `equal.sketch`
    names: tuple[str, ...]  # of the first sample's members, and `json.x` for the keys of its .json
    columns: Mapping[str, Any]  # by name: an array with a value for each sample

    @property
    def used(self) -> int:
        """Samples whose captions are in the sketch."""
        return self.entry.samples - self.invalid.total()


class HashedFile(BlockFile):
    """Pass a file through and hash all of it in order."""

    def __init__(self, url: str, file: BinaryIO, block_bytes: int) -> None:
        super().__init__(url, file.seek(0, 2), block_bytes)
        self._file = file
        self._sums: list[str] = []
        self._sha256 = hashlib.sha256()

    def finish(self) -> tuple[Checksums, str]:
        """Hash the rest of the file; (the blocks' sums, the whole file's sha256)."""
        if self.size:
            self._load(-(-self.size // self.block_bytes) - 1)
        return Checksums(self.size, self.block_bytes, "".join(self._sums)), self._sha256.hexdigest()

    def _load(self, block: int) -> bytes:
        if block < len(self._sums):
            return self._read_block(block)
        data = b""
        while len(self._sums) <= block:  # in order, also the blocks that the tar reader skips
            data = self._read_block(len(self._sums))
            self._sums.append(block_sum(data))
            self._sha256.update(data)
        return data

    def _read_block(self, block: int) -> bytes:
        begin, end = self.bounds(block)
        self._file.seek(begin)
        data = self._file.read(end - begin)
        if len(data) != end - begin:
            raise OSError(
                f"{self.url}: {len(data)} of {end - begin} bytes at {begin}; is it being written?"
            )
        return data


def cannot_index(url: str, error: OSError) -> DataError:
    if isinstance(error, StorageError):  # its message has the URL and the reason
        remedy = "; correct the URL, or its range" if isinstance(error, MissingError) else ""
        return DataError(f"cannot index {error}{remedy}")
    return DataError(f"cannot index {url}: {type(error).__name__}: {error}")


def index_shard(
    url: str,
    caption_key: decode.CaptionKey = None,
    block_bytes: int = BLOCK_BYTES,
    columns: Sequence[str] = (),
) -> Indexed:
    """One shard's entry. A damaged archive is counted up to its damage, which the entry names.

    caption_key: as `data.caption_key`; only decides which samples are invalid. columns: keys of the
    samples' .json.

    Raises:
        DataError: it cannot be read, or a value is not for a column.
    """
    samples, offsets, damage = 0, array("Q"), None
    invalid: Counter[str] = Counter()
    seen: set[str] = set()
    captions: list[str] = []
    names: list[str] = []
    values: dict[str, list[Any]] = {name: [] for name in columns}
    try:
        with open_shard(url) as file:
            hashed = HashedFile(url, file, block_bytes)
            try:
                for sample in iter_samples(io.BufferedReader(hashed)):
                    try:
                        captions.append(decode.usable_caption(sample, url, caption_key))
                    except InvalidSample as e:
                        # a key that came before: the other members are there
                        reason = OUT_OF_ORDER if sample.key in seen else str(e)
                        invalid[reason] += 1
                    seen.add(sample.key)
                    fields: Mapping[str, Any] = {}
                    if columns or not samples:
                        fields = metadata(sample.members)
                    if not samples:
                        names = [*sample.members, *(f"json.{key}" for key in fields)]
                    for name in columns:
                        values[name].append(fields.get(name))
                    samples += 1
                    if samples % index.OFFSET_EVERY == 0:
                        offsets.append(sample.end)
            except TarError as e:
                damage = str(e)
            checksums, sha256 = hashed.finish()
    except OSError as e:
        raise cannot_index(url, e) from e
    entry = ShardEntry(samples, sha256, checksums, damage=damage, offsets=offsets)
    arrays = {name: column_of(name, each) for name, each in values.items()}
    return Indexed(
        entry=entry,
        invalid=invalid,
        captions=sketch(captions),
        names=tuple(names),
        columns=arrays,
    )


def index_shards(
    urls: list[str],
    *,
    caption_key: decode.CaptionKey = None,
    block_bytes: int = BLOCK_BYTES,
    workers: int = 2,
    quiet: bool = True,
    columns: Sequence[str] = (),
) -> dict[str, Indexed]:
    """The contents of all shards, read by `workers` processes (1: by this one). DataError if one
    cannot be read.

    quiet: without a progress bar.
    """
    read = partial(
        index_shard, caption_key=caption_key, block_bytes=block_bytes, columns=tuple(columns)
    )
    todo = list(dict.fromkeys(urls))
    workers = min(workers, len(todo))
    with contextlib.ExitStack() as stack:
        results: Iterable[Indexed] = map(read, todo)
        if workers > 1:
            context = fork_server()
            context.set_forkserver_preload([__name__])
            pool = ProcessPoolExecutor(workers, mp_context=context)
            stack.callback(pool.shutdown, cancel_futures=True)
            results = pool.map(read, todo)
        try:
            shown = track(
                results, "indexing", len(todo), console=Console(stderr=True), disable=quiet
            )
            return dict(zip(todo, shown, strict=True))
        except BrokenProcessPool as e:
            raise DataError(
                "an indexing process died; if memory ran out (see dmesg), use fewer --workers"
            ) from e


def check_writable(shards: Sequence[str]) -> None:
    """Write the indexes of these shards' folders without a change, and an empty one where there is
    none. UserError if one cannot be written."""
    for folder in dict.fromkeys(split_name(shard)[0] for shard in shards):
        write_index(folder, {})


def write_indexes(indexed: Mapping[str, Indexed]) -> list[str]:
    """Add to the index of every folder that holds one of these shards. Returns the indexes' paths.
    UserError as `write_index`."""
    folders: dict[str, dict[str, Indexed]] = {}
    for url, result in indexed.items():
        folder, name = split_name(url)
        folders.setdefault(folder, {})[name] = result
    for folder, results in folders.items():
        write_index(folder, results)
    return [folder + index.INDEX_NAME for folder in folders]


def write_index(folder: str, results: Mapping[str, Indexed]) -> None:
    """Add these shards, by their names in the folder, to its index.

    Raises:
        UserError: the existing index is damaged, or the index cannot be written.
    """
    known = index.load(folder, StorageConfig())
    entries = {name: index.entry_of(line.line) for name, line in known.lines.items()}
    new = {name: result.entry for name, result in results.items()}
    columns = merged_columns(folder, known, results)
    try:
        files = write_columns(folder, columns)
        content = index.to_bytes(entries | new, files)
        # a storage of this one file has it under the name ""
        open_storage(folder + index.INDEX_NAME).put_bytes("", content)
    except OSError as e:
        raise UserError(
            f"the index cannot be written beside the shards ({type(e).__name__}: {e})"
        ) from e
    replaced = {column.file for column in known.columns.values()}
    for name in sorted(replaced - {column.file for column in files.values()}):
        try:
            open_storage(folder + name).delete("")
        except OSError as e:  # the new index does not name it
            _log.warning(
                "%s is not used any more, and cannot be removed (%s: %s)",
                folder + name,
                type(e).__name__,
                e,
            )


class MergedColumn(NamedTuple):
    """A column of a folder's index, from values that were known and values that were read now."""

    values: Any  # array with a value for each sample of the shards that have values
    without: list[str]  # the shards that have none


def merged_columns(
    folder: str, known: FolderIndex, results: Mapping[str, Indexed]
) -> dict[str, MergedColumn]:
    """The columns of a folder's index by name. results: of the shards that were read now."""
    samples = {name: line.samples for name, line in known.lines.items()}
    # shards that have not changed: their known values still hold
    unchanged = {
        name
        for name, line in known.lines.items()
        if name not in results or results[name].entry.sha256 == line.sha256
    }
    read_now = {name: None for result in results.values() for name in result.columns}
    merged: dict[str, MergedColumn] = {}
    for column in sorted({*known.columns, *read_now}):
        values: Any = None
        places: dict[str, slice] = {}
        if column in known.columns:
            values = read_column(folder, column, known.columns[column], StorageConfig())
            places = places_in(known.columns[column], samples)
        parts, without = [], []
        for shard in sorted({*samples, *results}):
            if shard in results and column in results[shard].columns:
                parts.append(results[shard].columns[column])
            elif shard in unchanged and shard in places:
                parts.append(values[places[shard]])
            else:
                without.append(shard)
        if parts:
            merged[column] = MergedColumn(joined(parts), without)
    return merged


def write_columns(folder: str, columns: Mapping[str, MergedColumn]) -> dict[str, ColumnFile]:
    """Writes columns beside the index, by name. OSError."""
    files = {}
    for name, merged in columns.items():
        with column_file(merged.values, merged.without) as (column, path):
            open_storage(folder + column.file).put_file(path, "")
        files[name] = column
    return files


def differences(then: ShardEntry | None, now: ShardEntry) -> str | None:
    """How a shard differs from its index, or None."""
    if then is None:
        return "is not in the index"
    if then.checksums.size != now.checksums.size:
        return f"has {now.checksums.size} bytes, the index says {then.checksums.size}"
    if then.sha256 == now.sha256:
        return None
    block_bytes = then.checksums.block_bytes
    num_blocks = -(-then.checksums.size // block_bytes)
    differing = [
        block for block in range(num_blocks) if then.checksums.of(block) != now.checksums.of(block)
    ]
    return (
        f"differs in {len(differing)} blocks of {block_bytes} bytes, the first at byte "
        f"{differing[0] * block_bytes}"
    )
