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
from clip_train.data.benchmark import with_captions
from clip_train.data.config import DataConfig
from clip_train.data.index import OFFSET_EVERY, ShardEntry, ShardIndex, SharedList
from clip_train.data.invalid import Invalid
from clip_train.data.order import Order, Segment, Source, hash64
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
CHANGING = (
    "bytes change on their way here, in images perhaps unseen; `clip-train index` lets every block "
    "of a remote shard be verified"
)

_log = logging.getLogger("clip_train.data")

# Of a sample: "__key__", "__url__" and "__shard__" (its shard's number in the list of all), and
# extension -> bytes.
Fields = dict[str, Any]
Item = Fields | Invalid


def read_shard(
    url: str,
    reading: Reading = PLAIN,
    offset: int = 0,
    unread: float = 0,
) -> Generator[TarSample | Invalid]:
    """The samples of a shard from byte `offset` on. The first `unread` samples come without their
    members.

    If the same damage is found again when the shard is read again, the shard ends with one
    `Invalid`. An error of the disk or the network is retried from the affected sample; it never
    counts as the end of the data.

    Raises:
        DataError: the shard still cannot be read after the retries.
    """
    failures = 0
    damages: list[str] = []
    while True:
        try:
            with open_shard(url, reading) as file:
                for sample in iter_samples(file, offset, unread):
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
                    failures = 0
                    damages = []
            return
        except TarError as e:
            # The archive is damaged, or the connection is: then other bytes come next time.
            damages.append(str(e))
            if damages.count(str(e)) > REREADS:
                yield Invalid(e.reason, url, f"byte {e.offset}")
                return
            if len(damages) > 4 * REREADS:
                raise DataError(
                    f"shard {url} comes damaged from byte {offset} on, each time elsewhere: "
                    f"{CHANGING}\n" + "\n".join(damages)
                ) from e
        except OSError as e:
            if failures == RETRIES or isinstance(e, StorageError):  # the latter was retried enough
                raise DataError(
                    f"cannot read shard {url} from byte {offset} on, {failures} retries: "
                    f"{type(e).__name__}: {e}"
                ) from e
            time.sleep(BACKOFF_SECONDS * 2**failures)
            failures += 1


@dataclass(frozen=True)
class Files:
    """The shards of a source, as a loader's workers need them."""

    places: Sequence[int]  # of each shard, as `ShardEntry.places`
    shared: SharedList  # `ShardIndex.shared`, of the shards of all sources
    first: int  # the number of the source's first shard in it
    storage: StorageConfig

    @classmethod
    def of(
        cls, index: ShardIndex, storage: StorageConfig, start: int = 0, stop: int | None = None
    ) -> "Files":
        """Shards [start, stop) of an index, all of which are counted; None: to the last one."""
        places = [number or 0 for number in index.places[start:stop]]
        packed = array("I" if max(places) < 1 << 32 else "Q", places)
        return cls(packed, index.shared, start, storage)


