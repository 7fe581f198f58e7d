"""Reading the samples of the order: from anywhere; what a shard lacks is invalid, a disk that fails is an error."""

from __future__ import annotations

import io
import logging
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clip_tools.shards.index import index_shards, write_indexes
from clip_train.data.config import DataConfig
from clip_train.data.index import ShardIndex
from clip_train.data.loader import TrainLoader
from clip_train.errors import DataError
from tests.data.shards import jpeg, sample, shards_open_as, write_dataset, write_shard


def loader_of(
    folder: Path, lanes: int, global_size: int = 1, block: int = 8, seed: int = 3, **arguments
):
    config = DataConfig(
        train=str(folder / "*.tar"),
        workers=0,
        lanes=lanes,
        shuffle_block=block,
        bad_sample_limit=1.0,
    )
    sizes = {"image_size": 8, "context_length": 8, "global_size": global_size}
    return TrainLoader(config, **sizes, seed=seed, **arguments)


def stream(loader: TrainLoader, steps: int) -> list[tuple[list[str], list[int]]]:
    """(keys, seeds) of the next batches."""
    batches = [next(loader) for _ in range(steps)]
    return [(batch.keys, batch.sample_seeds.tolist()) for batch in batches]


def test_order_depends_on_the_seed_and_is_mixed(tmp_path):
    write_dataset(tmp_path, [64])
    first, other, again = (
        next(loader_of(tmp_path, 1, 64, block=32, seed=seed)).keys for seed in (1, 2, 1)
    )
    assert sorted(first) == sorted(other) and first != other
    assert first != [f"s0n{i}" for i in range(64)]
    assert first == again


def test_seeds_differ_and_fit_int64(tmp_path):
    write_dataset(tmp_path, [10, 10])
    seeds, other = (
        next(loader_of(tmp_path, 2, 200, seed=seed)).sample_seeds.tolist() for seed in (3, 4)
    )
    assert len(set(seeds)) == 200 and all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds).bit_length() > 60
    assert not set(seeds) & set(other)


@pytest.mark.parametrize("lanes, global_size", [(1, 1), (2, 1), (5, 3), (64, 5)])
def test_resume_after_any_sample_is_exact(tmp_path, lanes, global_size):
    """At every place of a block, between blocks, shards and epochs; also with fewer samples than streams."""
    write_dataset(tmp_path, [11, 6, 9])
    whole = stream(loader_of(tmp_path, lanes, global_size, block=4), 45)
    for stop in range(1, 40):
        assert (
            stream(loader_of(tmp_path, lanes, global_size, block=4, step=stop), 5)
            == whole[stop : stop + 5]
        )


class Metered(io.BytesIO):
    """Counts the bytes that are read, of all files together."""

    read_bytes = 0

    def read(self, n=-1):
        data = super().read(n)
        Metered.read_bytes += len(data)
        return data


@pytest.mark.parametrize("indexed", [True, False])
def test_a_resume_reads_nothing_of_what_came_before(tmp_path, monkeypatch, indexed):
    """Late in a long run. In the shards where its streams stand it looks for their places: with an index from the last
    mark on, without by the headers alone."""
    for shard in range(6):
        write_shard(
            tmp_path / f"{shard}.tar",
            [m for i in range(300) for m in sample(f"{shard}n{i}", i % 9)],
        )
    paths = [str(path) for path in sorted(tmp_path.glob("*.tar"))]
    shard_bytes = Path(paths[0]).stat().st_size
    if indexed:
        write_indexes(index_shards(paths, block_bytes=4096, workers=1))
    found = loader_of(tmp_path, 3, 6).index
    for step in (70, 100_003, 10**9):
        monkeypatch.setattr(Metered, "read_bytes", 0)
        with monkeypatch.context() as patched:
            shards_open_as(patched, Metered)
            assert len(next(loader_of(tmp_path, 3, 6, block=4, step=step, index=found))) == 6
        assert Metered.read_bytes < 3 * (0.35 if indexed else 0.6) * shard_bytes


