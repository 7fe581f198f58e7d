"""Which sample is at which position of the stream, and which rank decodes it: arithmetic alone, the
same on every rank.

The stream has positions p = 0, 1, 2, ...; position p is sample number p // L of stream p mod L (`L`
streams, `data.lanes`). The sample and the rank that decodes it follow from p, the seed and the
shards' sample counts.

In a source with E samples, positions [e E, (e + 1) E) are epoch e. Its shuffled shards, end to end,
are cut into L pieces with exactly the samples that each stream has to give, so an epoch holds each
sample once. A stream permutes its piece in blocks of K. Weighted sources have streams and epochs of
their own; their turns follow from p too. Weights may change at given positions.

The global batch of a step is positions [P, P + G), in the order of the streams: first the samples
of stream 0, then those of stream 1, and so on. Rank r holds a contiguous share of it; shares differ
by one sample at most.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from clip_train import batch
from clip_train.batch import BatchSizes

WORD = 1 << 64
# 2^64 / golden ratio, odd: its multiples, in any stride, fill [0, 2^64) more evenly than random
# numbers would
STRIDE = 0x9E3779B97F4A7C15


def hash64(*numbers: int) -> int:
    """A uniform number in [0, 2^63), the same on every machine."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def samples_below(position: int, stream: int, streams: int) -> int:
    """How many of the positions below `position` belong to stream `stream`."""
    return (position + streams - 1 - stream) // streams


def samples_of_streams_below(position: int, stream: int, streams: int) -> int:
    """How many of the positions below `position` belong to streams below `stream`."""
    return position // streams * stream + min(position % streams, stream)


class Segment(NamedTuple):
    """Samples [start, stop) of a shard, in its own order."""

    shard: int  # index into the list of shards
    start: int
    stop: int


class ShuffleBlock(NamedTuple):
    """The samples of a stream that are permuted together."""

    first: int  # number of the block's first sample in the stream
    segments: list[Segment]
    order: list[int]  # [i]: which sample of the segments is number `first + i` of the stream


