"""Read undecoded samples by their place in the order: the blocks of a stream, starting at any
sample. Before the first step it counts the shards that no index knows, on all ranks together.

An I/O error is retried and then ends the run; it never becomes an invalid sample. Damage of an
archive does, if a second read finds it again.
"""

import itertools
import logging
import math
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from clip_train import dist
from clip_train.batch import BatchSizes
from clip_train.data.benchmark import with_captions
from clip_train.data.config import DataConfig
from clip_train.data.index import ShardEntry, ShardIndex, SharedList, known_place
from clip_train.data.invalid import InvalidRecord
from clip_train.data.keep import KeptRows
from clip_train.data.order import Order, Segment, Source, WeightsStage, hash64
from clip_train.data.shards import PLAIN, SYNTHETIC, Reading, open_shard
from clip_train.data.tar import TarError, TarSample, iter_samples
from clip_train.errors import DataError, UserError
from clip_train.storage.blocks import BlockCache
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import StorageError
from clip_train.storage.redact import redact

RETRIES = 4
BACKOFF_SECONDS = 0.2  # doubled by each retry: 3 s in all
REREADS = 3  # times that an archive must look damaged at the same place before that is believed
MISSING = "missing: its shard has fewer samples"
COUNT_THREADS = 8  # of a rank; they wait for the disk or the network
ROUND_SECONDS = 10.0  # then ranks exchange their counts
# the last argument of hash64 for the seeds of sources: each use of a seed has its own
SOURCE_SEEDS = -4
CHANGING = (
    "bytes change on their way here, in images perhaps unseen; `clip-train index` lets every block "
    "of a remote shard be verified"
)

_log = logging.getLogger("clip_train.data")

# The members of a sample by extension, as bytes, and "__key__", "__url__" and "__shard__" (its
# shard's number in the list of all).
Fields = dict[str, Any]
Item = Fields | InvalidRecord


def read_shard(
    url: str,
    reading: Reading = PLAIN,
    offset: int = 0,
    unread: float = 0,
    is_read: Callable[[int], bool] | None = None,
) -> Generator[TarSample | InvalidRecord]:
    """The samples of a shard from byte `offset` on. The first `unread` samples come without their
    members, and so do those for which `is_read`, called with their number from `offset`, is false.

    If the same damage is found again when the shard is read again, the shard ends with one
    `InvalidRecord`. An error of the disk or the network is retried from the affected sample; it never
    counts as the end of the data.

    Raises:
        DataError: the shard still cannot be read after the retries.
    """
    failures = 0
    damages: list[str] = []
    done = 0  # samples before the one that is read next
    while True:
        is_read_here = None
        if is_read is not None:
            is_read_here = partial(_shifted, is_read, done)
        try:
            with open_shard(url, reading) as file:
                for sample in iter_samples(file, offset, unread, is_read_here):
                    yield sample
                    if damages:
                        _log.warning(
                            "%s: %s at first, but not when read again: %s",
                            redact(url),
                            damages[0],
                            CHANGING,
                        )
                    offset = sample.end
                    unread -= 1
                    done += 1
                    failures = 0
                    damages = []
            return
        except TarError as e:
            # The archive is damaged, or the connection is: then other bytes come next time.
            damages.append(str(e))
            if damages.count(str(e)) > REREADS:
                yield InvalidRecord(e.reason, url, f"byte {e.offset}")
                return
            if len(damages) > 4 * REREADS:
                raise DataError(
                    f"shard {url} comes damaged from byte {offset} on, each time elsewhere: "
                    f"{CHANGING}\n" + "\n".join(damages)
                ) from e
        except OSError as e:
            # the storage has already retried a StorageError
            if failures == RETRIES or isinstance(e, StorageError):
                raise DataError(
                    f"cannot read shard {url} from byte {offset} on, {failures} retries: "
                    f"{type(e).__name__}: {e}"
                ) from e
            time.sleep(BACKOFF_SECONDS * 2**failures)
            failures += 1


def _shifted(is_read: Callable[[int], bool], by: int, number: int) -> bool:
    return is_read(by + number)


@dataclass(frozen=True)
class Files:
    """The shards of a source, in the form that a loader's workers get."""

    places: Sequence[int]  # of each shard, as `ShardIndex.places`
    shared: SharedList  # `ShardIndex.shared`, of the shards of all sources
    first: int  # the number of the source's first shard in it
    storage: StorageConfig

    @classmethod
    def of(
        cls, index: ShardIndex, storage: StorageConfig, start: int = 0, stop: int | None = None
    ) -> "Files":
        """Shards [start, stop) of an index, all of which are counted. stop=None: up to the last
        shard."""
        places = [number or 0 for number in index.places[start:stop]]
        packed = array("I" if max(places) < 1 << 32 else "Q", places)
        return cls(packed, index.shared, start, storage)


