"""Which rank verifies or fetches which blocks of a checkpoint's files, and arithmetic on ranges of bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from clip_train.checkpoint.layout import BLOCK_BYTES, FileEntry

Range = tuple[int, int]  # bytes [start, end)
Ranges = list[Range]  # sorted, apart from each other


def merged(ranges: Iterable[Range]) -> Ranges:
    """Any ranges as the sorted ones that cover the same bytes."""
    out: Ranges = []
    for start, end in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        elif start < end:
            out.append((start, end))
    return out


def common(a: Ranges, b: Ranges) -> Ranges:
    """The bytes that are in both."""
    out: Ranges = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            out.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def without(a: Ranges, b: Ranges) -> Ranges:
    """The bytes of `a` that are not in `b`."""
    gaps: Ranges = []
    at = 0
    for start, end in b:
        gaps.append((at, start))
        at = end
    last = max((end for _, end in a), default=0)
    return common(a, merged([*gaps, (at, max(at, last))]))


def length(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


class Span(NamedTuple):
    """Some blocks of one file, `[first, end)`."""

    file: int  # its place in the manifest
    first: int
    end: int

    def range(self, size: int) -> Range:
        """Its bytes in a file of `size` bytes."""
        return self.first * BLOCK_BYTES, min(self.end * BLOCK_BYTES, size)


def num_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def deal(files: Sequence[FileEntry], holders: Mapping[int, Collection[int]], world_size: int) -> list[list[Span]]:
    """Every block of some files to one rank: [rank] -> spans.

    holders: file -> the ranks that can have it, at least one. As many ranks as wrote the checkpoint get each their
    own file; else files with the same holders are laid end to end and cut evenly. A file of format 1, which can only
    be verified as a whole, is not cut.
    """
    out: list[list[Span]] = [[] for _ in range(world_size)]
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, ranks in sorted(holders.items()):
        entry = files[i]
        if len(files) == world_size and entry.rank in ranks:
            out[entry.rank].append(Span(i, 0, num_blocks(entry.size)))
        elif not entry.blocks:
            least = min(sorted(ranks), key=lambda rank: sum(span.end - span.first for span in out[rank]))
            out[least].append(Span(i, 0, num_blocks(entry.size)))
        else:
            alike[tuple(sorted(ranks))].append(i)
    for ranks, indices in alike.items():
        total = sum(num_blocks(files[i].size) for i in indices)
        begin = 0  # of this file, among the blocks of all
        for i in indices:
            count = num_blocks(files[i].size)
            for k, rank in enumerate(ranks):
                first = min(max(total * k // len(ranks) - begin, 0), count)
                end = min(max(total * (k + 1) // len(ranks) - begin, 0), count)
                if first < end:
                    out[rank].append(Span(i, first, end))
            begin += count
    return out
