"""Which sample is at which place of the stream, and whose it is: arithmetic alone, the same everywhere.

The stream has positions p = 0, 1, 2, ...; position p is sample number p // L of stream p mod L (`L` streams,
`data.lanes`). Both what it is and who decodes it follow from p, the seed and the shards' sample counts.

Of a source with E samples positions [e E, (e + 1) E) are epoch e. Its shuffled shards, end to end, are cut into L
pieces of exactly the samples that the streams have to give, so an epoch holds each sample once. A stream permutes its
piece in blocks of K. Weighted sources have streams and epochs of their own; whose turn it is follows from p too.

The global batch of a step is positions [P, P + G), in the order of the streams: first what stream 0 has there, then
stream 1, and so on. Rank r holds a contiguous share of it; shares differ by one sample at most.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from clip_train import batch
from clip_train.batch import BatchSizes

WORD = 1 << 64
# 2^64 / golden ratio, odd: its multiples, in any stride, fill [0, 2^64) more evenly than random numbers would
STRIDE = 0x9E3779B97F4A7C15


def hash64(*numbers: int) -> int:
    """A uniform number in [0, 2^63), the same on every machine."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def samples_below(position: int, stream: int, streams: int) -> int:
    """How many of the positions below `position` are of stream `stream`."""
    return (position + streams - 1 - stream) // streams


def samples_of_streams_below(position: int, stream: int, streams: int) -> int:
    """How many of the positions below `position` are of streams below `stream`."""
    return position // streams * stream + min(position % streams, stream)


class Segment(NamedTuple):
    """Samples [start, stop) of a shard, in its own order."""

    shard: int  # index into the list of shards
    start: int
    stop: int


class Block(NamedTuple):
    """The samples of a stream that are permuted together."""

    first: int  # number of its first sample in the stream
    segments: tuple[Segment, ...]
    order: list[int]  # place in the stream, from `first` on -> place in the segments


class Source:
    """The streams of one list of shards.

    Args:
        counts: samples in each shard; at least one in all.
        streams: L
        block: K
        resampled: shards are drawn with replacement; an epoch is then so many samples, of which some come twice.
    """

    def __init__(
        self, counts: Sequence[int], streams: int, seed: int, block: int, *, resampled: bool = False
    ) -> None:
        self.counts = counts
        self.streams, self.seed, self.block_size, self.resampled = streams, seed, block, resampled
        self.total = sum(counts)  # E
        if not self.total:
            raise ValueError("a source needs at least one sample")
        self._latest: tuple[int, list[int], list[int]] = (
            -1,
            [],
            [],
        )  # what `_shuffled` found last, with its epoch
        self._pieces: dict[
            int, tuple[int, list[Segment]]
        ] = {}  # stream -> its latest epoch, with the piece

    def epoch(self, stream: int, count: int) -> int:
        """That sample number `count` of a stream is in."""
        return (count * self.streams + stream) // self.total

    def begin(self, stream: int, epoch: int) -> int:
        """The number of a stream's first sample of an epoch."""
        return samples_below(epoch * self.total, stream, self.streams)

    def piece(self, stream: int, epoch: int) -> list[Segment]:
        """What a stream reads in an epoch: as many samples as it has positions there."""
        if self._pieces.get(stream, (None,))[0] != epoch:
            size = self.begin(stream, epoch + 1) - self.begin(stream, epoch)
            self._pieces[stream] = (
                epoch,
                (self._drawn if self.resampled else self._cut)(stream, epoch, size),
            )
        return self._pieces[stream][1]

    def block(self, stream: int, count: int) -> Block:
        """The block that holds sample number `count` of a stream."""
        epoch, K = self.epoch(stream, count), self.block_size
        begin, end = self.begin(stream, epoch), self.begin(stream, epoch + 1)
        first_size = max(
            1, K * (stream + 1) // self.streams
        )  # blocks of all streams do not end at one time
        number = 0 if count < begin + first_size else 1 + (count - begin - first_size) // K
        first = begin if number == 0 else begin + first_size + (number - 1) * K
        stop = min(first + (K if number else first_size), end)
        order = list(range(stop - first))
        random.Random(hash64(self.seed, stream, epoch, number, -1)).shuffle(order)
        return Block(first, _part(self.piece(stream, epoch), first - begin, stop - begin), order)

    def _shuffled(self, epoch: int) -> tuple[list[int], list[int]]:
        """(the shards that hold something, in an epoch's order; where each ends, counted in samples)."""
        if self._latest[0] != epoch:
            shards = [shard for shard, count in enumerate(self.counts) if count]
            shards.sort(key=lambda shard: hash64(self.seed, epoch, shard))
            self._latest = (
                epoch,
                shards,
                list(itertools.accumulate(self.counts[shard] for shard in shards)),
            )
        return self._latest[1:]

    def _cut(self, stream: int, epoch: int, size: int) -> list[Segment]:
        """The stream's part of all shuffled shards end to end."""
        before, until = (
            samples_of_streams_below(e * self.total, stream, self.streams)
            for e in (epoch, epoch + 1)
        )
        begin = until - before
        return self._between(epoch, begin, begin + size)

    def _between(self, epoch: int, begin: int, end: int) -> list[Segment]:
        shards, ends = self._shuffled(epoch)
        found = []
        at = bisect.bisect_right(ends, begin)
        while begin < end:
            shard = shards[at]
            start = ends[at] - self.counts[shard]
            stop = min(end, ends[at])
            found.append(Segment(shard, begin - start, stop - start))
            begin, at = stop, at + 1
        return found

    def _drawn(self, stream: int, epoch: int, size: int) -> list[Segment]:
        """Whole shards drawn with replacement; the first from any of its samples on and the last cut short, so that
        every place holds every sample of the source with the same probability."""
        begin = hash64(self.seed, epoch, stream, -2) % self.total
        shard, start, _ = self._between(0, begin, begin + 1)[0]
        shards = self._shuffled(0)[0]
        found: list[Segment] = []
        while size:
            stop = min(self.counts[shard], start + size)
            size -= stop - start
            draw = len(found)
            found.append(Segment(shard, start, stop))
            shard, start = shards[hash64(self.seed, epoch, stream, draw, -2) % len(shards)], 0
        return found


