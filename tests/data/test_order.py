"""Exact epochs with an index; weighted sources; shards drawn with replacement."""

from __future__ import annotations

import collections
import gc
import itertools
import json
import os
import random
from pathlib import Path

import pytest

from clip_train.batch import BatchSizes
from clip_train.data import DataConfig, TrainLoader, merge_cursors, resolve_lanes, times_read
from clip_train.data.config import resolve_block
from clip_train.data.index import MARK_EVERY
from clip_train.data.indexing import index_shards, write_indexes
from clip_train.data.lanes import LanePlan
from clip_train.data.mixture import Mixture
from clip_train.errors import DataError, UserError
from launcher.config.recipe import check_config
from tests.covering import pairwise
from tests.data.shards import jpeg, keys_in, sample, write_dataset, write_shard

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more than cores
SIZES = [130, 3, 1, 70, MARK_EVERY, 2 * MARK_EVERY + 1, 0, 17]  # samples; none divides another
LAYOUTS = [(1, 3), (2, 0), (4, 1)]  # ranks, workers


def index(folder: Path) -> None:
    write_indexes(index_shards([str(path) for path in sorted(folder.glob("*.tar"))], workers=1))


@pytest.fixture(scope="module")
def unequal(tmp_path_factory) -> Path:
    """Indexed shards of very unequal sizes, with 9 samples that have no caption (at every kind of border)."""
    folder = tmp_path_factory.mktemp("unequal")
    write_dataset(folder, SIZES)
    silent = itertools.count()
    for shard in (0, 2, 6):
        members = [(f"silent{next(silent)}.jpg", jpeg(1))]
        for i in range(SIZES[shard]):
            members += sample(f"s{shard}n{i}", i)
            if i in (MARK_EVERY - 1, 2 * MARK_EVERY, 100):
                members += [(f"silent{next(silent)}.jpg", jpeg(1))]
        members += [(f"silent{next(silent)}.jpg", jpeg(1))]
        write_shard(folder / f"{shard:03d}.tar", members)
    index(folder)
    return folder


