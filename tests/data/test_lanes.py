"""The order of the samples, without decoding: exactly once, resumable anywhere, damage reported."""

from __future__ import annotations

import collections
import io
import itertools
from pathlib import Path

import pytest

from clip_train.batch import BatchConfig, BatchSizes
from clip_train.data import lanes as lanes_module
from clip_train.data.config import resolve_lanes
from clip_train.data.lanes import Cursor, Lane, LanePlan, hash64
from clip_train.data.tar import TarError
from clip_train.errors import DataError
from tests.data.shards import keys_in, sample, tar_bytes, write_dataset, write_shard


def plan_of(folder, lanes: int, block: int = 8, seed: int = 3) -> LanePlan:
    return LanePlan([str(p) for p in sorted(folder.glob("*.tar"))], seed, lanes, block)


def stream(plan: LanePlan, number: int, count: int, cursor: Cursor | None = None) -> list[tuple[str, int, Cursor]]:
    """(key, seed, cursor behind it) of a lane's next samples."""
    lane = Lane(plan, number, cursor)
    out = []
    for _ in range(count):
        slot = lane.take()
        out.append((slot.sample.fields["__key__"], slot.seed, lane.cursor))
    return out


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
    first = [key for key, _, _ in stream(plan_of(tmp_path, 1, 32, seed=1), 0, 64)]
    other = [key for key, _, _ in stream(plan_of(tmp_path, 1, 32, seed=2), 0, 64)]
    assert sorted(first) == sorted(other) and first != other
    assert first != [f"s0n{i}" for i in range(64)]
    assert first == [key for key, _, _ in stream(plan_of(tmp_path, 1, 32, seed=1), 0, 64)]


def test_seeds_differ_and_fit_int64(tmp_path):
    write_dataset(tmp_path, [10, 10])
    plan = plan_of(tmp_path, 2)
    seeds = [seed for number in range(2) for _, seed, _ in stream(plan, number, 100)]
    assert len(set(seeds)) == 200 and all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds).bit_length() > 60
    other = [seed for number in range(2) for _, seed, _ in stream(plan_of(tmp_path, 2, seed=4), number, 100)]
    assert not set(seeds) & set(other)


def test_hash_is_the_same_everywhere():
    assert hash64(0, 1, 2) == 4529435921577843265  # old checkpoints resume by it


def test_resume_after_any_sample_is_exact(tmp_path):
    write_dataset(tmp_path, [11, 6, 9])
    for lanes, number in ((1, 0), (2, 1), (5, 3)):
        plan = plan_of(tmp_path, lanes, block=4)
        whole = stream(plan, number, 70)
        for stop in range(60):
            cursor = Cursor(**whole[stop][2].to_dict())
            assert stream(plan, number, 9, cursor) == whole[stop + 1 : stop + 10]


def test_skipping_equals_taking(tmp_path):
    write_dataset(tmp_path, [20])
    plan = plan_of(tmp_path, 1)
    lane = Lane(plan, 0)
    for _ in range(37):
        lane.skip()
    whole = stream(plan, 0, 40)
    assert lane.cursor == whole[36][2]
    assert lane.take().sample.fields["__key__"] == whole[37][0]


def test_unusable_samples_are_skipped_and_reported_once(tmp_path):
    members = sample("good0", 0)
    members += [("noimage.txt", b"x"), ("nocaption.jpg", b"x"), ("empty.jpg", b""), ("empty.txt", b"x")]
    members += [("blank.jpg", b"x"), ("blank.txt", b" \n")]
    members += sample("twice", 1) + sample("twice", 2) + sample("good1", 3)
    write_shard(tmp_path / "a.tar", members)
    write_dataset(tmp_path, [3])
    lane = Lane(plan_of(tmp_path, 1, block=2), 0)
    keys, reasons = [], []
    for _ in range(10):  # two epochs of five
        slot = lane.take()
        keys.append(slot.sample.fields["__key__"])
        reasons += [(bad.reason, bad.key) for bad in slot.sample.skipped]
    expected = {"good0", "good1", "s0n0", "s0n1", "s0n2"}
    assert set(keys[:5]) == set(keys[5:]) == expected
    assert collections.Counter(reasons) == {
        ("no image", "noimage"): 2,
        ("no caption", "nocaption"): 2,
        ("image is empty", "empty"): 2,
        ("caption is empty", "blank"): 2,
        ("duplicate key", "twice"): 2,
    }