def _part(segments: list[Segment], begin: int, end: int) -> tuple[Segment, ...]:
    """Samples [begin, end) of `segments` end to end."""
    found, at = [], 0
    for shard, start, stop in segments:
        a, b = max(begin, at), min(end, at + stop - start)
        if a < b:
            found.append(Segment(shard, start + a - at, start + b - at))
        at += stop - start
    return tuple(found)


class Order:
    """The stream: one source, or several with their weights.

    Args:
        sources: of equally many streams.
        weights: each one's share of the stream, positive.
        seed: the run's, which also seeds the samples.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], seed: int) -> None:
        self.sources, self.seed = tuple(sources), seed
        self.streams = sources[0].streams
        total = sum(weights)
        # where each source's part of [0, 2^64) ends; the last one's is the end
        self._edges = [int(edge / total * WORD) for edge in itertools.accumulate(weights)][:-1]
        self._offset = (
            hash64(seed, -3) * 2
        )  # uniform over seeds: shares also hold in expectation at every position

    def source(self, position: int) -> int:
        """The source of the sample at a position of the stream.

        Within n successive positions, or n of one stream, a source's share is off by O(log n) samples.
        """
        return bisect.bisect_right(self._edges, (position * STRIDE + self._offset) % WORD)

    def taken(self, stream: int, count: int) -> list[int]:
        """How many of the first `count` samples of a stream are of each source."""
        return self._counted(count, self.streams, stream)

    def sample_seed(self, stream: int, count: int) -> int:
        """Of everything random about sample number `count` of a stream: in [0, 2^63)."""
        return hash64(self.seed, stream, count)

    def epoch(self, position: int) -> int:
        """Whole epochs before a position; of several sources, of the one that has been read least often."""
        return min(
            taken // source.total
            for taken, source in zip(self._counted(position, 1, 0), self.sources, strict=True)
        )

    def _counted(self, n: int, stride: int, first: int) -> list[int]:
        """How many of the positions first, first + stride, ... (n of them) are of each source, in closed form."""
        a, b = stride * STRIDE % WORD, (first * STRIDE + self._offset) % WORD
        # [x mod M < t] = floor(x / M) - floor((x - t) / M)
        whole = floor_sum(n, a, WORD, b)
        below = [whole - floor_sum(n, a, WORD, b + WORD - edge) + n for edge in self._edges]
        return [stop - start for start, stop in itertools.pairwise([0, *below, n])]


def floor_sum(n: int, a: int, m: int, b: int) -> int:
    """`sum_{i < n} floor((a i + b) / m)`, all non-negative, in O(log m): Euclid's algorithm on the lattice points
    under a line."""
    total = 0
    while n > 0:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        n, b, a, m = (a * n + b) // m, (a * n + b) % m, m, a
        if m == 0:
            break
    return total


class StreamShare(NamedTuple):
    """Of the samples [begin, begin + size) that a step takes from a stream, [first, last) are decoded here."""

    stream: int
    begin: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Partition:
    """What one rank, or one of its workers, has of every global batch."""

    sizes: BatchSizes
    streams: int  # L
    rank: int
    world_size: int
    began: int  # the step whose global batch begins at position 0
    own: range  # of the streams: those that one of its workers has of what the rank has

    @classmethod
    def of(
        cls, sizes: BatchSizes, streams: int, rank: int, world_size: int, began: int = 0
    ) -> Partition:
        return cls(sizes, streams, rank, world_size, began, range(streams))

    def steps(self, start: int) -> Iterator[list[StreamShare]]:
        """For each step from `start` on: the streams of which something is decoded here, in order."""
        L = self.streams
        P = self.sizes.before(start) - self.sizes.before(self.began)
        for step in itertools.count(start):
            G = self.sizes.at(step)
            counts = batch.shares(G, self.world_size)
            begin = sum(counts[: self.rank])
            end = begin + counts[self.rank]
            out = []
            for stream in _overlap(_streams_of(G, L, self.rank, self.world_size), self.own):
                before = samples_below(P, stream, L)
                size = samples_below(P + G, stream, L) - before
                # where the stream begins in the canonical order
                at = samples_of_streams_below(P + G, stream, L) - samples_of_streams_below(
                    P, stream, L
                )
                first, last = (before + min(max(edge - at, 0), size) for edge in (begin, end))
                if first < last:
                    out.append(StreamShare(stream, before, first, last))
            yield out
            P += G

    def most(self) -> int:
        """No fewer samples than are decoded here of any global batch."""
        L, W = self.streams, self.world_size
        return max(
            min(
                max(batch.shares(G, W)),
                len(_overlap(_streams_of(G, L, self.rank, W), self.own)) * -(-G // L),
            )
            for G in self.sizes.distinct()
        )

    def workers(self, num: int) -> list[Partition]:
        """This rank's cut for at most `num` workers: neighbouring streams to each, so that their pieces in turn are in
        canonical order."""
        first, last = (self.streams * rank / self.world_size for rank in (self.rank, self.rank + 1))
        num = max(1, min(num, math.ceil(last) - math.floor(first)))
        cuts = [round(first + (last - first) * worker / num) for worker in range(1, num)]
        return [
            replace(self, own=range(a, b)) for a, b in itertools.pairwise([0, *cuts, self.streams])
        ]


def times_read(sizes: BatchSizes, streams: int, world_size: int) -> float:
    """How often the ranks together read each stream, in the mean, once a schedule has ended: more than once where
    ranks share streams. Each sample is decoded once all the same."""
    last = sizes.stretches[-1].size
    return (
        sum(len(_streams_of(last, streams, rank, world_size)) for rank in range(world_size))
        / streams
    )


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _streams_of(G: int, streams: int, rank: int, world_size: int) -> range:
    """The streams that a rank can meet in a global batch of G samples, wherever in the stream it begins.

    With G = q L + g, the streams below l hold between q l + max(0, l + g - L) and q l + min(l, g) of the samples.
    """
    q, g = divmod(G, streams)
    counts = batch.shares(G, world_size)
    begin = sum(counts[:rank])
    end = begin + counts[rank]
    numbers = range(streams)
    first = bisect.bisect_right(
        numbers, begin, key=lambda stream: q * (stream + 1) + min(stream + 1, g)
    )
    stop = bisect.bisect_left(
        numbers, end, key=lambda stream: q * stream + max(0, stream + g - streams)
    )
    return range(first, stop)