@pytest.fixture(scope="module")
def second(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("second")
    for shard in range(5):
        write_shard(folder / f"x{shard}.tar", [m for i in range(9 + shard) for m in sample(f"x{shard}n{i}", 900 + i)])
    return folder


def loader_of(config: DataConfig, rank: int = 0, world_size: int = 1, global_size: int = 24, cursors=None):
    arguments = {"image_size": 8, "context_length": 8, "seed": 5, "cursors": cursors}
    return TrainLoader(config, global_size=global_size, rank=rank, world_size=world_size, **arguments)


def keys_of(config: DataConfig, steps: int, world_size: int = 1, global_size: int = 24, cursors=None):
    """Per step the keys of all ranks in turn; the position behind the last; bad samples by reason."""
    loaders = [loader_of(config, r, world_size, global_size, cursors) for r in range(world_size)]
    held, out, bads = [cursors or {}], [], collections.Counter()
    for _ in range(steps):
        batches = [next(loader) for loader in loaders]
        held = [merge_cursors([*held, *(batch.cursors for batch in batches)])]
        out.append([key for batch in batches for key in batch.keys])
        for batch in batches:
            bads.update(batch.bad_samples)
    for loader in loaders:
        loader.close()
    return out, json.loads(json.dumps(held[0])), bads


def config_of(train: Path | str, **settings) -> DataConfig:
    defaults = {"workers": 0, "lanes": 8, "shuffle_block": 11, "bad_sample_limit": 1.0}
    return DataConfig(train=str(train), **{**defaults, **settings})


# -- exact epochs


@pytest.mark.parametrize("lanes, global_size", [(1, 48), (8, 48), (64, 48), (100, 37), (450, 450)])
def test_with_an_index_every_epoch_of_the_stream_holds_each_sample_once(unequal, lanes, global_size):
    expected = sorted(key for key in keys_in(unequal) if not key.startswith("silent"))
    E = len(expected)
    assert sum(SIZES) == E
    steps = -(-3 * E // global_size)
    keys, _, bads = keys_of(config_of(f"{unequal}/*.tar", lanes=lanes), steps, global_size=global_size)
    by_lane: dict[int, list[str]] = {lane: [] for lane in range(lanes)}
    position = 0
    for batch in keys:  # lane-major, position p of lane p mod L
        for p, key in zip(
            sorted(range(position, position + len(batch)), key=lambda p: (p % lanes, p)), batch, strict=True
        ):
            by_lane[p % lanes].append(key)
        position += len(batch)
    stream = [by_lane[p % lanes][p // lanes] for p in range(3 * E)]
    for epoch in range(3):
        assert sorted(stream[epoch * E : (epoch + 1) * E]) == expected, f"epoch {epoch}"
    assert stream[:E] != stream[E : 2 * E]
    if lanes < 100:  # a lane with few samples an epoch has read ahead of what the stream has delivered
        silent = sum(key.startswith("silent") for key in keys_in(unequal))
        met = silent - 2  # those of the shard that holds nothing else: no lane reads it
        assert 3 * met <= sum(bads.values()) <= 4 * met


@pytest.mark.parametrize("lanes", [1, 3, 40])
def test_bad_samples_of_an_indexed_epoch_are_counted_once(unequal, lanes):
    plan = loader_of(config_of(f"{unequal}/*.tar", lanes=lanes)).plan
    assert isinstance(plan, LanePlan) and plan.counts is not None
    met = collections.Counter()
    for lane in range(lanes):
        for part in plan.parts(lane, 0):
            met.update(type(event).__name__ for event in plan.read(part, 0, 0))
    # shard 6 has nothing but two bad samples: no lane reads it, the index has counted them
    assert met == {"Raw": sum(SIZES), "Bad": sum(key.startswith("silent") for key in keys_in(unequal)) - 2}


@pytest.fixture(scope="module")
def whole(unequal) -> dict[int, list[list[str]]]:
    """lanes -> the keys of each step of a run that nothing stops."""
    return {lanes: keys_of(config_of(f"{unequal}/*.tar", lanes=lanes), 40)[0] for lanes in (1, 7, 64)}


@pytest.mark.parametrize("lanes, first, then", pairwise((1, 7, 64), (1, 2, 4), ((1, 3), (2, 0), (4, 1))))
def test_an_indexed_lane_resumes_anywhere(unequal, whole, lanes, first, then):
    stop = random.Random(f"{lanes} {first} {then}").randrange(1, 35)
    config, (ranks, workers) = config_of(f"{unequal}/*.tar", lanes=lanes), then
    begun, cursors, _ = keys_of(config, stop, first)
    assert begun == whole[lanes][:stop]
    again = config_of(f"{unequal}/*.tar", lanes=lanes, workers=workers)
    assert keys_of(again, 5, ranks, cursors=cursors)[0] == whole[lanes][stop : stop + 5]


def test_a_shard_with_fewer_samples_than_its_index_says_is_an_error(tmp_path):
    write_dataset(tmp_path, [30])
    index(tmp_path)
    loader = loader_of(config_of(f"{tmp_path}/*.tar", lanes=1))
    plan = loader.plan
    wrong = LanePlan(plan.shards, plan.seed, 1, 8, counts=type(plan.counts)((31,), ((),), MARK_EVERY))
    lane = wrong.open(0)
    with pytest.raises(DataError, match=r"000\.tar has 30 usable samples, and its index says 31.*clip-train index"):
        for _ in range(31):
            lane.take()


def test_a_run_keeps_the_order_it_began_with_when_an_index_comes_or_goes(tmp_path):
    write_dataset(tmp_path, [30, 20])
    config = config_of(f"{tmp_path}/*.tar", lanes=4)
    whole, _, _ = keys_of(config, 6)
    _, cursors, _ = keys_of(config, 1)
    index(tmp_path)
    assert keys_of(config, 5, cursors=cursors)[0] == whole[1:]
    counted, cursors, _ = keys_of(config, 6)
    assert counted != whole
    with pytest.raises(UserError, match=r"data.train .its weights, resampling or index"):
        loader_of(config_of(f"{tmp_path}/*.tar", lanes=4, verify="off"), cursors=cursors)


# -- several sources


def mixed(unequal: Path, second: Path, **settings) -> DataConfig:
    train = f"{unequal}/*.tar::{second}/*.tar"
    return config_of(train, **{"train_weights": [3, 1.5], "resampled": [False, True], **settings})


def of_second(key: str) -> bool:
    return key.startswith("x")


@pytest.fixture(scope="module")
def weighted(unequal, second) -> list[list[str]]:
    return keys_of(mixed(unequal, second), 60)[0]


@pytest.mark.parametrize("world_size, workers", LAYOUTS)
def test_two_weighted_sources_are_alike_on_every_layout(unequal, second, weighted, world_size, workers):
    assert keys_of(mixed(unequal, second, workers=workers), 30, world_size)[0] == weighted[:30]


@pytest.mark.parametrize("stop, first, world_size, workers", [(7, 4, 1, 3), (24, 2, 4, 1), (38, 1, 2, 0)])
def test_weighted_sources_resume_on_another_layout(unequal, second, weighted, stop, first, world_size, workers):
    begun, cursors, _ = keys_of(mixed(unequal, second), stop, first)
    assert begun == weighted[:stop]
    again, _, _ = keys_of(mixed(unequal, second, workers=workers), 5, world_size, cursors=cursors)
    assert again == weighted[stop : stop + 5]


def test_shares_hold_in_every_batch_and_lane(weighted):
    keys = weighted
    counts = [sum(map(of_second, batch)) for batch in keys]
    assert all(abs(count - 8) <= 2 for count in counts)  # a third of 24
    assert abs(sum(counts) - 480) <= 3
    by_lane = [[key for batch in keys for key in batch[3 * lane : 3 * lane + 3]] for lane in range(8)]
    assert all(abs(sum(map(of_second, lane)) - 60) <= 4 for lane in by_lane)


def test_shares_hold_in_expectation_at_every_position():
    plan = LanePlan(["a"], 0, 4, 8)
    met = sum(Mixture((plan, plan), (1, 3), seed).source(11) for seed in range(4000))
    assert abs(met / 4000 - 0.75) < 0.03


def test_each_source_keeps_its_own_order(unequal, second):
    """The first source of a mixture gives what it gives alone, lane by lane, with epochs of its own."""
    keys, _, _ = keys_of(mixed(unequal, second, shuffle_block=9), 60)
    alone, _, _ = keys_of(config_of(f"{unequal}/*.tar", shuffle_block=6), 60)  # 9 x 3 / 4.5: blocks are shared
    for lane in range(8):
        own = [key for batch in keys for key in batch[3 * lane : 3 * lane + 3] if not of_second(key)]
        assert own == [key for batch in alone for key in batch[3 * lane : 3 * lane + 3]][: len(own)]


def test_a_mixture_has_another_fingerprint_when_anything_of_it_changes(unequal, second):
    loaders = [
        loader_of(mixed(unequal, second, **changed))
        for changed in ({}, {"train_weights": [3, 1]}, {"resampled": False}, {"train_weights": [1.5, 3]})
    ]
    assert len({loader.plan.fingerprint() for loader in loaders}) == len(loaders)
    _, cursors, _ = keys_of(mixed(unequal, second), 2)
    with pytest.raises(UserError, match="its weights"):
        loader_of(mixed(unequal, second, train_weights=[2, 1.4]), cursors=cursors)


# -- with replacement


def test_shards_are_drawn_with_replacement(second):
    plan = loader_of(config_of(f"{second}/*.tar", lanes=2, resampled=True)).plan
    draws = [[part.shard for lane in range(2) for part in plan.parts(lane, epoch)] for epoch in range(400)]
    assert all(len(draw) == 5 for draw in draws)
    distinct = sum(len(set(draw)) for draw in draws) / 400
    assert abs(distinct - 5 * (1 - 0.8**5)) < 0.2  # 3.36 of 5, as draws with replacement have it
    counts = collections.Counter(shard for draw in draws for shard in draw)
    assert all(abs(counts[shard] - 400) < 80 for shard in range(5))  # binomial: 400 +- 18


# -- mistakes


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"train_weights": [1]}, r"data.train_weights \(\[1.0\]\) must have one weight for each of the 2"),
        ({"train_weights": [1, 0]}, r"train_weights \(\[1, 0\]\)"),
        ({"train_weights": "1::2::3"}, r"one weight for each of the 2 sources"),
        ({"resampled": [True]}, r"data.resampled \(\[True\]\)"),
        ({"resampled": [True, False]}, r"only data.train_weights"),
    ],
)
def test_mistakes_are_explained(settings, message):
    with pytest.raises(UserError, match=message):
        check_config({"run": {"steps": 1}, "data": {"train": "a.tar::b.tar", **settings}}, "recipe")


