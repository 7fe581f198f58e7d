"""Ranges of bytes against sets of numbers, and that every block of a checkpoint is one rank's."""

import itertools
import random
from collections import Counter

import pytest

from clip_train.checkpoint.layout import BLOCK_BYTES, FileEntry
from clip_train.checkpoint.shares import common, deal, length, merged, without


def numbers(ranges: list[tuple[int, int]]) -> set[int]:
    return {n for start, end in ranges for n in range(start, end)}


def test_ranges_are_sets() -> None:
    rng = random.Random(0)
    for _ in range(500):
        a, b = (
            [(start, start + rng.randrange(8)) for start in rng.choices(range(60), k=rng.randrange(6))]
            for _ in range(2)
        )
        left, right = merged(a), merged(b)
        assert numbers(left) == numbers(a) and length(left) == len(numbers(a))
        assert left == merged(left) and all(one[1] < two[0] for one, two in itertools.pairwise(left))
        for got, want in (
            (common(left, right), numbers(a) & numbers(b)),
            (without(left, right), numbers(a) - numbers(b)),
        ):
            assert numbers(got) == want and got == merged(got)


def entry(rank: int, blocks: int, *, format: int = 2) -> FileEntry:
    size = blocks * BLOCK_BYTES - 5
    return FileEntry(f"rank{rank:05d}.safetensors", size, "", rank, [""] * blocks if format > 1 else [])


@pytest.mark.parametrize("format", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_block_is_dealt_once_to_one_who_can_have_it(world_size: int, format: int) -> None:
    rng = random.Random(world_size)
    for writers in (1, 2, 4, 9):
        files = [entry(rank, rng.randrange(1, 9), format=format) for rank in range(writers)]
        holders = {i: sorted(rng.sample(range(world_size), rng.randrange(1, world_size + 1))) for i in range(writers)}
        dealt = deal(files, holders, world_size)
        seen = Counter((span.file, block) for spans in dealt for span in spans for block in range(span.first, span.end))
        assert seen == {(i, block): 1 for i, file in enumerate(files) for block in range(-(-file.size // BLOCK_BYTES))}
        assert all(rank in holders[span.file] for rank, spans in enumerate(dealt) for span in spans)
        if format == 1:  # whole files: they have no checksums but their own
            assert all(
                (span.first, span.end) == (0, -(-files[span.file].size // BLOCK_BYTES)) for s in dealt for span in s
            )


def test_the_shares_are_even_and_ones_own_file_is_ones_own() -> None:
    files = [entry(rank, 5) for rank in range(4)]
    everyone = {i: range(4) for i in range(4)}
    assert [[span.file for span in spans] for spans in deal(files, everyone, 4)] == [[0], [1], [2], [3]]
    for world_size in (2, 3, 5, 8):
        dealt = deal(files, {i: range(world_size) for i in range(4)}, world_size)
        counts = [sum(span.end - span.first for span in spans) for spans in dealt]
        assert max(counts) - min(counts) <= 1 and sum(counts) == 20