class SegmentReader:
    """Reads segments of shards. If a segment follows the last one, reading continues there;
    otherwise the segment's shard is opened.

    keep_open: the file stays open between segments.
    cache: shared with the other workers that read the same stream.

    A shard of which `data.keep` keeps some samples is read as if it had no others: sample number 5
    of a segment is the sixth that is kept.
    """

    def __init__(self, files: Files, *, keep_open: bool, cache: BlockCache | None = None) -> None:
        self.files, self.keep_open, self._cache = files, keep_open, cache
        self._shard = -1
        self._next = 0  # the next sample that a segment may begin with
        # of the sample of the archive that is read next: its number, and its first byte
        self._number = self._offset = 0
        self._kept = KeptRows(None)  # of the shard
        self._samples: Generator[TarSample | InvalidRecord] | None = None

    def read(self, segment: Segment) -> list[Item]:
        """One item per sample of the segment; samples missing from the shard are invalid. Raises
        DataError."""
        shard, start, stop = segment
        url, entry, bits = self.files.shared[self.files.first + shard]
        if url.startswith(SYNTHETIC):
            return [
                {"__key__": f"{number:09d}", "__url__": url, "__shard__": self.files.first + shard}
                for number in range(start, stop)
            ]
        if self._kept.bits is not bits and self._kept.bits != bits:
            self._kept = KeptRows(bits)
        rows = self._kept.rows(start, stop)
        if self._samples is None or (self._shard, self._next) != (shard, start):
            self._seek(shard, rows[0], url, entry)
        assert self._samples is not None
        items: list[Item] = []
        ended = False
        while self._number <= rows[-1]:
            sample = next(self._samples, None)
            if sample is None:
                ended = True
                break
            if isinstance(sample, InvalidRecord):
                # the archive is damaged here, and its other samples cannot be read
                items.append(sample)
                ended = True
                break
            if self._number >= rows[0] and self._kept.holds(self._number):
                if sample.duplicate:
                    items.append(InvalidRecord("duplicate key", url, sample.key))
                else:
                    members = with_captions(sample.members, url)
                    number = self.files.first + shard
                    place = {"__key__": sample.key, "__url__": url, "__shard__": number}
                    items.append({**members, **place})
            self._number += 1
            self._offset = sample.end
        self._next = stop
        items += [InvalidRecord(MISSING, url, f"number {number}") for number in rows[len(items) :]]
        if not ended and stop == self.files.places[shard]:
            ended = True
            # behind the last sample that is kept there may be others
            if bits is None and next(self._samples, None) is not None:
                _log.warning(
                    "%s has more samples than the %d that are known: the others are left over",
                    redact(url),
                    stop,
                )
        if ended:
            self._shard = -1
        if ended or not self.keep_open:
            self._samples.close()
            self._samples = None
        return items

    def _seek(self, shard: int, number: int, url: str, entry: ShardEntry | None) -> None:
        """Open the shard so that sample `number` of the archive is read next. Start where reading
        stopped, or at the last sample before `number` whose offset is indexed, whichever is
        nearer."""
        known = known_place(entry, number)
        if self._shard != shard or not known.number <= self._number <= number:
            self._shard, self._number, self._offset = shard, known.number, known.offset
        unread = number - self._number
        reading = Reading(self.files.storage, entry.checksums if entry else None, self._cache)
        is_read = None
        if self._kept.bits is not None:
            is_read = partial(self._kept.holds, first=self._number)
        self._samples = read_shard(url, reading, self._offset, unread, is_read)


@dataclass
class LoadedBlock:
    """Consecutive samples of a source in one stream."""

    first: int  # the number of its first sample
    items: list[Item]  # in order

    @property
    def end(self) -> int:
        return self.first + len(self.items)


@dataclass
class Replacements:
    """The block of a source in which the search for a replacement has arrived."""

    begin: int  # the number at which the search began
    block: LoadedBlock  # all blocks from `begin` up to this one have no valid sample


