"""Read whole shards in several processes and write their index, or compare them with it."""

import contextlib
import hashlib
import io
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import track

from clip_tools.shards.equal import BATCHES, describe, sketch
from clip_train.data import decode, index
from clip_train.data.config import existing
from clip_train.data.fields import metadata
from clip_train.data.index import ShardEntry, look_up
from clip_train.data.invalid import InvalidSample
from clip_train.data.shards import open_shard, split_name
from clip_train.data.tar import TarError, iter_samples
from clip_train.errors import DataError, UserError
from clip_train.processes import fork_server, usable_cores
from clip_train.storage.blocks import BlockFile, Checksums, block_sum
from clip_train.storage.config import StorageConfig
from clip_train.storage.urls import open_storage

SHOWN = 20  # shards named in a message
BLOCK_BYTES = 4 << 20
OUT_OF_ORDER = "members out of order (write the tar again with `tar --sort=name`)"


def run_index(
    specs: list[str],
    *,
    caption_key: Sequence[str] | None,
    workers: int | None,
    check: bool,
    quiet: bool,
) -> None:
    """Reads every shard once. quiet: without a progress bar. UserError for missing shards;
    DataError for shards that are damaged, unusable, or differ from their index."""
    sources = [source for spec in specs for source in existing(spec, "SHARDS")]
    shards = list(dict.fromkeys(shard for source in sources for shard in source))
    found = look_up([shards], "auto", StorageConfig()).shared if check else None
    if not check:
        write_indexes({}, shards)  # raise UserError before hours of reading
    workers = workers or max(2, min(16, usable_cores()))
    indexed = index_shards(shards, caption_key=caption_key, workers=workers, quiet=quiet)
    num, entries = len(indexed), {url: result.entry for url, result in indexed.items()}
    samples = sum(entry.samples for entry in entries.values())
    size = sum(entry.checksums.size for entry in entries.values())
    summary = f"{num} shards, {samples:,} samples, {size / 2**30:.2f} GiB"
    if found is not None:
        known = dict(found[number] for number in range(len(shards)))
        refuse(
            {url: differences(known[url], entry) for url, entry in entries.items()},
            "differ from their index",
        )
        print(f"{summary}: all match the index")
        return
    written = write_indexes(indexed)
    # these are replaced by other samples
    invalid = sum((result.invalid for result in indexed.values()), Counter[str]())
    used = samples - invalid.total()
    batches = sorted({min(batch, used) for batch in BATCHES})
    results = indexed.values()
    equal = describe([each.captions for each in results], [each.used for each in results], batches)
    print(f"{summary}; wrote {', '.join(written)}{equal}")
    if invalid:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in invalid.most_common())
        print(f"{invalid.total():,} of {samples:,} samples cannot be used as they are: {reasons}")
    refuse(
        {url: entry.damage for url, entry in entries.items()},
        "are damaged, and were counted up to there",
    )
    without_image = sum(count for why, count in invalid.items() if why.startswith("no image"))
    if invalid.total() == samples and (without_image < samples or not samples):
        # `data.inputs` need no image
        names = [", ".join(result.names) for result in indexed.values() if result.names]
        raise DataError(
            f"no sample of {num} shards can be used; the first has {[*names, 'nothing'][0]}: name "
            "the caption's with --caption-key NAME here, and with data.caption_key=NAME in the "
            "recipe, or write the shards again"
        )


def refuse(reasons: Mapping[str, str | None], what: str) -> None:
    """DataError that lists the shards with a reason, if there are any."""
    lines = [f"  {url}: {reason}" for url, reason in reasons.items() if reason is not None]
    if not lines:
        return
    head = f"{len(lines)} of {len(reasons)} shards {what}"
    more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    raise DataError("\n".join([head, *lines[:SHOWN], *more]))


# -- reading shards


