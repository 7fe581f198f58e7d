"""The order of the samples, without decoding: exactly once, resumable anywhere, damage reported."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clip_train.batch import BatchConfig, BatchSizes
from clip_train.data import DataConfig, TrainLoader, merge_cursors
from clip_train.data.config import resolve_lanes
from clip_train.data.lanes import Lane, LanePlan, hash64
from clip_train.errors import DataError
from tests.data.shards import jpeg, keys_in, shards_open_as, write_dataset, write_shard


def loader_of(folder: Path, lanes: int, global_size: int = 1, block: int = 8, seed: int = 3, cursors=None):
    config = DataConfig(train=str(folder / "*.tar"), workers=0, lanes=lanes, shuffle_block=block, bad_sample_limit=1.0)
    sizes = {"image_size": 8, "context_length": 8, "global_size": global_size}
    return TrainLoader(config, **sizes, seed=seed, cursors=cursors)


def stream(loader: TrainLoader, steps: int) -> list[tuple[list[str], list[int]]]:
    """(keys, seeds) of the next batches."""
    batches = [next(loader) for _ in range(steps)]
    return [(batch.keys, batch.sample_seeds.tolist()) for batch in batches]


def plan_of(folder: Path, lanes: int) -> LanePlan:
    return LanePlan([str(p) for p in sorted(folder.glob("*.tar"))], 3, lanes, 8)


def epochs_of(plan: LanePlan, number: int, epochs: int) -> list[list[str]]:
    """The keys of a lane's first epochs."""
    lane = Lane(plan, number)
    out: list[list[str]] = [[] for _ in range(epochs)]
    while True:
        slot = lane.take()
        if slot.sample.epoch >= epochs:
            return out
        out[slot.sample.epoch].append(slot.sample.fields["__key__"])


@pytest.mark.parametrize(
    "sizes,lanes",
    [
        ([30, 5, 17, 1], 4),  # as many shards as lanes, unequal
        ([30, 5, 17, 1, 9, 12, 3], 3),  # a remainder is split
        ([40, 23], 8),  # fewer shards than lanes
        ([64], 6),
        ([13, 7, 5], 2),
        ([20], 1),
    ],
)
def test_each_epoch_visits_every_sample_once(tmp_path, sizes, lanes):
    write_dataset(tmp_path, sizes)
    plan = plan_of(tmp_path, lanes)
    by_lane = [epochs_of(plan, number, 3) for number in range(lanes)]
    expected = sorted(keys_in(tmp_path))
    assert len(expected) == sum(sizes)
    for epoch in range(3):
        assert sorted(key for lane in by_lane for key in lane[epoch]) == expected
    assert len({tuple(lane[0]) for lane in by_lane}) > 1 or lanes == 1
    assert [lane[0] for lane in by_lane] != [lane[1] for lane in by_lane]  # another order


@pytest.mark.parametrize("shards,lanes", [(65, 64), (100, 64), (127, 64), (10, 64), (1, 64), (5, 3)])
def test_lanes_get_even_shares(shards, lanes):
    plan = LanePlan([str(i) for i in range(shards)], 0, lanes, 8)
    shares = [sum(1 / part.parts for part in plan.parts(number, 0)) for number in range(lanes)]
    assert sum(shares) == pytest.approx(shards)
    assert max(shares) - min(shares) <= 0.11 * shards / lanes


def test_a_split_shard_is_split_evenly(tmp_path):
    write_dataset(tmp_path, [600])
    sizes = [len(epochs_of(plan_of(tmp_path, 6), number, 1)[0]) for number in range(6)]
    assert sum(sizes) == 600
    assert min(sizes) > 70 and max(sizes) < 130  # binomial: 100 +- 9


def test_order_depends_on_the_seed_and_is_mixed(tmp_path):
    write_dataset(tmp_path, [64])
    first, other, again = (next(loader_of(tmp_path, 1, 64, block=32, seed=seed)).keys for seed in (1, 2, 1))
    assert sorted(first) == sorted(other) and first != other
    assert first != [f"s0n{i}" for i in range(64)]
    assert first == again


def test_seeds_differ_and_fit_int64(tmp_path):
    write_dataset(tmp_path, [10, 10])
    seeds, other = (next(loader_of(tmp_path, 2, 200, seed=seed)).sample_seeds.tolist() for seed in (3, 4))
    assert len(set(seeds)) == 200 and all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds).bit_length() > 60
    assert not set(seeds) & set(other)


def test_hash_is_the_same_everywhere():
    assert hash64(0, 1, 2) == 4529435921577843265  # old checkpoints resume by it


@pytest.mark.parametrize("lanes, global_size", [(1, 1), (2, 1), (5, 3)])
def test_resume_after_any_sample_is_exact(tmp_path, lanes, global_size):
    """At every place of a block, between blocks, shards and epochs."""
    write_dataset(tmp_path, [11, 6, 9])
    whole, position, positions = [], {}, []
    loader = loader_of(tmp_path, lanes, global_size, block=4)
    for _ in range(45):
        batch = next(loader)
        whole.append((batch.keys, batch.sample_seeds.tolist()))
        position = merge_cursors([position, batch.cursors])
        positions.append(position)
    for stop in range(1, 40):
        cursors = positions[stop - 1]
        assert stream(loader_of(tmp_path, lanes, global_size, block=4, cursors=cursors), 5) == whole[stop : stop + 5]


