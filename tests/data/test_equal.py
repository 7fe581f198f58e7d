"""How many pairs of equal captions a global batch will hold: against counting."""

from __future__ import annotations

import collections
import random
import re

import pytest

from clip_tools.shards.equal import describe, sketch
from clip_tools.shards.index import run_index
from tests.data.shards import jpeg, write_shard


def captions_of(kinds: int, count: int) -> list[str]:
    rng = random.Random(kinds)
    return [f"Caption  {rng.randrange(kinds)}" for _ in range(count)]


def counted(captions: list[str], batch: int) -> float:
    ordered = sum(n * (n - 1) for n in collections.Counter(captions).values())
    return ordered / len(captions) / (len(captions) - 1) * batch * (batch - 1) / 2


def told(text: str) -> list[float]:
    found = re.findall(r"([\d,]+) in a global batch", text)
    return [float(number.replace(",", "")) for number in found]


@pytest.mark.parametrize("kinds", [1, 3, 200, 20_000])
def test_the_estimate_is_what_counting_gives(kinds):
    captions = captions_of(kinds, 20_000)
    parts = [sketch(captions[i : i + 3000]) for i in range(0, 20_000, 3000)]
    expected = [counted(captions, batch) for batch in (4096, 32_768)]
    counts = [3000] * 6 + [2000]
    assert told(describe(parts, counts)) == pytest.approx(expected, rel=0.1)


def test_some_of_the_shards_stand_for_all():
    """Equal captions follow each other: in one shard, and in no two."""
    captions = [f"caption {i // 40}" for i in range(64 * 200)]
    parts = [sketch(captions[i : i + 200]) for i in range(0, len(captions), 200)]
    expected = pytest.approx([counted(captions, 4096)], rel=0.1)
    assert told(describe(parts, [200] * 64, [4096])) == expected
    assert told(describe(parts[::8], [200] * 8, [4096], shards=64)) == pytest.approx(
        [counted(captions, 4096)], rel=0.3
    )


def test_captions_that_are_all_different_say_nothing():
    for count in (0, 1, 2, 30_000):
        assert describe([sketch(f"{i}" for i in range(count))], [count]) == ""
    assert describe([sketch(["A dog", " a  DOG"])], [2])
    assert describe([sketch(captions_of(50, 1000))], [1000], [2]) == ""


def test_the_index_says_it(tmp_path, capsys):
    captions = captions_of(4, 60)
    for number in range(2):
        members = []
        for i in range(30 * number, 30 * number + 30):
            members += [(f"{i}.jpg", jpeg(i)), (f"{i}.txt", captions[i].encode())]
        write_shard(tmp_path / f"{number}.tar", members)
    run_index([f"{tmp_path}/*.tar"], caption_key=None, workers=1, check=False, quiet=True)
    expected = [counted(captions, 60)]  # no batch is larger than the data
    assert told(capsys.readouterr().out) == pytest.approx(expected, rel=1e-3)
