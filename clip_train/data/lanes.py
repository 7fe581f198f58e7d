"""A lane: an endless stream of samples that is the same whoever reads it, and where in it one is.

Capital letters: `L` lanes, `K` samples in a block. Which lane gives how many samples to a global batch is
`shares.py`'s, which parts of which shards a lane reads in an epoch `dealing.py`'s. A lane reads blocks of K usable
raw samples, permutes each, and rolls over into its next epoch on its own.

A block is a function of where it starts, so a `Cursor` (where the block starts, how much of it is taken) is
the whole state of a lane. Nothing that happens later (decoding, ranks, workers) may influence a cursor.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from clip_train.data import dealing, raw
from clip_train.data.bad_samples import WINDOW, Bad, BadTable
from clip_train.data.dealing import Part, hash64
from clip_train.data.sources import PLAIN, Reading, open_shard
from clip_train.data.tar import RawSample, TarError, iter_samples
from clip_train.errors import DataError
from clip_train.storage import ReadError

RETRIES = 4
BACKOFF_SECONDS = 0.2  # doubled by each retry: 3 s in all
REREADS = 3  # times an archive must look damaged at the same place before that is believed
UNINDEXED = "bytes change on their way here, in images perhaps unseen; `clip-train index` lets every block be verified"
EMPTY_EPOCHS = 100  # a lane may find nothing in so many epochs in a row, when samples are fewer than lanes

_log = logging.getLogger("clip_train.data")


@dataclass(frozen=True)
class Cursor:
    """A lane's position: everything that a resumed run needs. A few small numbers, as JSON ~100 bytes."""

    epoch: int = 0  # where the current block starts
    shard: int = 0  # index into the lane's shards of that epoch
    offset: int = 0  # bytes into that shard
    block: int = 0  # blocks finished by this lane
    taken: int = 0  # samples taken of the current block
    count: int = 0  # samples taken by this lane in all

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Counts:
    """What an index knows about the usable samples of the shards, in the order of the shards."""

    samples: tuple[int, ...]
    marks: tuple[Sequence[int], ...]  # bytes: where a shard goes on behind `every`, 2 `every`, ... samples
    every: int


@dataclass(frozen=True)
class LanePlan:
    """What all lanes of a source have in common."""

    shards: list[str]
    seed: int
    lanes: int  # L
    shuffle_block: int  # K
    caption_key: str | None = None
    reading: Reading = PLAIN  # how they are opened; says nothing about the order
    counts: Counts | None = None  # where all shards are indexed: epochs are exact
    resampled: bool = False  # shards are drawn with replacement

    def open(self, number: int, cursor: Cursor | None = None, *, keep_open: bool = True) -> Lane:
        """The lane `number`, from a cursor on. keep_open: its shard stays open from block to block."""
        return Lane(self, number, cursor, keep_open=keep_open)

    def parse(self, cursor: dict[str, Any]) -> Cursor:
        """What `Cursor.to_dict` gave, from a checkpoint."""
        return Cursor(**cursor)

    def as_it_may_have_begun(self) -> list[LanePlan]:
        """This order, and the one that there was before there was an index."""
        return [self] if self.counts is None or self.resampled else [self, replace(self, counts=None)]

    def in_new_epoch(self, cursors: dict[int, Cursor]) -> dict[int, Cursor]:
        """The lanes' positions moved to the start of an epoch that none of them has begun."""
        epoch = max(cursor.epoch for cursor in cursors.values()) + 1
        return {lane: replace(c, epoch=epoch, shard=0, offset=0, taken=0) for lane, c in cursors.items()}

    def parts(self, lane: int, epoch: int) -> list[Part]:
        """What `lane` reads in `epoch`, in this order. Over all lanes every sample comes exactly once, if not drawn."""
        if self.resampled:
            return dealing.drawn(len(self.shards), lane, self.lanes, self.seed, epoch)
        if self.counts is not None:
            return dealing.counted(self.counts.samples, self.lanes, self.seed, epoch)[lane]
        return dealing.by_shares(len(self.shards), self.lanes, self.seed, epoch)[lane]

    def read(self, part: Part, offset: int, epoch: int) -> Iterator[Raw | Bad]:
        """The samples of `part`, usable or not, that start at byte `offset` or later. DataError."""
        url = self.shards[part.shard]
        if part.numbers is not None:
            assert self.counts is not None
            total, marks = self.counts.samples[part.shard], self.counts.marks[part.shard]
            return read_numbers(url, part.numbers, total, marks, self.counts.every, offset, self)
        return read_shard(url, offset, self.wanted(part, epoch), self.caption_key, self.reading)

    def wanted(self, part: Part, epoch: int) -> Callable[[int], bool] | None:
        """Whether a sample that starts at a byte belongs to `part`; None: every one does."""
        if part.parts == 1:
            return None
        return lambda start: hash64(self.seed, epoch, part.shard, start) % part.parts == part.share

    def fingerprint(self) -> int:
        """Changes when cursors of another plan would not mean the same position."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> int:
        names = [shard.rsplit("/", 1)[-1] for shard in self.shards]  # the folder may have moved
        order: list[Any] = [names, self.seed, self.lanes, self.shuffle_block, self.caption_key]
        order += [("counted", self.counts.samples)] if self.counts and not self.resampled else []
        order += ["resampled"] if self.resampled else []
        return fingerprint(*order)


def fingerprint(*values: Any) -> int:
    """32 bits of a hash of `values`, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=4).digest(), "little")