def test_nothing_usable_stops_with_the_table(tmp_path):
    write_shard(tmp_path / "a.tar", [(f"{i}.txt", b"x") for i in range(5)])
    (tmp_path / "b.tar").write_bytes(b"garbage" * 1000)
    with pytest.raises(DataError, match="none of the samples") as caught:
        next(loader_of(tmp_path, 2, 2))
    assert "no image" in str(caught.value) and "damaged shard" in str(caught.value)


def test_fewer_samples_than_lanes_says_so(tmp_path):
    write_dataset(tmp_path, [1])
    with pytest.raises(DataError, match=r"lower data\.lanes"):
        next(loader_of(tmp_path, 64, 64))


# ------------------------------------------------------------ a disk that fails


@pytest.fixture
def no_waiting(monkeypatch):
    """The time between retries passes at once."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


class Flaky(io.BytesIO):
    """Every `every`-th read fails, of all files together."""

    reads, every = 0, 7

    def read(self, n=-1):
        Flaky.reads += 1
        if Flaky.reads % self.every == 0:
            raise OSError("connection reset")
        return super().read(n)


def test_io_errors_are_retried_and_lose_nothing(tmp_path, monkeypatch, no_waiting):
    write_dataset(tmp_path, [12, 9])
    whole = stream(loader_of(tmp_path, 2, block=5), 40)
    monkeypatch.setattr(Flaky, "reads", 0)
    shards_open_as(monkeypatch, Flaky)
    assert stream(loader_of(tmp_path, 2, block=5), 40) == whole
    assert Flaky.reads > 50


def test_io_errors_that_stay_name_shard_and_offset(tmp_path, monkeypatch, no_waiting):
    write_dataset(tmp_path, [12])
    shards_open_as(monkeypatch, Flaky)
    monkeypatch.setattr(Flaky, "every", 1)
    with pytest.raises(DataError, match=r"000\.tar from byte 0 .*connection reset"):
        next(loader_of(tmp_path, 1))


def test_a_shard_that_vanished_is_an_error(tmp_path, no_waiting):
    write_dataset(tmp_path, [3])
    loader = loader_of(tmp_path, 1)
    (tmp_path / "000.tar").unlink()
    with pytest.raises(DataError, match="FileNotFoundError"):
        next(loader)


def flipping(shard: Path, members: int) -> Callable[[bytes], io.BytesIO]:
    """What opens it: the first time the first member's header has one wrong bit, then the second one's, and so on."""
    with tarfile.open(shard) as tar:
        headers = iter([member.offset for member in tar][:members])

    def flipped(data: bytes) -> io.BytesIO:
        at = next(headers, None)
        return io.BytesIO(data if at is None else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])

    return flipped


def test_a_header_broken_on_the_way_is_read_again_and_told(tmp_path, monkeypatch, caplog):
    write_dataset(tmp_path, [12])
    whole = stream(loader_of(tmp_path, 1), 24)
    shards_open_as(monkeypatch, flipping(tmp_path / "000.tar", 3))
    loader = loader_of(tmp_path, 1)
    batches = [next(loader) for _ in range(24)]
    assert [(batch.keys, batch.sample_seeds.tolist()) for batch in batches] == whole
    assert not any(batch.bad_samples for batch in batches)
    assert "bad header at byte 0 at first, but not when read again" in caplog.text and "clip-train index" in caplog.text


def test_bytes_that_always_change_stop_the_run(tmp_path, monkeypatch):
    members = [("k.jpg", jpeg(0)), ("k.txt", b"x"), *((f"k.{i}", b"more") for i in range(20))]
    shards_open_as(monkeypatch, flipping(write_shard(tmp_path / "000.tar", members), len(members)))
    with pytest.raises(
        DataError, match=r"000\.tar comes damaged from byte 0 on, each time elsewhere.*clip-train index"
    ):
        next(loader_of(tmp_path, 1))


# ------------------------------------------------------------ how many


@pytest.mark.parametrize(
    "global_size, expected", [(256, 64), (96, 48), (100, 50), (32768, 1024), (7, 7), (97, 24), (134, 33), (1009, 64)]
)
def test_auto_lanes(global_size, expected):
    assert resolve_lanes("auto", BatchSizes.constant(global_size)) == expected


def test_auto_lanes_of_a_schedule_divide_all_sizes_where_they_can():
    def lanes(*stages, last):
        return resolve_lanes("auto", BatchConfig(global_size=last, schedule=stages).sizes)

    assert lanes({"until_step": 9, "global_size": 96}, last=128) == 32
    assert lanes({"until_step": 9, "global_size": 96, "ramp_to": 480, "increment": 48}, last=480) == 48
    assert lanes({"until_step": 9, "global_size": 96}, last=127) == 24  # a quarter of the smallest
    assert lanes({"until_step": 9, "global_size": 2}, last=4096) == 2


def test_any_number_of_lanes_goes():
    assert resolve_lanes(7, BatchSizes.constant(96)) == 7
    assert resolve_lanes(200, BatchSizes.constant(96)) == 200
