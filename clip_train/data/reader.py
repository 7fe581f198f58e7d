"""From places of the order to undecoded samples: reads the blocks of a stream, from any of its samples on.

An I/O error is retried and then ends the run: it is never an invalid sample. Damage of an archive is one, once it is
there when it is read again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clip_train.data.config import DataConfig
from clip_train.data.decode import CaptionKey, why_invalid
from clip_train.data.index import OFFSET_EVERY, ShardIndex
from clip_train.data.invalid import Invalid
from clip_train.data.order import Order, Segment, Source, hash64
from clip_train.data.shards import BUFFER_BYTES, PLAIN, Reading, open_shard, synthetic_size
from clip_train.data.tar import TarError, TarSample, iter_samples
from clip_train.errors import DataError, UserError
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import StorageError
from clip_train.storage.redact import redact

RETRIES = 4
BACKOFF_SECONDS = 0.2  # doubled by each retry: 3 s in all
REREADS = 3  # times an archive must look damaged at the same place before that is believed
MISSING = "missing: its shard has fewer samples"
UNINDEXED = "bytes change on their way here, in images perhaps unseen; `clip-train index` lets every block be verified"

_log = logging.getLogger("clip_train.data")


Fields = dict[
    str, Any
]  # "__key__", "__url__", and extension -> bytes: of a sample that can be used, as far as seen
Item = Fields | Invalid


def read_shard(
    url: str,
    reading: Reading = PLAIN,
    offset: int = 0,
    unread: float = 0,
    buffer_bytes: int = BUFFER_BYTES,
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
            with open_shard(url, reading, buffer_bytes) as file:
                for sample in iter_samples(file, offset, unread):
                    yield sample
                    if damages:
                        _log.warning(
                            "%s: %s at first, but not when read again: %s",
                            redact(url),
                            damages[0],
                            UNINDEXED,
                        )
                    offset, unread, failures, damages = sample.end, unread - 1, 0, []
            return
        except (
            TarError
        ) as e:  # of the archive, or of the way here: then other bytes come the next time
            damages.append(str(e))
            if damages.count(str(e)) > REREADS:
                yield Invalid(e.reason, url, f"byte {e.offset}")
                return
            if len(damages) > 4 * REREADS:
                raise DataError(
                    f"shard {url} comes damaged from byte {offset} on, each time elsewhere: {UNINDEXED}\n"
                    + "\n".join(damages)
                ) from e
        except OSError as e:
            if failures == RETRIES or isinstance(
                e, StorageError
            ):  # the latter has been retried enough
                why = f"{type(e).__name__}: {e}"
                raise DataError(
                    f"cannot read shard {url} from byte {offset} on, {failures} retries: {why}"
                ) from e
            time.sleep(BACKOFF_SECONDS * 2**failures)
            failures += 1


def undecoded(found: TarSample | Invalid, url: str, files: Files) -> Item:
    """A sample as it was read, or what is wrong with it."""
    if isinstance(found, Invalid):
        return found
    reason = why_invalid(found, files.caption_key, files.needs_caption)
    if reason is not None:
        return Invalid(reason, url, found.key, found.members)
    return {**found.members, "__key__": found.key, "__url__": url}


@dataclass(frozen=True)
class Files:
    """The shards of a source, as a loader's workers need them."""

    shards: Sequence[str]
    counts: Sequence[int]
    offsets: Sequence[
        Sequence[int]
    ]  # of each shard, bytes: where sample OFFSET_EVERY, 2 OFFSET_EVERY, ... begins
    caption_key: CaptionKey
    reading: Reading
    needs_caption: bool = True

    @classmethod
    def of(
        cls, index: ShardIndex, shards: Sequence[str], caption_key: CaptionKey, reading: Reading
    ) -> Files:
        """Of some of an index's shards, all of which are counted."""
        entries = [index.entries.get(shard) for shard in shards]
        offsets = [entry.offsets if entry else () for entry in entries]
        return cls(
            shards, [index.count(shard) or 0 for shard in shards], offsets, caption_key, reading
        )


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
        if synthetic_size(url) is not None:
            return [{"__key__": f"{number:09d}", "__url__": url} for number in range(start, stop)]
        events = self._at(shard, start)
        items: list[Item] = []
        ended = False
        while self._number < stop and not ended:
            event = next(events, None)
            if self._number >= start and event is not None:
                items.append(undecoded(event, url, files))
            ended = not isinstance(event, TarSample)
            if isinstance(event, TarSample):
                self._number, self._offset = self._number + 1, event.end
        items += [
            Invalid(MISSING, url, f"number {start + n}") for n in range(len(items), stop - start)
        ]
        if not ended and stop == files.counts[shard]:
            if next(events, None) is not None:
                _log.warning(
                    "%s has more samples than the %d that are known: the others are left over",
                    redact(url),
                    stop,
                )
            ended = True
        if ended:
            self._shard = -1
        if ended or not self.keep_open:
            events.close()
            self._events = None
        return items

    def _at(self, shard: int, number: int) -> Generator[TarSample | Invalid]:
        """Goes on where reading stopped, or from the shard's last known place before `number`."""
        if self._shard != shard or self._number != number or self._events is None:
            skip = min(number // OFFSET_EVERY, len(self.files.offsets[shard]))
            if self._shard != shard or not skip * OFFSET_EVERY <= self._number <= number:
                self._shard, self._number = shard, skip * OFFSET_EVERY
                self._offset = self.files.offsets[shard][skip - 1] if skip else 0
            unread = number - self._number
            self._events = read_shard(
                self.files.shards[shard], self.files.reading, self._offset, unread
            )
        return self._events


class Loaded(NamedTuple):
    """A block with its samples, in the order in which the stream has them."""

    first: int
    items: list[Item]

    @property
    def end(self) -> int:
        return self.first + len(self.items)


class StreamReader:
    """One stream of all sources, in which `at` moves forward.

    keep_open: its shards stay open from block to block.
    """

    def __init__(
        self, order: Order, files: Sequence[Files], stream: int, *, keep_open: bool
    ) -> None:
        self.order, self.files, self.stream = order, files, stream
        self._next = -1
        self._taken: list[int] = []  # samples of each source before number `_next`
        # of each source: what reads it; its block; (a number, the first block behind it that holds a usable sample)
        self._segments = [SegmentReader(each, keep_open=keep_open) for each in files]
        self._blocks = [Loaded(0, [])] * len(files)
        self._ahead = [(0, Loaded(-1, []))] * len(files)

    def at(self, count: int) -> Iterator[Item]:
        """Sample number `count` of the stream, and without end what may take its place: its block from half a block
        on, then what follows in its source. The first that decodes is taken, the same one whoever reads. DataError."""
        if count != self._next:
            self._taken = self.order.taken(self.stream, count)
        self._next = count + 1
        source = self.order.source(count * self.order.streams + self.stream)
        number = self._taken[source]
        self._taken[source] += 1
        if not self._blocks[source].first <= number < self._blocks[source].end:
            self._blocks[source] = Loaded(0, [])  # freed before the next is read
            self._blocks[source] = self._load(source, number, self._segments[source])
        return self._candidates(source, self._blocks[source], number - self._blocks[source].first)

    def _candidates(self, source: int, block: Loaded, place: int) -> Iterator[Item]:
        items = block.items
        yield items[place]
        for step in range(len(items)):
            other = (place + len(items) // 2 + step) % len(items)
            if other != place:
                yield items[other]
        begin = searched = block.end
        while True:
            known, loaded = self._ahead[
                source
            ]  # also for the next place of a block where nothing can be used
            if not known <= begin <= loaded.first:
                loaded = self._load(
                    source, begin, SegmentReader(self.files[source], keep_open=False)
                )
            begin = loaded.end
            if not all(isinstance(item, Invalid) for item in loaded.items):
                self._ahead[source], searched = (searched, loaded), begin
            yield from loaded.items

    def _load(self, source: int, number: int, segments: SegmentReader) -> Loaded:
        """The block that holds a sample of the stream."""
        block = self.order.sources[source].block(self.stream, number)
        items = [item for segment in block.segments for item in segments.read(segment)]
        return Loaded(block.first, [items[place] for place in block.order])


def make_order(
    config: DataConfig,
    index: ShardIndex,
    storage: StorageConfig,
    keys: Mapping[str, Any],
    seed: int,
) -> tuple[Order, list[Files]]:
    """The order of a recipe's `data`, by its `order_keys`, and each source's shards. UserError where one is empty."""
    reading = Reading(storage, index.checksums)
    weights = config.train_weights or [1.0]
    parts = index.by_source() if config.train_weights else [index.shards]
    resampled = (
        config.resampled if isinstance(config.resampled, list) else [config.resampled] * len(parts)
    )
    sources, files = [], []
    for number, shards in enumerate(parts):
        each = Files.of(index, shards, config.caption_key, reading)
        if not sum(each.counts):
            raise UserError(
                f"data.train ({config.train}): there is no sample in the {len(shards)} shards of a source"
            )
        block = max(1, round(keys["data.shuffle_block"] * weights[number] / sum(weights)))
        own_seed = hash64(seed, number, -4) if number else seed
        sources.append(
            Source(each.counts, keys["data.lanes"], own_seed, block, resampled=resampled[number])
        )
        files.append(each)
    return Order(sources, weights, seed), files
