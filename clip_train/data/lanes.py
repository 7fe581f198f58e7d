"""The order of the samples: which ones are in global batch s, a function of the seed and of s alone.

Capital letters: `L` lanes, `N` samples in the global batch, `q = N / L` of them from each lane, `K` samples
in a block. A lane is an endless stream of samples that is the same whoever reads it. In each epoch the shards
are permuted by (seed, epoch) and dealt to the lanes; what does not divide evenly is split, sample by sample.
A lane reads blocks of K usable raw samples, permutes each, and rolls over into its next epoch on its own.

A block is a function of where it starts, so a `Cursor` (where the block starts, how much of it is taken) is
the whole state of a lane. Nothing that happens later (decoding, ranks, workers) may influence a cursor.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from clip_train.data import raw
from clip_train.data.bad_samples import WINDOW, Bad, BadTable
from clip_train.data.sources import PLAIN, Reading, open_shard
from clip_train.data.tar import RawSample, TarError, iter_samples
from clip_train.errors import DataError
from clip_train.storage import ReadError

RETRIES = 4
BACKOFF_SECONDS = 0.2  # doubled by each retry: 3 s in all
EMPTY_EPOCHS = 100  # a lane may find nothing in so many epochs in a row, when samples are fewer than lanes
UNEVENNESS = 10  # lanes' shares of an epoch differ by at most 1 / UNEVENNESS, or by one shard of very many


def hash64(*numbers: int) -> int:
    """A uniform number in [0, 2^63), the same on every machine."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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


class Part(NamedTuple):
    """One shard, or one of `parts` equal shares of it."""

    shard: int  # index into the list of all shards
    share: int
    parts: int


@dataclass(frozen=True)
class LanePlan:
    """What all lanes of a run have in common."""

    shards: list[str]
    seed: int
    lanes: int  # L
    shuffle_block: int  # K
    caption_key: str | None = None
    reading: Reading = PLAIN  # how they are opened; says nothing about the order

    def parts(self, lane: int, epoch: int) -> list[Part]:
        """What `lane` reads in `epoch`, in this order. Over all lanes every sample comes exactly once."""
        return _deal(len(self.shards), self.lanes, self.seed, epoch)[lane :: self.lanes]

    def wanted(self, part: Part, epoch: int) -> Callable[[int], bool] | None:
        """Whether a sample that starts at a byte belongs to `part`; None: every one does."""
        if part.parts == 1:
            return None
        return lambda start: hash64(self.seed, epoch, part.shard, start) % part.parts == part.share

    def fingerprint(self) -> int:
        """Changes when cursors of another plan would not mean the same position."""
        names = [shard.rsplit("/", 1)[-1] for shard in self.shards]  # the folder may have moved
        text = repr((names, self.seed, self.lanes, self.shuffle_block, self.caption_key))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


@functools.lru_cache(maxsize=4)  # all lanes of a worker are in the same one or two epochs
def _deal(num_shards: int, lanes: int, seed: int, epoch: int) -> list[Part]:
    """All parts of an epoch; lane l takes every `lanes`-th from l on.

    As many shards as divide evenly are dealt whole; each of the rest is split into `parts` shares, enough of
    them that no lane's epoch is much longer than another's: the shorter would show its samples more often.
    """
    order = sorted(range(num_shards), key=lambda i: hash64(seed, epoch, i))
    whole, rest = num_shards // lanes * lanes, num_shards % lanes
    if rest == 0:
        return [Part(i, 0, 1) for i in order]
    parts = min(lanes // math.gcd(lanes, rest), math.ceil(UNEVENNESS * lanes / num_shards))
    return [Part(i, 0, 1) for i in order[:whole]] + [Part(i, s, parts) for s in range(parts) for i in order[whole:]]


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

    def __init__(self, plan: LanePlan, number: int, cursor: Cursor | None = None) -> None:
        self.plan = plan
        self.number = number
        self._cursor = cursor or Cursor()
        self._events = self.scan(self._cursor)
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
        random.Random(hash64(self.plan.seed, self.number, number, -1)).shuffle(samples)
        return Block(samples, after)

    def scan(self, start: Cursor) -> Iterator[Raw | Bad | EpochEnd]:
        """All that this lane reads from a position on, in the order of the shards, without end."""
        epoch, first, offset = start.epoch, start.shard, start.offset
        while True:
            for position, part in enumerate(self.plan.parts(self.number, epoch)):
                if position >= first:
                    begin = offset if position == first else 0
                    wanted = self.plan.wanted(part, epoch)
                    url, key = self.plan.shards[part.shard], self.plan.caption_key
                    for event in read_shard(url, begin, wanted, key, self.plan.reading):
                        if isinstance(event, Raw):
                            event.epoch, event.shard = epoch, position
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
    damage: str | None = None
    while True:
        try:
            with open_shard(url, reading) as file:
                for sample in iter_samples(file, offset, wanted):
                    yield _usable(sample, url, caption_key)
                    offset, failures = sample.end, 0
            return
        except TarError as e:
            if damage == str(e):
                yield Bad(e.reason, url, f"byte {e.offset}")
                return
            damage = str(e)  # the way here may have damaged it: other bytes would come the second time
        except ReadError as e:  # retried enough
            raise DataError(f"cannot read shard {url} from byte {offset} on: {type(e).__name__}: {e}") from e
        except OSError as e:
            failures += 1
            if failures > RETRIES:
                raise DataError(
                    f"cannot read shard {url} from byte {offset} on, after {RETRIES} retries: {type(e).__name__}: {e}"
                ) from e
            time.sleep(BACKOFF_SECONDS * 2 ** (failures - 1))


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
    reason = raw.check(sample.members, sample.duplicate, caption_key)
    if reason is not None:
        return Bad(reason, url, sample.key)
    fields = {"__key__": sample.key, "__url__": url, "__offset__": sample.start, **sample.members}
    return Raw(fields, epoch=0, shard=0, end=sample.end)


def _table(bads: list[Bad]) -> BadTable:
    table = BadTable()
    table.add(bads)
    return table