def counted(folder: Path, *sizes: int) -> ShardIndex:
    """As if an index had said so."""
    paths = [str(path) for path in sorted(folder.glob("*.tar"))]
    return ShardIndex.of(paths).with_places(dict(zip(paths, sizes, strict=True)))


@pytest.mark.parametrize("lanes", [1, 4])
def test_samples_missing_from_a_shard_count_as_invalid(tmp_path, lanes):
    """Each place that it cannot fill is counted once an epoch, and filled by another sample: batches stay full."""
    write_dataset(tmp_path, [10, 14])
    loader = loader_of(tmp_path, lanes, 27, index=counted(tmp_path, 13, 14))
    for _ in range(3):
        batch = next(loader)
        assert set(batch.keys) == {f"s0n{i}" for i in range(10)} | {f"s1n{i}" for i in range(14)}
        assert batch.bad_samples == {
            f"missing: its shard has fewer samples\t{tmp_path / '000.tar'}": 3
        }


def test_samples_beyond_a_shards_count_are_skipped_and_logged(tmp_path, caplog):
    write_dataset(tmp_path, [10, 14])
    loader = loader_of(tmp_path, 1, 17, index=counted(tmp_path, 3, 14))
    with caplog.at_level(logging.WARNING):
        keys = [next(loader).keys for _ in range(2)]
    assert all(
        sorted(each) == sorted([f"s0n{i}" for i in range(3)] + [f"s1n{i}" for i in range(14)])
        for each in keys
    )
    assert (
        "000.tar has more samples than the 3 that are known" in caplog.text
        and "001.tar" not in caplog.text
    )


def test_a_wholly_invalid_shard_is_replaced_by_the_next_samples(tmp_path):
    """Over many blocks, the same on every layout."""
    write_shard(tmp_path / "0.tar", [(f"mute{i}.jpg", jpeg(1)) for i in range(200)])
    write_shard(tmp_path / "1.tar", [m for i in range(40) for m in sample(f"k{i}", i)])
    whole = [next(loader_of(tmp_path, 2, 240, block=8, step=step)) for step in range(3)]
    for batch in whole:
        assert set(batch.keys) == {f"k{i}" for i in range(40)}
        assert batch.bad_samples == {f"no caption\t{tmp_path / '0.tar'}": 200}
    ranks = [loader_of(tmp_path, 2, 240, block=8, rank=rank, world_size=3) for rank in range(3)]
    for batch in whole:
        assert [key for rank in ranks for key in next(rank).keys] == batch.keys


def test_nothing_usable_stops_with_the_table(tmp_path):
    write_shard(tmp_path / "a.tar", [(f"{i}.txt", b"x") for i in range(5)])
    (tmp_path / "b.tar").write_bytes(b"garbage" * 1000)
    with pytest.raises(DataError, match="samples in a row cannot be used") as caught:
        next(loader_of(tmp_path, 2, 2))
    assert "no image" in str(caught.value) and "damaged shard" in str(caught.value)


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
        return io.BytesIO(
            data if at is None else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        )

    return flipped


def test_a_header_broken_on_the_way_is_read_again_and_told(tmp_path, monkeypatch, caplog):
    write_dataset(tmp_path, [12])
    whole = stream(loader_of(tmp_path, 1), 24)
    shards_open_as(monkeypatch, flipping(tmp_path / "000.tar", 3))
    loader = loader_of(tmp_path, 1)
    batches = [next(loader) for _ in range(24)]
    assert [(batch.keys, batch.sample_seeds.tolist()) for batch in batches] == whole
    assert not any(batch.bad_samples for batch in batches)
    assert (
        "bad header at byte 0 at first, but not when read again" in caplog.text
        and "clip-train index" in caplog.text
    )


def test_bytes_that_always_change_stop_the_run(tmp_path, monkeypatch):
    members = [("k.jpg", jpeg(0)), ("k.txt", b"x"), *((f"k.{i}", b"more") for i in range(20))]
    shards_open_as(monkeypatch, flipping(write_shard(tmp_path / "000.tar", members), len(members)))
    with pytest.raises(
        DataError,
        match=r"000\.tar comes damaged from byte 0 on, each time elsewhere.*clip-train index",
    ):
        next(loader_of(tmp_path, 1))