def test_weights_as_openclip_writes_them():
    assert DataConfig(train="a.tar::b.tar", train_weights="1::2.5").train_weights == [1.0, 2.5]


# -- how many lanes


@pytest.mark.parametrize(
    "global_size, lanes, block",
    [(256, 64, 512), (2048, 64, 512), (8192, 256, 128), (32_768, 1024, 32), (65_536, 1024, 32), (40_000, 1000, 32)],
)
def test_lanes_grow_with_the_global_batch_and_blocks_shrink(global_size, lanes, block):
    sizes = BatchSizes.constant(global_size)
    assert resolve_lanes("auto", sizes) == lanes
    assert resolve_block("auto", lanes) == block
    assert resolve_block(7, lanes) == 7


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 48, 256, 1000, 1024, 4096])
def test_the_default_divides_well_for_any_number_of_ranks(world_size):
    read = times_read(BatchSizes.constant(32_768), 1024, world_size)
    if 1024 % world_size == 0:
        assert read == 1
    assert read <= max(2, world_size / 1024)


def open_shards() -> int:
    return sum(os.path.realpath(f"/proc/self/fd/{fd}").endswith(".tar") for fd in os.listdir("/proc/self/fd"))


def test_many_lanes_are_closed_between_blocks(unequal):
    """One process reads all 80 lanes, whose shards it does not keep open; or two read 40 each, and do."""
    config = config_of(f"{unequal}/*.tar", lanes=80, verify="off")  # a verified shard is opened for each block anyway
    gc.collect()  # what earlier loaders held open
    assert open_shards() == 0
    alone = loader_of(config, global_size=80)
    whole = [next(alone).keys for _ in range(20)]
    assert open_shards() == 0
    two = [loader_of(config, rank, 2, global_size=80) for rank in range(2)]
    assert [[key for loader in two for key in next(loader).keys] for _ in range(20)] == whole
    assert open_shards() > 0