class Source:
    """The streams of one list of shards.

    Args:
        counts: samples in each shard; at least one in all.
        streams: L
        block: K
        resampled: shards are drawn with replacement; an epoch has as many samples, some of them
            twice.
    """

    def __init__(
        self, counts: Sequence[int], streams: int, seed: int, block: int, *, resampled: bool = False
    ) -> None:
        self.counts = counts
        self.streams, self.seed, self.block_size, self.resampled = streams, seed, block, resampled
        self.total = sum(counts)  # E
        # the latest epoch that was shuffled, its shards, and where each one ends, in samples: as
        # arrays, because every loader worker has its own
        self._shuffled: tuple[int, array[int], array[int]] = (-1, array("I"), array("Q"))
        self._pieces: dict[int, tuple[int, list[Segment]]] = {}  # stream -> its latest epoch, piece

    def piece(self, stream: int, epoch: int) -> list[Segment]:
        """The samples that a stream reads in an epoch, one for each of its positions."""
        known, piece = self._pieces.get(stream, (-1, []))
        if known == epoch:
            return piece
        start, end = epoch * self.total, (epoch + 1) * self.total
        L = self.streams
        size = samples_below(end, stream, L) - samples_below(start, stream, L)
        if self.resampled:
            piece = self._draw(stream, epoch, size)
        else:
            begin = samples_of_streams_below(end, stream, L)
            begin -= samples_of_streams_below(start, stream, L)
            piece = self._cut_epoch(epoch, begin, begin + size)
        self._pieces[stream] = (epoch, piece)
        return piece

    def block(self, stream: int, count: int) -> ShuffleBlock:
        """The block that holds sample number `count` of a stream."""
        K = self.block_size
        epoch = (count * self.streams + stream) // self.total
        # the epoch has samples [begin, end) of the stream
        begin = samples_below(epoch * self.total, stream, self.streams)
        end = samples_below((epoch + 1) * self.total, stream, self.streams)
        first_size = max(1, K * (stream + 1) // self.streams)  # streams end their blocks in turn
        number = 0  # of the block, in the epoch; it has samples [first, stop) of the stream
        first = begin
        stop = begin + first_size
        if count >= stop:
            number = 1 + (count - stop) // K
            first = stop + (number - 1) * K
            stop = first + K
        stop = min(stop, end)
        order = list(range(stop - first))
        random.Random(hash64(self.seed, stream, epoch, number, -1)).shuffle(order)
        piece = self.piece(stream, epoch)
        ends = list(itertools.accumulate(segment.stop - segment.start for segment in piece))
        return ShuffleBlock(first, _cut(piece, ends, first - begin, stop - begin), order)

    def _shuffle(self, epoch: int) -> tuple[array[int], array[int]]:
        """The shards that have samples, in an epoch's order, and where each one ends, in
        samples."""
        if self._shuffled[0] != epoch:
            shards = [shard for shard, count in enumerate(self.counts) if count]
            shards.sort(key=lambda shard: hash64(self.seed, epoch, shard))
            ends = itertools.accumulate(self.counts[shard] for shard in shards)
            self._shuffled = (epoch, array("I", shards), array("Q", ends))
        return self._shuffled[1:]

    def _cut_epoch(self, epoch: int, begin: int, end: int) -> list[Segment]:
        """Samples [begin, end) of an epoch's shards, end to end."""
        shards, ends = self._shuffle(epoch)
        part = slice(bisect.bisect_right(ends, begin), bisect.bisect_left(ends, end) + 1)
        whole = [Segment(shard, 0, self.counts[shard]) for shard in shards[part]]
        return _cut(whole, ends[part], begin, end)

    def _draw(self, stream: int, epoch: int, size: int) -> list[Segment]:
        """Whole shards, drawn with replacement. The first shard begins at any of its samples and
        the last one is cut short, so every place gets every sample of the source with the same
        probability."""
        shards, _ = self._shuffle(0)
        begin = hash64(self.seed, epoch, stream, -2) % self.total
        shard, start, _ = self._cut_epoch(0, begin, begin + 1)[0]
        drawn: list[Segment] = []
        while size:
            stop = min(self.counts[shard], start + size)
            size -= stop - start
            number = hash64(self.seed, epoch, stream, len(drawn), -2) % len(shards)
            drawn.append(Segment(shard, start, stop))
            shard = shards[number]
            start = 0
        return drawn


def _cut(segments: list[Segment], ends: Sequence[int], begin: int, end: int) -> list[Segment]:
    """Samples [begin, end) of `segments`, concatenated. ends: where each segment ends in the
    concatenation, in samples."""
    part = []
    number = bisect.bisect_right(ends, begin)  # of the segment with sample `begin`
    while begin < end:
        segment = segments[number]
        stop = min(end, ends[number])
        shift = segment.stop - ends[number]  # from the concatenation to the shard
        part.append(Segment(segment.shard, begin + shift, stop + shift))
        begin = stop
        number += 1
    return part


class WeightsStage(NamedTuple):
    """The weights of the sources in a part of the stream."""

    end: int  # the first position behind it
    weights: Sequence[float]  # not negative, and not all 0


class Order:
    """The stream: one source, or several with their weights.

    Args:
        sources: of equally many streams.
        weights: each one's share of the stream behind the last stage.
        seed: the run's, which also seeds the samples.
        stages: other weights before that, one after the other.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        seed: int,
        stages: Sequence[WeightsStage] = (),
    ) -> None:
        self.sources, self.seed = tuple(sources), seed
        self.streams = sources[0].streams
        self._ends = [stage.end for stage in stages]  # positions
        # for each stage and for the rest of the stream: where each source's part of [0, 2^64) ends;
        # the last one's is the end
        self._edges: list[list[int]] = []
        for stage_weights in [*(stage.weights for stage in stages), weights]:
            total = sum(stage_weights)
            ends = itertools.accumulate(stage_weights)
            self._edges.append([int(end / total * WORD) for end in ends][:-1])
        # uniform over seeds: shares also hold in expectation at every position
        self._offset = hash64(seed, -3) * 2

    def source(self, position: int) -> int:
        """The source of the sample at a position of the stream.

        Within n successive positions of a stage, or n of one stream, a source's share is off by
        O(log n) samples.
        """
        edges = self._edges[bisect.bisect_right(self._ends, position)]
        return bisect.bisect_right(edges, (position * STRIDE + self._offset) % WORD)

    def sample_seed(self, stream: int, count: int) -> int:
        """The seed of everything random about sample `count` of a stream: in [0, 2^63)."""
        return hash64(self.seed, stream, count)

    def epoch(self, position: int) -> int:
        """Complete epochs before a position; with several sources, of the source with the fewest."""
        return min(
            taken // source.total
            for taken, source in zip(self.taken(position, 1, 0), self.sources, strict=True)
        )

    def taken(self, n: int, stride: int, first: int) -> list[int]:
        """How many of the positions first, first + stride, ... (n of them) are of each source, in
        closed form. With `streams` and the stream's number: of its first n samples."""
        counts = [0] * len(self.sources)
        begin = 0  # the number of the first of these positions in the stage
        for end, edges in zip([*self._ends, None], self._edges, strict=True):
            stop = n
            if end is not None:
                stop = min(n, max(begin, -((first - end) // stride)))
            of_stage = self._taken(stop - begin, stride, first + begin * stride, edges)
            counts = [count + more for count, more in zip(counts, of_stage, strict=True)]
            begin = stop
        return counts

    def _taken(self, n: int, stride: int, first: int, edges: list[int]) -> list[int]:
        """As `taken`, of positions in one stage."""
        a, b = stride * STRIDE % WORD, (first * STRIDE + self._offset) % WORD
        # [x mod M < t] = floor(x / M) - floor((x - t) / M)
        whole = floor_sum(n, a, WORD, b)
        below = [whole - floor_sum(n, a, WORD, b + WORD - edge) + n for edge in edges]
        return [stop - start for start, stop in itertools.pairwise([0, *below, n])]


def floor_sum(n: int, a: int, m: int, b: int) -> int:
    """`sum_{i < n} floor((a i + b) / m)`, all non-negative, in O(log m): Euclid's algorithm on the
    lattice points under a line."""
    total = 0
    while n > 0:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        n, b, a, m = (a * n + b) // m, (a * n + b) % m, m, a
        if m == 0:
            break
    return total


@dataclass(frozen=True)
class Partition:
    """The part of every global batch that one rank, or one of its workers, decodes."""

    sizes: BatchSizes
    streams: int  # L
    rank: int
    world_size: int
    order_start: int = 0  # the step whose global batch begins at position 0
    own_streams: range | None = None  # the streams of one worker of the rank; None: all streams
    turn: int = 0  # workers that share their streams take the steps in turn: this worker's turn
    turns: int = 1  # the number of workers that share their streams

    def steps(self, start: int) -> Iterator[dict[int, range]]:
        """For each step from `start` on whose turn it is here: stream -> the numbers of its samples
        that are decoded here, in order."""
        L = self.streams
        for step in itertools.count(start + self.turn, self.turns):
            G = self.sizes.at(step)
            P = self.sizes.before(step) - self.sizes.before(self.order_start)
            begin, end = batch.share_of(G, self.rank, self.world_size)
            shares = {}
            for stream in self._streams(G):
                before = samples_below(P, stream, L)
                size = samples_below(P + G, stream, L) - before
                # where the stream begins in the canonical order
                at = samples_of_streams_below(P + G, stream, L)
                at -= samples_of_streams_below(P, stream, L)
                first, last = (before + min(max(edge - at, 0), size) for edge in (begin, end))
                if first < last:
                    shares[stream] = range(first, last)
            yield shares

    def most(self) -> int:
        """An upper bound of the samples that are decoded here for one global batch."""
        bounds = []
        for G in set(self.sizes.sizes):
            of_streams = len(self._streams(G)) * -(-G // self.streams)
            bounds.append(min(max(batch.shares(G, self.world_size)), of_streams))
        return max(bounds)

    def workers(self, num: int) -> list[Partition]:
        """This rank's part, cut for `num` workers (0: one): neighboring streams for each. If there
        are fewer streams, several workers share them and take the steps in turn, so that each reads
        whole runs of samples.

        The list is in the order of the pieces: those of the first step, in canonical order, then
        those of the next one.
        """
        num = max(1, num)
        first, last = (self.streams * rank / self.world_size for rank in (self.rank, self.rank + 1))
        most = math.ceil(last) - math.floor(first)
        parts = num if num <= most else math.gcd(num, most)
        cuts = [round(first + (last - first) * part / parts) for part in range(1, parts)]
        edges = list(itertools.pairwise([0, *cuts, self.streams]))
        turns = num // parts
        return [
            replace(self, own_streams=range(a, b), turn=turn, turns=turns)
            for turn in range(turns)
            for a, b in edges
        ]

    def _streams(self, G: int) -> range:
        """The streams that can contribute samples here to a global batch of G samples, wherever it
        begins.

        With G = q L + g, the streams below l hold between q l + max(0, l + g - L) and q l + min(l,
        g) of the samples.
        """
        L = self.streams
        q, g = divmod(G, L)
        begin, end = batch.share_of(G, self.rank, self.world_size)
        streams = range(L)
        first = bisect.bisect_right(streams, begin, key=lambda l: q * (l + 1) + min(l + 1, g))
        stop = bisect.bisect_left(streams, end, key=lambda l: q * l + max(0, l + g - L))
        if self.own_streams is None:
            return range(first, stop)
        return range(max(first, self.own_streams.start), min(stop, self.own_streams.stop))