def test_a_cut_shard_gives_what_is_whole_and_a_reason(tmp_path):
    data = tar_bytes(list(itertools.chain(*(sample(f"k{i}", i) for i in range(6)))))
    (tmp_path / "cut.tar").write_bytes(data[: len(data) // 2])
    write_dataset(tmp_path, [4])
    lane = Lane(plan_of(tmp_path, 1, block=3), 0)
    bads = []
    keys = set()
    for _ in range(12):
        slot = lane.take()
        keys.add(slot.sample.fields["__key__"])
        bads += slot.sample.skipped
    assert {"s0n0", "s0n1", "s0n2", "s0n3", "k0"} <= keys and "k5" not in keys
    assert {bad.shard for bad in bads} == {str(tmp_path / "cut.tar")}
    assert all(bad.reason.startswith("truncated shard") for bad in bads)


def test_nothing_usable_stops_with_the_table(tmp_path):
    write_shard(tmp_path / "a.tar", [(f"{i}.txt", b"x") for i in range(5)])
    (tmp_path / "b.tar").write_bytes(b"garbage" * 1000)
    with pytest.raises(DataError, match="none of the samples") as caught:
        Lane(plan_of(tmp_path, 2), 1).take()
    assert "no image" in str(caught.value) and "damaged shard" in str(caught.value)


def test_fewer_samples_than_lanes_says_so(tmp_path, monkeypatch):
    write_dataset(tmp_path, [1])
    monkeypatch.setattr(lanes_module, "EMPTY_EPOCHS", 2)
    with pytest.raises(DataError, match=r"lower data\.lanes"):
        for number in range(64):
            Lane(plan_of(tmp_path, 64), number).take()


class Flaky(io.BytesIO):
    """Fails every `every`-th read, as a network does."""

    reads = 0
    every = 7

    def read(self, n=-1):
        Flaky.reads += 1
        if Flaky.reads % self.every == 0:
            raise OSError("connection reset")
        return super().read(n)


def test_io_errors_are_retried_and_lose_nothing(tmp_path, monkeypatch):
    write_dataset(tmp_path, [12, 9])
    plan = plan_of(tmp_path, 2, block=5)
    whole = stream(plan, 1, 40)
    monkeypatch.setattr(lanes_module, "BACKOFF_SECONDS", 0)
    monkeypatch.setattr(lanes_module, "open_shard", lambda url, reading: Flaky(Path(url).read_bytes()))
    assert stream(plan, 1, 40) == whole
    assert Flaky.reads > 50


class Flipping(io.BytesIO):
    """The first three times that it is opened, one bit is wrong: in the first header, then further on."""

    opened = 0

    def __init__(self, data: bytes) -> None:
        at = Flipping.opened * 3 * 512
        if Flipping.opened < 3:
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        Flipping.opened += 1
        super().__init__(data)


def test_a_header_broken_on_the_way_is_read_again_and_told(tmp_path, monkeypatch, caplog):
    write_dataset(tmp_path, [12])
    plan = plan_of(tmp_path, 1)
    whole = stream(plan, 0, 24)
    monkeypatch.setattr(Flipping, "opened", 0)
    monkeypatch.setattr(lanes_module, "open_shard", lambda url, reading: Flipping(Path(url).read_bytes()))
    lane = Lane(plan, 0)
    slots = [lane.take() for _ in range(24)]
    assert [slot.sample.fields["__key__"] for slot in slots] == [key for key, _, _ in whole]
    assert not [bad for slot in slots for bad in slot.sample.skipped]
    assert "bad header at byte 0 at first, but not when read again" in caplog.text and "clip-train index" in caplog.text


def test_bytes_that_always_change_stop_the_run(tmp_path, monkeypatch):
    write_dataset(tmp_path, [12])
    place = itertools.count(512, 512)

    def broken(file, start, wanted):
        raise TarError("damaged shard: bad header", next(place))

    monkeypatch.setattr(lanes_module, "iter_samples", broken)
    with pytest.raises(
        DataError, match=r"000\.tar comes damaged from byte 0 on, each time elsewhere.*clip-train index"
    ):
        Lane(plan_of(tmp_path, 1), 0).take()


def test_io_errors_that_stay_name_shard_and_offset(tmp_path, monkeypatch):
    write_dataset(tmp_path, [12])
    monkeypatch.setattr(lanes_module, "BACKOFF_SECONDS", 0)
    monkeypatch.setattr(lanes_module, "open_shard", lambda url, reading: Flaky(Path(url).read_bytes()))
    monkeypatch.setattr(Flaky, "every", 1)
    with pytest.raises(DataError, match=r"000\.tar from byte 0 .*connection reset"):
        Lane(plan_of(tmp_path, 1), 0).take()


def test_a_shard_that_vanished_is_an_error(tmp_path, monkeypatch):
    write_dataset(tmp_path, [3])
    plan = plan_of(tmp_path, 1)
    (tmp_path / "000.tar").unlink()
    monkeypatch.setattr(lanes_module, "BACKOFF_SECONDS", 0)
    with pytest.raises(DataError, match="FileNotFoundError"):
        Lane(plan, 0).take()


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
