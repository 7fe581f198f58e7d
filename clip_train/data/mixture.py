"""Several sources in one stream, each with a fixed share of it.

Every source has lanes of its own, as many as the stream. Lane l of the stream takes its samples from the sources'
lanes l; from which source the sample at position p of the stream comes is a function of the seed and of p alone.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from clip_train.data.dealing import hash64
from clip_train.data.lanes import Cursor, Lane, LanePlan, Slot, fingerprint

WORD = 1 << 64
# 2^64 / golden ratio, odd: its multiples, in any stride, fill [0, 2^64) more evenly than random numbers would
STRIDE = 0x9E3779B97F4A7C15
MOST_TRIED = 1 << 12  # of the orders in which a run may have begun: all of them with 12 sources


@dataclass(frozen=True)
class MixedCursor:
    """A mixed lane's position: its sources' positions."""

    count: int  # samples taken by this lane in all
    sources: tuple[Cursor, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"count": self.count, "sources": [cursor.to_dict() for cursor in self.sources]}


@dataclass(frozen=True)
class Mixture:
    """The plans of several sources, and each one's share of the stream."""

    plans: tuple[LanePlan, ...]  # of equally many lanes
    weights: tuple[float, ...]  # positive
    seed: int

    @property
    def lanes(self) -> int:
        return self.plans[0].lanes

    @property
    def shards(self) -> list[str]:
        return [shard for plan in self.plans for shard in plan.shards]

    @cached_property
    def _edges(self) -> list[int]:
        """Where each source's part of [0, 2^64) ends; the last one's is the end."""
        total = sum(self.weights)
        return [int(edge / total * WORD) for edge in itertools.accumulate(self.weights)][:-1]

    @cached_property
    def _offset(self) -> int:
        """Uniform over seeds: so the shares also hold in expectation at every single position."""
        return hash64(self.seed, -3) * 2

    def source(self, position: int) -> int:
        """The source of the sample at a position of the stream.

        Within n successive positions, or n of one lane, a source's share is off by O(log n) samples.
        """
        return bisect.bisect_right(self._edges, (position * STRIDE + self._offset) % WORD)

    def open(self, number: int, cursor: MixedCursor | None = None, *, keep_open: bool = True) -> MixedLane:
        """The lane `number`, from a cursor on. keep_open: its shards stay open from block to block."""
        return MixedLane(self, number, cursor, keep_open=keep_open)

    def parse(self, cursor: dict[str, Any]) -> MixedCursor:
        """What `MixedCursor.to_dict` gave, from a checkpoint."""
        parsed = (plan.parse(dict(each)) for plan, each in zip(self.plans, cursor["sources"], strict=True))
        return MixedCursor(cursor["count"], tuple(parsed))

    def as_it_may_have_begun(self) -> Iterator[Mixture]:
        """This order, and those that there were before each of the sources, or some, had an index."""
        choices = [plan.as_it_may_have_begun() for plan in self.plans]
        none_indexed = tuple(choice[-1] for choice in choices)  # that of most runs, should there be too many to try
        for plans in itertools.islice(itertools.chain([none_indexed], itertools.product(*choices)), MOST_TRIED):
            yield replace(self, plans=plans)

    def in_new_epoch(self, cursors: dict[int, MixedCursor]) -> dict[int, MixedCursor]:
        """The lanes' positions moved, in every source, to the start of an epoch that none of them has begun."""
        moved = [
            plan.in_new_epoch({lane: cursor.sources[number] for lane, cursor in cursors.items()})
            for number, plan in enumerate(self.plans)
        ]
        return {
            lane: MixedCursor(cursor.count, tuple(each[lane] for each in moved)) for lane, cursor in cursors.items()
        }

    def fingerprint(self) -> int:
        """Changes when cursors of another mixture would not mean the same position."""
        return fingerprint([plan.fingerprint() for plan in self.plans], self._edges, self.seed)


class MixedLane:
    """A reader of one lane of the stream, from a cursor on; as `Lane` is."""

    def __init__(
        self, mixture: Mixture, number: int, cursor: MixedCursor | None = None, *, keep_open: bool = True
    ) -> None:
        self.mixture, self.number = mixture, number
        starts: Sequence[Cursor | None] = cursor.sources if cursor else [None] * len(mixture.plans)
        pairs = zip(mixture.plans, starts, strict=True)
        self._lanes: list[Lane] = [plan.open(number, at, keep_open=keep_open) for plan, at in pairs]
        self._count = cursor.count if cursor else 0

    @property
    def cursor(self) -> MixedCursor:
        return MixedCursor(self._count, tuple(lane.cursor for lane in self._lanes))

    def take(self) -> Slot:
        """The next sample. Raises DataError where shards cannot be read or hold nothing usable."""
        return self._next().take()

    def skip(self) -> None:
        """Leave the next sample to another reader of this lane."""
        self._next().skip()

    def _next(self) -> Lane:
        position = self._count * self.mixture.lanes + self.number
        self._count += 1
        return self._lanes[self.mixture.source(position)]