@dataclass(frozen=True)
class Indexed:
    """The result of reading one shard."""

    entry: ShardEntry
    invalid: Counter[str]  # reason -> samples that cannot be used, as far as seen without decoding
    captions: Any  # by `equal.sketch`
    names: tuple[str, ...]  # of the first sample's members, and `json.x` for the keys of its .json

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
        data = b""
        for number in range(min(block, len(self._sums)), block + 1):  # skipped blocks too
            begin, end = self.bounds(number)
            self._file.seek(begin)
            data = self._file.read(end - begin)
            if len(data) != end - begin:
                raise OSError(
                    f"{self.url}: {len(data)} of {end - begin} bytes at {begin}; is it being "
                    "written?"
                )
            if number == len(self._sums):
                self._sums.append(block_sum(data))
                self._sha256.update(data)
        return data


def index_shard(
    url: str, caption_key: decode.CaptionKey = None, block_bytes: int = BLOCK_BYTES
) -> Indexed:
    """One shard's entry. A damaged archive is counted up to its damage, which the entry names.

    caption_key: as `data.caption_key`; only decides which samples are invalid.

    Raises:
        DataError: it cannot be read.
    """
    samples, offsets, damage = 0, array("Q"), None
    invalid: Counter[str] = Counter()
    seen: set[str] = set()
    captions: list[str] = []
    names: list[str] = []
    try:
        with open_shard(url) as file:
            hashed = HashedFile(url, file, block_bytes)
            try:
                for sample in iter_samples(io.BufferedReader(hashed)):
                    try:
                        captions.append(decode.usable_caption(sample, url, caption_key))
                    except InvalidSample as e:
                        invalid[OUT_OF_ORDER if sample.key in seen else str(e)] += 1
                    seen.add(sample.key)
                    if not samples:
                        keys = metadata(sample.members)
                        names = [*sample.members, *(f"json.{key}" for key in keys)]
                    samples += 1
                    if samples % index.OFFSET_EVERY == 0:
                        offsets.append(sample.end)
            except TarError as e:
                damage = str(e)
            checksums, sha256 = hashed.finish()
    except OSError as e:
        raise DataError(f"cannot index {url}: {type(e).__name__}: {e}") from e
    entry = ShardEntry(samples, sha256, checksums, damage, offsets)
    return Indexed(entry, invalid, sketch(captions), tuple(names))


def index_shards(
    urls: list[str],
    *,
    caption_key: decode.CaptionKey = None,
    block_bytes: int = BLOCK_BYTES,
    workers: int = 2,
    quiet: bool = True,
) -> dict[str, Indexed]:
    """The contents of all shards, read by `workers` processes (1: by this one). DataError if one
    cannot be read.

    quiet: without a progress bar.
    """
    read = partial(index_shard, caption_key=caption_key, block_bytes=block_bytes)
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


def write_indexes(indexed: Mapping[str, Indexed], shards: Sequence[str] = ()) -> list[str]:
    """Adds to the index of every folder that holds one of these shards. Returns the indexes' paths.

    shards: whose folders' indexes are written as they are, or empty, though nothing is added.

    Raises:
        UserError: an existing index is damaged, or the index cannot be written.
    """
    folders: dict[str, dict[str, ShardEntry]] = {}
    for url in [*shards, *indexed]:
        folder, name = split_name(url)
        entries = folders.setdefault(folder, {})
        if url in indexed:
            entries[name] = indexed[url].entry
    for folder, entries in folders.items():
        known = {
            name: index.entry_of(each.line)
            for name, each in index.load(folder, StorageConfig()).items()
        }
        try:
            content = index.to_bytes(known | entries)
            open_storage(folder + index.INDEX_NAME).put_bytes("", content)
        except OSError as e:
            raise UserError(
                f"the index cannot be written beside the shards ({type(e).__name__}: {e})"
            ) from e
    return [folder + index.INDEX_NAME for folder in folders]


def differences(then: ShardEntry | None, now: ShardEntry) -> str | None:
    """How a shard differs from its index, or None."""
    if then is None:
        return "is not in the index"
    if then.checksums.size != now.checksums.size:
        return f"has {now.checksums.size} bytes, the index says {then.checksums.size}"
    if then.sha256 == now.sha256:
        return None
    size = then.checksums.block_bytes
    other = [
        k
        for k in range(-(-then.checksums.size // size))
        if then.checksums.of(k) != now.checksums.of(k)
    ]
    return f"differs in {len(other)} blocks of {size} bytes, the first at byte {other[0] * size}"
