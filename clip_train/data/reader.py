"""From places of the order to undecoded samples: reads the blocks of a stream, from any of its samples on.

An I/O error is retried and then ends the run: it is never an invalid sample. Damage of an archive is one, once it is
there when it is read again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clip_train.data.config import DataConfig
from clip_train.data.decode import why_invalid
from clip_train.data.index import OFFSET_EVERY, ShardIndex
from clip_train.data.invalid import Invalid, table_of
from clip_train.data.order import Block, Order, Segment, Source, hash64
from clip_train.data.shards import PLAIN, Reading, open_shard
from clip_train.data.tar import TarError, TarSample, iter_samples
from clip_train.errors import DataError, UserError
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import StorageError

RETRIES = 4
BACKOFF_SECONDS = 0.2  # doubled by each retry: 3 s in all
REREADS = 3  # times an archive must look damaged at the same place before that is believed
MAX_INVALID_RUN = 10_000  # as many invalid samples in a row are no accident
MISSING = "missing: its shard has fewer samples"
UNINDEXED = "bytes change on their way here, in images perhaps unseen; `clip-train index` lets every block be verified"

_log = logging.getLogger("clip_train.data")


@dataclass
class Undecoded:
    """A sample that can be used, as far as one sees without decoding."""

    fields: dict[str, Any]  # "__key__", "__url__", and extension -> bytes


Item = Undecoded | Invalid


def read_shard(
    url: str, reading: Reading = PLAIN, offset: int = 0, unread: float = 0, buffer_bytes: int | None = None
) -> Generator[TarSample | Invalid]:
    """The samples of a shard from byte `offset` on; the first `unread` of them without their members.

    Damage to the archive ends it, as one `Invalid`, if it is there when it is read again. An error of the disk or
    the network is retried, from the sample that it hit, and is never taken for the end of the data.

    Raises:
        DataError: the shard still cannot be read after the retries.
    """
    failures = 0
    damages: list[str] = []
    while True:
        try:
            with open_shard(url, reading, *([buffer_bytes] if buffer_bytes else [])) as file:
                for sample in iter_samples(file, offset, unread):
                    yield sample
                    if damages:
                        _log.warning("%s: %s at first, but not when read again: %s", url, damages[0], UNINDEXED)
                    offset, unread, failures, damages = sample.end, unread - 1, 0, []
            return
        except TarError as e:  # of the archive, or of the way here: then other bytes come the next time
            damages.append(str(e))
            if damages.count(str(e)) > REREADS:
                yield Invalid(e.reason, url, f"byte {e.offset}")
                return
            if len(damages) > 4 * REREADS:
                raise DataError(
                    f"shard {url} comes damaged from byte {offset} on, each time elsewhere: {UNINDEXED}\n"
                    + "\n".join(damages)
                ) from e
        except StorageError as e:  # retried enough
            raise DataError(f"cannot read shard {url} from byte {offset} on: {type(e).__name__}: {e}") from e
        except OSError as e:
            failures += 1
            if failures > RETRIES:
                raise DataError(
                    f"cannot read shard {url} from byte {offset} on, after {RETRIES} retries: {type(e).__name__}: {e}"
                ) from e
            time.sleep(BACKOFF_SECONDS * 2 ** (failures - 1))


def undecoded(found: TarSample | Invalid, url: str, caption_key: str | None) -> Item:
    """A sample as it was read, or what is wrong with it."""
    if isinstance(found, Invalid):
        return found
    reason = why_invalid(found, caption_key)
    if reason is not None:
        return Invalid(reason, url, found.key)
    return Undecoded({**found.members, "__key__": found.key, "__url__": url})


@dataclass(frozen=True)
class Files:
    """The shards of a source, as a loader's workers need them."""

    shards: Sequence[str]
    counts: Sequence[int]
    offsets: Sequence[Sequence[int]]  # of each shard, bytes: where sample OFFSET_EVERY, 2 OFFSET_EVERY, ... begins
    caption_key: str | None
    reading: Reading

    @classmethod
    def of(cls, index: ShardIndex, shards: Sequence[str], caption_key: str | None, reading: Reading) -> Files:
        """Of some of an index's shards, all of which are counted."""
        entries = [index.entries.get(shard) for shard in shards]
        offsets = [entry.offsets if entry else () for entry in entries]
        return cls(shards, [index.count(shard) or 0 for shard in shards], offsets, caption_key, reading)


