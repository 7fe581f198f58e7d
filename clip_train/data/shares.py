"""Whose the samples of a global batch are: arithmetic alone, the same on every rank and in every worker.

The stream of samples has positions p = 0, 1, 2, ...; position p is of lane p mod L. The global batch of a step is
positions [P, P + G), both functions of the step (`BatchSizes`), in lane-major order: first what lane 0 has there,
then lane 1's, and so on. Rank r holds a contiguous share of that order; shares differ by one sample at most.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from clip_train import batch
from clip_train.batch import BatchSizes
from clip_train.data.dealing import samples_below


class LaneShare(NamedTuple):
    """Of the `size` samples that a step takes from a lane, [first, last) are decoded here, the others elsewhere."""

    lane: int
    first: int
    last: int
    size: int

    def __len__(self) -> int:
        return self.last - self.first


def _below(position: int, lane: int, lanes: int) -> int:
    """How many of the positions below `position` are of lanes below `lane`."""
    return position // lanes * lane + min(position % lanes, lane)


@dataclass(frozen=True)
class RankShare:
    """What one rank, or one of its workers, has of every global batch."""

    sizes: BatchSizes
    lanes: int  # L
    rank: int
    world_size: int
    needed: tuple[range, ...]  # stage of `sizes` -> the lanes that may be needed from there on

    @classmethod
    def of(cls, sizes: BatchSizes, lanes: int, rank: int, world_size: int) -> RankShare:
        needed: list[range] = []
        for stage in reversed(range(len(sizes.stretches))):
            ranges = [_lanes_of(size, lanes, rank, world_size) for size in sizes.distinct(stage)] + needed[:1]
            needed.insert(0, range(min(r.start for r in ranges), max(r.stop for r in ranges)))
        return cls(sizes, lanes, rank, world_size, tuple(needed))

    def steps(self, start: int) -> Iterator[list[LaneShare]]:
        """For each step from `start` on: the lanes still needed, in order, with what this share has of them."""
        L = self.lanes
        P = self.sizes.before(start)
        for step in itertools.count(start):
            G = self.sizes.at(step)
            counts = batch.shares(G, self.world_size)
            begin = sum(counts[: self.rank])
            end = begin + counts[self.rank]
            out = []
            for lane in self.needed[self.sizes.stage(step)]:
                size = samples_below(P + G, lane, L) - samples_below(P, lane, L)
                at = _below(P + G, lane, L) - _below(P, lane, L)  # where the lane begins in the canonical order
                first, last = (min(max(edge - at, 0), size) for edge in (begin, end))
                out.append(LaneShare(lane, first, last, size))
            yield out
            P += G

    def most(self) -> int:
        """No fewer samples than this share has of any global batch."""
        return max(
            min(max(batch.shares(G, self.world_size)), len(lanes) * -(-G // self.lanes))
            for stage, lanes in enumerate(self.needed)
            for G in self.sizes.distinct(stage)
        )

    def workers(self, num: int, start: int) -> list[RankShare]:
        """This share dealt to at most `num` workers: neighbouring lanes to each, so that their pieces in turn are
        in canonical order. The cut is even for the size that the schedule ends with."""
        lanes = self.needed[self.sizes.stage(start)]
        own = range(self.rank * self.lanes, (self.rank + 1) * self.lanes)  # in units of 1 / (W L) of the batch
        weights = [_overlap(own, range(lane * self.world_size, (lane + 1) * self.world_size)) for lane in lanes]
        num = max(1, min(num, sum(weight > 0 for weight in weights)))
        total = list(itertools.accumulate(weights, initial=0))
        cuts = [bisect.bisect_left(total, total[-1] * w / num) for w in range(1, num)]
        edges = [lanes.start, *(lanes.start + cut for cut in cuts), lanes.stop]
        return [self._only(range(a, b)) for a, b in itertools.pairwise(edges)]

    def _only(self, lanes: range) -> RankShare:
        kept = (range(max(r.start, lanes.start), min(r.stop, lanes.stop)) for r in self.needed)
        return RankShare(self.sizes, self.lanes, self.rank, self.world_size, tuple(kept))


def times_read(sizes: BatchSizes, lanes: int, world_size: int) -> float:
    """How often the ranks together read each lane, in the mean, once a schedule has ended: more than once where
    ranks share lanes. Each sample is decoded once all the same."""
    last = sizes.stretches[-1].size
    return sum(len(_lanes_of(last, lanes, rank, world_size)) for rank in range(world_size)) / lanes


def _overlap(a: range, b: range) -> int:
    return max(0, min(a.stop, b.stop) - max(a.start, b.start))


def _lanes_of(G: int, lanes: int, rank: int, world_size: int) -> range:
    """The lanes that a rank can meet in a global batch of G samples, wherever in the stream it begins.

    With G = q L + g, the lanes below l hold between q l + max(0, l + g - L) and q l + min(l, g) of the samples.
    """
    q, g = divmod(G, lanes)
    counts = batch.shares(G, world_size)
    begin = sum(counts[:rank])
    end = begin + counts[rank]
    numbers = range(lanes)
    first = bisect.bisect_right(numbers, begin, key=lambda lane: q * (lane + 1) + min(lane + 1, g))
    stop = bisect.bisect_left(numbers, end, key=lambda lane: q * lane + max(0, lane + g - lanes))
    return range(first, stop)