@dataclass
class Raw:
    """A usable raw sample, with the unusable ones that were passed on the way to it."""

    fields: dict[str, Any]  # "__key__", "__url__", "__offset__" (bytes), and extension -> bytes
    epoch: int
    shard: int  # index into the lane's shards of that epoch
    end: int  # bytes: where the shard goes on behind it
    skipped: list[Bad] = field(default_factory=list)


@dataclass
class Block:
    """K raw samples in the order in which they are taken."""

    samples: list[Raw]
    next: Cursor  # where the lane goes on after it


@dataclass
class Slot:
    """One place of the global batch and what belongs there."""

    lane: Lane
    block: Block
    index: int  # in the block
    seed: int  # the sample's seed, non-negative, below 2^63: of this place, also where another sample fills it

    @property
    def sample(self) -> Raw:
        return self.block.samples[self.index]

    def substitutes(self) -> Iterator[Raw]:
        """What takes this place if it does not decode: its block from half a block on, then what follows."""
        size = len(self.block.samples)
        for t in range(size):
            other = (self.index + size // 2 + t) % size
            if other != self.index:
                yield self.block.samples[other]
        for event in self.lane.scan(self.block.next):
            if isinstance(event, Raw):
                yield event


class Lane:
    """A reader of one lane, from a cursor on."""

    def __init__(self, plan: LanePlan, number: int, cursor: Cursor | None = None, *, keep_open: bool = True) -> None:
        self.plan = plan
        self.number = number
        self._cursor = cursor or Cursor()
        self._keep_open = keep_open
        self._events: Generator[Raw | Bad | EpochEnd] | None = None
        self._block: Block | None = None

    def take(self) -> Slot:
        """The next sample. Raises DataError where shards cannot be read or hold nothing usable."""
        block, index = self._current_block(), self._cursor.taken
        slot = Slot(self, block, index, hash64(self.plan.seed, self.number, self._cursor.count))
        self.skip()
        return slot

    def skip(self) -> None:
        """Leave the next sample to another reader of this lane."""
        block, cursor = self._current_block(), self._cursor
        taken, count = cursor.taken + 1, cursor.count + 1
        if taken < len(block.samples):
            self._cursor = replace(cursor, taken=taken, count=count)
        else:
            self._cursor = replace(block.next, block=cursor.block + 1, count=count)
            self._block = None

    @property
    def cursor(self) -> Cursor:
        return self._cursor

    def _current_block(self) -> Block:
        if self._block is None:
            self._block = self._read_block()
        return self._block

    def _read_block(self) -> Block:
        """Up to K usable samples from where the cursor's block starts; fewer where the lane's epoch ends."""
        limit, number = self.plan.shuffle_block, self._cursor.block
        if number == 0:  # the lanes' first blocks end one after another, so that later not all are read at once
            limit = max(1, limit * (self.number + 1) // self.plan.lanes)
        samples: list[Raw] = []
        skipped: list[Bad] = []
        empty_epochs = 0
        if self._events is None:
            self._events = self.scan(self._cursor)
        for event in self._events:
            if isinstance(event, Bad):
                skipped.append(event)
                if len(skipped) > WINDOW:
                    raise DataError(f"{len(skipped)} unusable samples in a row\n{_table(skipped)}")
            elif isinstance(event, Raw):
                event.skipped, skipped = skipped, []
                samples.append(event)
                after = Cursor(event.epoch, event.shard, event.end)
                if len(samples) == limit:
                    break
            elif samples:  # the epoch ends
                samples[-1].skipped += skipped
                after = Cursor(event.epoch + 1)
                break
            else:
                empty_epochs += 1
                self._check_not_empty(empty_epochs)
        if not self._keep_open:
            self._events.close()
            self._events = None
        random.Random(hash64(self.plan.seed, self.number, number, -1)).shuffle(samples)
        return Block(samples, after)

    def scan(self, start: Cursor) -> Generator[Raw | Bad | EpochEnd]:
        """All that this lane reads from a position on, in the order of the shards, without end."""
        epoch, first, offset = start.epoch, start.shard, start.offset
        while True:
            for position, part in enumerate(self.plan.parts(self.number, epoch)):
                if position >= first:
                    for event in self.plan.read(part, offset if position == first else 0, epoch):
                        if isinstance(event, Raw):
                            event.epoch, event.shard = epoch, position
                        elif event.damage and part.share:
                            continue  # all shares of a shard meet its damage: the first one counts it
                        yield event
            yield EpochEnd(epoch)
            epoch, first, offset = epoch + 1, 0, 0

    def _check_not_empty(self, empty_epochs: int) -> None:
        """This lane found nothing in an epoch: is it alone with that?"""
        if empty_epochs == 1:
            check_any_usable(self.plan)
        if empty_epochs == EMPTY_EPOCHS:
            raise DataError(
                f"lane {self.number} of {self.plan.lanes} found no sample in {EMPTY_EPOCHS} epochs: "
                "there are fewer usable samples than lanes; lower data.lanes"
            )


class EpochEnd(NamedTuple):
    epoch: int


def read_shard(
    url: str, offset: int, wanted: Callable[[int], bool] | None, caption_key: str | None, reading: Reading = PLAIN
) -> Iterator[Raw | Bad]:
    """The samples of one shard, usable or not, from byte `offset` on.

    Damage to the archive ends it, as one `Bad`, if it is there when it is read again. An error of the disk or
    the network is retried, from the sample that it hit, and is never taken for the end of the data.

    Raises:
        DataError: the shard still cannot be read after the retries.
    """
    failures = 0
    damages: list[str] = []
    while True:
        try:
            with open_shard(url, reading) as file:
                for sample in iter_samples(file, offset, wanted):
                    yield _usable(sample, url, caption_key)
                    if damages:
                        _log.warning("%s: %s at first, but not when read again: %s", url, damages[0], UNINDEXED)
                    offset, failures, damages = sample.end, 0, []
            return
        except TarError as e:  # of the archive, or of the way here: then other bytes come the next time
            damages.append(str(e))
            if damages.count(str(e)) > REREADS:
                yield Bad(e.reason, url, f"byte {e.offset}", damage=True)
                return
            if len(damages) > 4 * REREADS:
                raise DataError(
                    f"shard {url} comes damaged from byte {offset} on, each time elsewhere: {UNINDEXED}\n"
                    + "\n".join(damages)
                ) from e
        except ReadError as e:  # retried enough
            raise DataError(f"cannot read shard {url} from byte {offset} on: {type(e).__name__}: {e}") from e
        except OSError as e:
            failures += 1
            if failures > RETRIES:
                raise DataError(
                    f"cannot read shard {url} from byte {offset} on, after {RETRIES} retries: {type(e).__name__}: {e}"
                ) from e
            time.sleep(BACKOFF_SECONDS * 2 ** (failures - 1))


def read_numbers(
    url: str, numbers: range, total: int, marks: Sequence[int], every: int, offset: int, plan: LanePlan
) -> Iterator[Raw | Bad]:
    """The usable samples `numbers` of a shard that has `total` of them, from byte `offset` (a sample's end) on.

    A bad sample belongs to the usable one behind it; those behind the last belong to that. Reading begins at the
    last mark that is known to lie before: at most `every` samples are read in vain.

    Raises:
        DataError: as `read_shard`; the shard has fewer usable samples than `total`.
    """
    skip = max(numbers.start // every, bisect.bisect_right(marks, offset))
    number, start = skip * every, marks[skip - 1] if skip else 0
    inside = start >= offset
    last = numbers.stop == total
    for event in read_shard(url, start, None, plan.caption_key, plan.reading):
        if (inside and number in numbers) or (inside and last and number == total and isinstance(event, Bad)):
            yield event
        if isinstance(event, Raw):
            number += 1
            inside = inside or event.end == offset
        if number >= numbers.stop and not last:
            return
    if number != total:
        raise DataError(
            f"{url} has {number} usable samples, and its index says {total}; run `clip-train index` again, or set "
            "data.verify=off to go without"
        )


def check_any_usable(plan: LanePlan) -> None:
    """DataError with the table of reasons unless some shard holds a usable sample."""
    bads: list[Bad] = []
    for url in plan.shards:
        for event in read_shard(url, 0, None, plan.caption_key, plan.reading):
            if isinstance(event, Raw):
                return
            bads.append(event)
    raise DataError(f"none of the samples in {len(plan.shards)} shards can be used\n{_table(bads)}")


def _usable(sample: RawSample, url: str, caption_key: str | None) -> Raw | Bad:
    reason = raw.check(sample, caption_key)
    if reason is not None:
        return Bad(reason, url, sample.key)
    fields = {**sample.members, "__key__": sample.key, "__url__": url, "__offset__": sample.start}
    return Raw(fields, epoch=0, shard=0, end=sample.end)


def _table(bads: list[Bad]) -> BadTable:
    table = BadTable()
    table.add(bads)
    return table