class SegmentReader:
    """Reads segments of shards. A segment that follows the last one continues from there; another
    opens its shard.

    keep_open: the file stays open in between.
    cache: with the other workers that read its stream.
    """

    def __init__(self, files: Files, *, keep_open: bool, cache: BlockCache | None = None) -> None:
        self.files, self.keep_open, self._cache = files, keep_open, cache
        self._shard = -1
        self._number = self._offset = 0  # of the next sample, in its shard
        self._samples: Generator[TarSample | Invalid] | None = None

    def read(self, segment: Segment) -> list[Item]:
        """One item per sample of the segment; samples missing from the shard are invalid.
        DataError."""
        shard, start, stop = segment
        url, entry = self.files.shared[self.files.first + shard]
        if url.startswith(SYNTHETIC):
            return [
                {"__key__": f"{number:09d}", "__url__": url, "__shard__": self.files.first + shard}
                for number in range(start, stop)
            ]
        if self._samples is None or (self._shard, self._number) != (shard, start):
            self._seek(shard, start, url, entry)
        assert self._samples is not None
        items: list[Item] = []
        ended = False
        while self._number < stop and not ended:
            sample = next(self._samples, None)
            if not isinstance(sample, TarSample):
                ended = True
                if sample is not None:  # damage
                    items.append(sample)
                continue
            if self._number >= start:
                if sample.duplicate:
                    items.append(Invalid("duplicate key", url, sample.key))
                else:
                    members = with_captions(sample.members, url)
                    number = self.files.first + shard
                    place = {"__key__": sample.key, "__url__": url, "__shard__": number}
                    items.append({**members, **place})
            self._number += 1
            self._offset = sample.end
        items += [
            Invalid(MISSING, url, f"number {number}") for number in range(start + len(items), stop)
        ]
        if not ended and stop == self.files.places[shard]:
            ended = True
            if next(self._samples, None) is not None:
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
        """Move to where reading stopped, or to the shard's last known place before `number`."""
        places = entry.offsets if entry else ()
        mark = min(number // OFFSET_EVERY, len(places))
        if self._shard != shard or not mark * OFFSET_EVERY <= self._number <= number:
            self._shard, self._number = shard, mark * OFFSET_EVERY
            self._offset = places[mark - 1] if mark else 0
        unread = number - self._number
        reading = Reading(self.files.storage, entry.checksums if entry else None, self._cache)
        self._samples = read_shard(url, reading, self._offset, unread)


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
        self._next = -1
        self._taken: list[int] = []  # samples of each source before number `_next`
        self._segments: list[SegmentReader] = []  # by source
        for number, source_files in enumerate(files):
            cache = None
            if caches:
                cache = caches[(stream * len(files) + number) % len(caches)]
            self._segments.append(SegmentReader(source_files, keep_open=keep_open, cache=cache))
        # by source: its block, as (number of the first sample, items)
        self._blocks: list[tuple[int, list[Item]]] = [(0, [])] * len(files)
        # by source: the number at which the replacements of a sample begin, and the block (first
        # number, items) that is tried next; all blocks in between have no valid sample
        self._ahead: list[tuple[int, int, list[Item]]] = [(0, -1, [])] * len(files)

    def at(self, count: int) -> Iterator[Item]:
        """Yield sample number `count` of the stream, then endless replacements: its block from half
        a block on, then the following blocks of its source. The caller takes the first one that
        decodes, which is the same on any layout. DataError."""
        if count != self._next:
            self._taken = self.order.taken(count, self.order.streams, self.stream)
        self._next = count + 1
        source = self.order.source(count * self.order.streams + self.stream)
        number = self._taken[source]
        self._taken[source] += 1
        first, items = self._blocks[source]
        if not first <= number < first + len(items):
            items.clear()  # freed before the next is read
            self._blocks[source] = self._load(source, number, self._segments[source])
            first, items = self._blocks[source]
        place = number - first
        yield items[place]
        for step in range(len(items)):
            other = (place + len(items) // 2 + step) % len(items)
            if other != place:
                yield items[other]
        begin = end = first + len(items)
        while True:
            known, first, following = self._ahead[source]
            if not known <= end <= first:
                reader = SegmentReader(self.files[source], keep_open=False)
                first, following = self._load(source, end, reader)
            self._ahead[source] = (begin, first, following)
            yield from following
            end = first + len(following)

    def _load(self, source: int, number: int, reader: SegmentReader) -> tuple[int, list[Item]]:
        """The block that holds a sample of the stream: the number of its first sample, its items in
        order."""
        block = self.order.sources[source].block(self.stream, number)
        items = [item for segment in block.segments for item in reader.read(segment)]
        return block.first, [items[place] for place in block.order]


def count_missing(
    index: ShardIndex,
    storage: StorageConfig,
    *,
    together: bool = True,
    log: Callable[[str], None] = lambda line: None,
) -> ShardIndex:
    """The index with the counts of all shards; those without one are counted. DataError if a shard
    cannot be read.

    Args:
        together: all ranks call this, and each counts some of the shards. False: this process
            counts all of them.
        log: called by rank 0 with a line about every round of `ROUND_SECONDS` but the first.
    """
    ranks, rank = 1, 0
    if together:
        ranks, rank = dist.world_size(), dist.rank()
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
        count = partial(_count_some, todo[rank::ranks], storage)
        if together:
            for rank_counts in dist.gather_objects(dist.agreed(count)):
                counts |= rank_counts
        else:
            counts |= count()


def _count_some(urls: list[str], storage: StorageConfig) -> dict[str, int]:
    """Samples by path or URL, until the round is over. Damage counts as one; only headers are read.
    DataError."""

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
) -> tuple[Order, list[Files]]:
    """The order of a recipe's `data`, by its `order_keys`, and each source's shards. UserError if
    one is empty."""
    weights = config.train_weights or [1.0]
    sizes = index.sources if config.train_weights and index.sources else (len(index.shards),)
    ends = itertools.accumulate(sizes, initial=0)
    sources, files = [], []
    for number, (start, stop) in enumerate(itertools.pairwise(ends)):
        source_files = Files.of(index, storage, start, stop)
        if not sum(source_files.places):
            raise UserError(
                f"data.train ({config.train}): found no samples in the {stop - start} shards of "
                "a source"
            )
        block = max(1, round(keys["data.shuffle_block"] * weights[number] / sum(weights)))
        source_seed = hash64(seed, number, -4) if number else seed
        source = Source(
            source_files.places,
            keys["data.lanes"],
            source_seed,
            block,
            resampled=config.resampled,
        )
        sources.append(source)
        files.append(source_files)
    return Order(sources, weights, seed), files