class SegmentReader:
    """Reads segments of shards; one that follows the last goes on from there, another one opens its shard.

    keep_open: the file stays open in between.
    """

    def __init__(self, files: Files, *, keep_open: bool) -> None:
        self.files, self.keep_open = files, keep_open
        self._shard = -1
        self._number = self._offset = 0  # of the sample that comes next, in its shard
        self._events: Generator[TarSample | Invalid] | None = None

    def read(self, segment: Segment) -> list[Item]:
        """As many items as the segment has samples: those that its shard lacks are invalid. DataError."""
        files, (shard, start, stop) = self.files, segment
        url = files.shards[shard]
        self._go_to(shard, start)
        assert self._events is not None
        items: list[Item] = []
        ended = False
        while self._number < stop and not ended:
            event = next(self._events, None)
            if self._number >= start and event is not None:
                items.append(undecoded(event, url, files.caption_key))
            ended = not isinstance(event, TarSample)
            if isinstance(event, TarSample):
                self._number, self._offset = self._number + 1, event.end
        items += [Invalid(MISSING, url, f"number {start + n}") for n in range(len(items), stop - start)]
        if not ended and stop == files.counts[shard]:
            if next(self._events, None) is not None:
                _log.warning("%s has more samples than the %d that are known: the others are left over", url, stop)
            ended = True
        if ended:
            self._shard = -1
        if ended or not self.keep_open:
            self._events.close()
            self._events = None
        return items

    def _go_to(self, shard: int, number: int) -> None:
        """Where reading goes on, or from the shard's last known place before `number`."""
        if self._shard == shard and self._number == number and self._events is not None:
            return
        skip = min(number // OFFSET_EVERY, len(self.files.offsets[shard]))
        if self._shard != shard or not skip * OFFSET_EVERY <= self._number <= number:
            self._shard, self._number = shard, skip * OFFSET_EVERY
            self._offset = self.files.offsets[shard][skip - 1] if skip else 0
        unread = number - self._number
        self._events = read_shard(self.files.shards[shard], self.files.reading, self._offset, unread)


@dataclass
class Loaded:
    """A block with its samples, in the order in which the stream has them."""

    first: int
    items: list[Item]

    @property
    def end(self) -> int:
        return self.first + len(self.items)

    def usable(self, turn: int = 0) -> list[Undecoded]:
        """Those that can be used, from place `turn` on, all the way round."""
        return [item for item in (*self.items[turn:], *self.items[:turn]) if isinstance(item, Undecoded)]


class SourceReader:
    """One stream of one source, in which `at` moves forward."""

    def __init__(self, files: Files, source: Source, stream: int, *, keep_open: bool) -> None:
        self.files, self.source, self.stream = files, source, stream
        self._segments = SegmentReader(files, keep_open=keep_open)
        self._block = Loaded(0, [])
        self._ahead = (0, Loaded(-1, []))  # (a number, the first block behind it that holds a usable sample)
        self._some_usable = False  # known of the source

    def at(self, count: int) -> tuple[Loaded, int]:
        """The block that holds sample number `count` of the stream, and its place there. DataError."""
        if not self._block.first <= count < self._block.end:
            self._block = Loaded(0, [])  # freed before the next is read
            self._block = self._load(self.source.block(self.stream, count), self._segments)
        return self._block, count - self._block.first

    def following(self, block: Loaded) -> Iterator[Undecoded]:
        """What can be used of the blocks behind one, without end. DataError where there is nothing for long."""
        if not (self._some_usable or block.usable()):
            check_any_usable(self.files)
            self._some_usable = True
        segments = SegmentReader(self.files, keep_open=False)
        begin = searched = block.end
        passed: list[Invalid] = []
        while True:
            known, loaded = self._ahead
            if not known <= begin <= loaded.first:
                loaded = self._load(self.source.block(self.stream, begin), segments)
                if loaded.usable():
                    self._ahead, passed = (searched, loaded), []
                passed += [item for item in loaded.items if isinstance(item, Invalid)]
                if len(passed) > MAX_INVALID_RUN:
                    raise DataError(f"{len(passed)} invalid samples in a row\n{table_of(passed)}")
            yield from loaded.usable()
            begin = loaded.end
            searched = begin if loaded.usable() else searched

    def _load(self, block: Block, segments: SegmentReader) -> Loaded:
        items = [item for segment in block.segments for item in segments.read(segment)]
        return Loaded(block.first, [items[place] for place in block.order])


@dataclass
class Sample:
    """What belongs at one place of the global batch, and what may take that place."""

    item: Item
    seed: int  # of the place, also where another sample fills it
    reader: SourceReader
    block: Loaded
    place: int  # in the block

    def candidates(self) -> Iterator[Undecoded]:
        """The sample itself; then its block from half a block on, then what follows. The first that decodes is
        taken: the same one whoever reads."""
        if isinstance(self.item, Undecoded):
            yield self.item
        for other in self.block.usable((self.place + len(self.block.items) // 2) % len(self.block.items)):
            if other is not self.item:
                yield other
        yield from self.reader.following(self.block)


class StreamReader:
    """One stream of all sources, in which `at` moves forward.

    keep_open: its shards stay open from block to block.
    """

    def __init__(self, order: Order, files: Sequence[Files], stream: int, *, keep_open: bool) -> None:
        self.order, self.stream = order, stream
        pairs = zip(files, order.sources, strict=True)
        self._readers = [SourceReader(each, source, stream, keep_open=keep_open) for each, source in pairs]
        self._next = -1
        self._taken: list[int] = []  # samples of each source before number `_next`

    def at(self, count: int) -> Sample:
        """Sample number `count` of the stream. DataError where a shard cannot be read."""
        if count != self._next:
            self._taken = self.order.taken(self.stream, count)
        number = self.order.source(count * self.order.streams + self.stream)
        reader = self._readers[number]
        block, place = reader.at(self._taken[number])
        self._taken[number] += 1
        self._next = count + 1
        return Sample(block.items[place], self.order.sample_seed(self.stream, count), reader, block, place)


def check_any_usable(files: Files) -> None:
    """DataError with the table of reasons unless some shard holds a usable sample."""
    invalid: list[Invalid] = []
    for url in files.shards:
        for event in read_shard(url, files.reading):
            item = undecoded(event, url, files.caption_key)
            if isinstance(item, Undecoded):
                return
            invalid.append(item)
    raise DataError(f"none of the samples in {len(files.shards)} shards can be used\n{table_of(invalid)}")


def make_order(
    config: DataConfig, index: ShardIndex, storage: StorageConfig, keys: Mapping[str, Any], seed: int
) -> tuple[Order, list[Files]]:
    """The order of a recipe's `data`, by its `order_keys`, and each source's shards. UserError where one is empty."""
    reading = Reading(storage, index.checksums)
    streams, together = keys["data.lanes"], keys["data.shuffle_block"]
    if config.train_weights is None:
        parts, weights, resampled = [index.shards], [1.0], [config.resampled is True]
    else:
        parts, weights = index.by_source(), config.train_weights
        resampled = config.resampled if isinstance(config.resampled, list) else [config.resampled] * len(parts)
    sources, files = [], []
    for number, shards in enumerate(parts):
        each = Files.of(index, shards, config.caption_key, reading)
        if not sum(each.counts):
            raise UserError(f"data.train ({config.train}): there is no sample in the {len(shards)} shards of a source")
        block = max(1, round(together * weights[number] / sum(weights)))
        own_seed = hash64(seed, number, -4) if number else seed
        sources.append(Source(each.counts, streams, own_seed, block, resampled=resampled[number]))
        files.append(each)
    return Order(sources, weights, seed), files