class StreamReader:
    """Reads one stream of all sources, forward.

    keep_open: its shards stay open from block to block.
    caches: one for each source of each of the rank's streams; []: no other worker reads this
        stream.
    """

    def __init__(
        self,
        order: Order,
        files: Sequence[Files],
        stream: int,
        *,
        keep_open: bool,
        caches: Sequence[BlockCache] = (),
    ) -> None:
        self.order, self.files, self.stream = order, files, stream
        self._next = -1  # the number of the sample that is read next, if reading continues
        self._taken: list[int] = []  # samples of each source before number `_next`
        self._segments: list[SegmentReader] = []  # by source
        for number, source_files in enumerate(files):
            cache = None
            if caches:
                cache = caches[(stream * len(files) + number) % len(caches)]
            self._segments.append(SegmentReader(source_files, keep_open=keep_open, cache=cache))
        # by source: the block that was read last; an empty one at first
        self._blocks = [LoadedBlock(0, []) for _ in files]
        self._replacements: list[Replacements | None] = [None for _ in files]  # by source

    def at(self, count: int) -> Iterator[Item]:
        """Yield sample number `count` of the stream, then endless replacements: its block from half
        a block on, then the following blocks of its source. The caller takes the first one that
        decodes, which is the same on any layout. Raises DataError."""
        if count != self._next:
            self._taken = self.order.taken(count, self.order.streams, self.stream)
        self._next = count + 1
        source = self.order.source(count * self.order.streams + self.stream)
        number = self._taken[source]
        self._taken[source] += 1
        block = self._blocks[source]
        if not block.first <= number < block.end:
            # free its samples before the next ones are read
            block.items.clear()
            block = self._load(source, number, self._segments[source])
            self._blocks[source] = block
        items = block.items
        place = number - block.first
        yield items[place]
        for step in range(len(items)):
            other = (place + len(items) // 2 + step) % len(items)
            if other != place:
                yield items[other]
        end = block.end
        while True:
            found = self._replacements[source]
            if found is None or not found.begin <= end <= found.block.first:
                reader = SegmentReader(self.files[source], keep_open=False)
                found = Replacements(block.end, self._load(source, end, reader))
            following = found.block
            self._replacements[source] = Replacements(block.end, following)
            yield from following.items
            end = following.end

    def _load(self, source: int, number: int, reader: SegmentReader) -> LoadedBlock:
        """The block that holds sample `number` of the source in this stream."""
        block = self.order.sources[source].block(self.stream, number)
        items = [item for segment in block.segments for item in reader.read(segment)]
        return LoadedBlock(block.first, [items[place] for place in block.order])


def count_missing(
    index: ShardIndex,
    storage: StorageConfig,
    *,
    together: bool = True,
    log: Callable[[str], None] = lambda line: None,
) -> ShardIndex:
    """The index with the places of all shards; shards without a number are counted. Raises
    DataError if a shard cannot be read.

    Args:
        together: all ranks call this, and each counts some of the shards. False: this process
            counts all of them.
        log: called by rank 0 with a line about every round of `ROUND_SECONDS` but the first.
    """
    rank, world_size = 0, 1
    if together:
        rank, world_size = dist.rank(), dist.world_size()
    counts: dict[str, int] = {}
    shards = zip(index.shards, index.places, strict=True)
    uncounted = dict.fromkeys(shard for shard, count in shards if count is None)
    while True:
        todo = [shard for shard in uncounted if shard not in counts]
        if not todo:
            return index.with_places(counts)
        if rank == 0 and counts:
            log(
                f"counting samples: {len(counts)} of {len(counts) + len(todo)} shards are done; "
                "`clip-train index` keeps the counts"
            )
        count_some = partial(_count_some, todo[rank::world_size], storage)
        if together:
            for rank_counts in dist.gather_objects(dist.agreed(count_some)):
                counts |= rank_counts
        else:
            counts |= count_some()


def _count_some(urls: list[str], storage: StorageConfig) -> dict[str, int]:
    """Places by path or URL, of the shards that are counted before the round is over. Only headers
    are read. Raises DataError."""

    def count(url: str) -> int:
        return sum(1 for _ in read_shard(url, Reading(storage), unread=math.inf))

    end = time.monotonic() + ROUND_SECONDS
    counts: dict[str, int] = {}
    with ThreadPoolExecutor(COUNT_THREADS) as pool:
        for start in range(0, len(urls), COUNT_THREADS):
            group = urls[start : start + COUNT_THREADS]
            counts |= zip(group, pool.map(count, group), strict=True)
            if time.monotonic() > end:
                break
    return counts


def make_order(
    config: DataConfig,
    index: ShardIndex,
    storage: StorageConfig,
    keys: Mapping[str, Any],
    seed: int,
    sizes: BatchSizes,
    order_start: int = 0,
) -> tuple[Order, list[Files]]:
    """The order of a recipe's `data`, by its `order_keys`, and each source's shards. Raises
    UserError if a source is empty.

    order_start: the step whose global batch begins at position 0.
    """
    weights = config.train_weights or [1.0]
    stages = []
    for stage in config.train_weights_schedule or []:
        end = sizes.before(max(stage.until_step, order_start)) - sizes.before(order_start)
        stages.append(WeightsStage(end, tuple(stage.train_weights)))
    # without weights, all shards are one source
    source_sizes: tuple[int, ...] = (len(index.shards),)
    if config.train_weights and index.sources:
        source_sizes = index.sources
    edges = itertools.accumulate(source_sizes, initial=0)
    sources, files = [], []
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        source_files = Files.of(index, storage, start, stop)
        if not sum(source_files.places):
            kept = f" that {config.kept} keeps" if config.kept else ""
            raise UserError(
                f"data.train ({config.train}): found no samples{kept} in the {stop - start} shards "
                "of a source"
            )
        # blocks have one size at all steps, that of the largest share
        all_weights = [weights, *(stage.weights for stage in stages)]
        share = max(each[number] / sum(each) for each in all_weights)
        block = max(1, round(keys["data.shuffle_block"] * share))
        # a run with one source has the same order as before there were several
        source_seed = hash64(seed, number, SOURCE_SEEDS) if number else seed
        source = Source(
            source_files.places,
            keys["data.lanes"],
            source_seed,
            block,
            resampled=config.resampled,
        )
        sources.append(source)
        files.append(source_files)
    return Order(sources, weights, seed, stages), files
