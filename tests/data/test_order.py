"""The order is arithmetic: epochs, streams, weights and shares, held against oracles that walk from the start."""

from __future__ import annotations

import collections
import gc
import itertools
import os
import random
from fractions import Fraction
from pathlib import Path

import pytest

from clip_tools.shards.index import index_shards, write_indexes
from clip_train.batch import BatchConfig, BatchSizes
from clip_train.data.config import DataConfig, order_keys, resolve_streams
from clip_train.data.index import OFFSET_EVERY
from clip_train.data.loader import TrainLoader
from clip_train.data.order import Order, Source, WeightsStage, hash64
from clip_train.errors import UserError
from clip_train.recipe.recipe import check_config
from tests.covering import pairwise
from tests.data.shards import jpeg, keys_in, sample, write_dataset, write_shard

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning"
)  # more than cores
SIZES = [130, 3, 1, 70, OFFSET_EVERY, 2 * OFFSET_EVERY + 1, 0, 17]  # samples; none divides another
LAYOUTS = [(1, 3), (2, 0), (4, 1)]  # ranks, workers


# -- arithmetic alone


def place(source: Source, position: int) -> tuple[int, int]:
    """(shard, number in it) of the sample at a position of a source's stream."""
    stream, count = position % source.streams, position // source.streams
    block = source.block(stream, count)
    samples = [
        (segment.shard, n) for segment in block.segments for n in range(segment.start, segment.stop)
    ]
    assert len(samples) == len(
        block.order
    ) <= source.block_size and block.first <= count < block.first + len(samples)
    return samples[block.order[count - block.first]]


COUNTS = ([1], [30, 5, 17, 1], [0, 40, 0, 23], [64] * 5, [200, 1, 1, 1], list(range(12)))


@pytest.mark.parametrize(
    "counts, streams, block", pairwise(COUNTS, (1, 2, 7, 16, 300), (1, 3, 50, 1000))
)
def test_each_epoch_holds_every_sample_once(counts, streams, block):
    source = Source(counts, streams, 5, block)
    everything = [(shard, n) for shard, count in enumerate(counts) for n in range(count)]
    E = len(everything)
    epochs = [[place(source, epoch * E + p) for p in range(E)] for epoch in (0, 1, 2, 10**12)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    if E > 50 and block > 1:
        assert len({tuple(epoch) for epoch in epochs}) == 4  # each in another order


def test_any_shard_sizes_streams_and_blocks():
    draw = random.Random(1)
    for _ in range(150):
        counts = [
            draw.choice([0, 1, 2, 31, draw.randrange(200)]) for _ in range(draw.randrange(1, 9))
        ] + [1]
        source = Source(
            counts,
            draw.choice([1, 2, 3, 8, 40, 129]),
            draw.randrange(99),
            draw.choice([1, 2, 9, 400]),
        )
        begin = draw.randrange(10**6) * source.total
        found = [place(source, begin + p) for p in range(source.total)]
        assert len(set(found)) == source.total and max(n for _, n in found) == max(counts) - 1


def test_a_stream_reads_each_shard_of_an_epoch_at_one_go():
    """In all, shards are opened once for each stream that a border between streams falls into."""
    source = Source([100] * 20, 8, 0, 16)
    pieces = [source.piece(stream, 3) for stream in range(8)]
    assert sum(map(len, pieces)) <= 20 + 7
    assert [sum(s.stop - s.start for s in piece) for piece in pieces] == [250] * 8


def test_blocks_of_all_streams_do_not_end_at_one_time():
    source = Source([10_000] * 8, 8, 0, 400)
    ends = {len(source.block(stream, 10_000).order) for stream in range(8)}
    assert ends == {50 * (stream + 1) for stream in range(8)}


WEIGHTS = ([1.0], [1, 1], [3, 1.5], [0.001, 5, 2], [7, 1, 1, 1])


@pytest.mark.parametrize("weights, streams", pairwise(WEIGHTS, (1, 3, 64)))
def test_samples_given_by_a_source_are_computed_not_counted(weights, streams):
    sources = [Source([50], streams, n, 8) for n in range(len(weights))]
    order = Order(sources, weights, 3)
    for stream in {0, streams // 2, streams - 1}:
        taken = [0] * len(weights)
        for count in range(200):
            assert order.taken(count, order.streams, stream) == taken
            taken[order.source(count * streams + stream)] += 1
    passed = [0] * len(weights)
    for position in range(500):
        assert order.epoch(position) == min(n // 50 for n in passed)
        passed[order.source(position)] += 1


def naive_source(stages: list, weights: list[float], seed: int, position: int) -> int:
    """By the definition: a point of [0, 1) for each position, and the shares of its stage."""
    current = next((stage[1] for stage in stages if position < stage[0]), weights)
    # 2^64 / golden ratio; the offset is 2^64 times a number that is uniform over seeds
    point = (position * 11400714819323198485 + 2 * hash64(seed, -3)) % 2**64
    total = sum(map(Fraction, current))
    edges = itertools.accumulate(Fraction(weight) / total for weight in current)
    return next(number for number, edge in enumerate(edges) if Fraction(point, 2**64) < edge)


STAGES = (
    [],
    [(100, [1, 0, 0])],
    [(1, [0, 0, 1]), (2, [1, 1, 1]), (3, [1, 0, 1]), (250, [0, 5, 5])],
    [(64, [1, 2, 4]), (64, [9, 1, 1]), (301, [0, 1, 0]), (302, [1, 1, 8])],
)


@pytest.mark.parametrize("stages, streams", pairwise(STAGES, (1, 3, 64)))
def test_samples_given_while_weights_change_are_computed_not_counted(stages, streams):
    """From the start and from the middle, of all positions and of one stream."""
    weights = [2, 1, 5]
    sources = [Source([50], streams, n, 8) for n in range(3)]
    order = Order(sources, weights, 3, [WeightsStage(*stage) for stage in stages])
    naive = [naive_source(stages, weights, 3, position) for position in range(400)]
    assert [order.source(position) for position in range(400)] == naive
    for stride, first in itertools.product((1, streams, 7), (0, streams - 1, 99, 250, 310)):
        taken = [0, 0, 0]
        for n, position in enumerate(range(first, 400, stride)):
            assert order.taken(n, stride, first) == taken
            taken[naive[position]] += 1


def test_shares_hold_in_expectation_at_every_position():
    source = Source([9], 4, 0, 8)
    met = sum(Order([source, source], [1, 3], seed).source(11) for seed in range(4000))
    assert abs(met / 4000 - 0.75) < 0.03


def test_with_replacement_every_sample_is_drawn_equally_often():
    counts = [40, 3, 11]
    source = Source(counts, 4, 1, 8, resampled=True)
    drawn = collections.Counter(place(source, p) for p in range(600 * 54))
    assert set(drawn) == {(shard, n) for shard, count in enumerate(counts) for n in range(count)}
    for shard, count in enumerate(counts):
        assert abs(sum(n for (s, _), n in drawn.items() if s == shard) / (600 * count) - 1) < 0.1
    assert any(len({place(source, 54 * epoch + p) for p in range(54)}) < 54 for epoch in range(3))


def test_hash_is_the_same_everywhere():
    assert hash64(0, 1, 2) == 4529435921577843265  # checkpoints resume by it


# -- through the loader


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
            if i in (OFFSET_EVERY - 1, 2 * OFFSET_EVERY, 100):
                members += [(f"silent{next(silent)}.jpg", jpeg(1))]
        members += [(f"silent{next(silent)}.jpg", jpeg(1))]
        write_shard(folder / f"{shard:03d}.tar", members)
    index(folder)
    return folder


@pytest.fixture(scope="module")
def second(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("second")
    for shard in range(5):
        write_shard(
            folder / f"x{shard}.tar",
            [m for i in range(9 + shard) for m in sample(f"x{shard}n{i}", 900 + i)],
        )
    return folder


def loader_of(
    config: DataConfig, rank: int = 0, world_size: int = 1, global_size: int = 24, step: int = 0
):
    arguments = {"image_size": 8, "context_length": 8, "seed": 5, "step": step}
    return TrainLoader(
        config, global_size=global_size, rank=rank, world_size=world_size, **arguments
    )


def keys_of(
    config: DataConfig, steps: int, world_size: int = 1, global_size: int = 24, step: int = 0
):
    """Per step the keys of all ranks in turn; invalid samples by reason."""
    loaders = [loader_of(config, r, world_size, global_size, step) for r in range(world_size)]
    out, invalid = [], collections.Counter()
    for _ in range(steps):
        batches = [next(loader) for loader in loaders]
        out.append([key for batch in batches for key in batch.keys])
        for batch in batches:
            invalid.update(batch.bad_samples)
    for loader in loaders:
        loader.close()
    return out, invalid


def config_of(train: Path | str, **settings) -> DataConfig:
    defaults = {"workers": 0, "lanes": 8, "shuffle_block": 11, "bad_sample_limit": 1.0}
    return DataConfig(train=str(train), **{**defaults, **settings})


@pytest.mark.parametrize(
    "streams, global_size", [(1, 48), (8, 48), (64, 48), (100, 37), (450, 450)]
)
@pytest.mark.parametrize("verify", ["auto", "off"])
def test_every_epoch_of_the_loader_delivers_each_sample_once(unequal, streams, global_size, verify):
    """With an index and without; the places of the invalid ones are filled by others."""
    good = {key for key in keys_in(unequal) if not key.startswith("silent")}
    E = len(keys_in(unequal))
    assert sum(SIZES) == len(good) == E - 9
    steps = -(-2 * E // global_size)
    keys, invalid = keys_of(
        config_of(f"{unequal}/*.tar", lanes=streams, verify=verify), steps, global_size=global_size
    )
    by_stream: dict[int, list[str]] = {stream: [] for stream in range(streams)}
    position = 0
    for batch in keys:  # stream after stream, position p of stream p mod L
        for p, key in zip(
            sorted(range(position, position + len(batch)), key=lambda p: (p % streams, p)),
            batch,
            strict=True,
        ):
            by_stream[p % streams].append(key)
        position += len(batch)
    stream = [by_stream[p % streams][p // streams] for p in range(2 * E)]
    for epoch in range(2):
        counts = collections.Counter(stream[epoch * E : (epoch + 1) * E])
        assert set(counts) == good and counts.total() == E, f"epoch {epoch}"
    assert stream[:E] != stream[E:]
    assert 18 <= invalid.total() <= 18 + 9 and {place.split("\t")[0] for place in invalid} == {
        "no caption"
    }


@pytest.fixture(scope="module")
def whole(unequal) -> dict[int, list[list[str]]]:
    """streams -> the keys of each step of a run that nothing stops."""
    return {
        streams: keys_of(config_of(f"{unequal}/*.tar", lanes=streams), 40)[0]
        for streams in (1, 7, 64)
    }


@pytest.mark.parametrize(
    "streams, layout, verify", pairwise((1, 7, 64), ((1, 3), (2, 0), (4, 1)), ("auto", "off"))
)
def test_a_run_resumes_at_any_step(unequal, whole, streams, layout, verify):
    """With the offsets of an index and without: the order is the same, since the counts are."""
    stop, (ranks, workers) = random.Random(f"{streams} {layout}").randrange(1, 35), layout
    config = config_of(f"{unequal}/*.tar", lanes=streams, workers=workers, verify=verify)
    assert keys_of(config, 5, ranks, step=stop)[0] == whole[streams][stop : stop + 5]


def mixed(unequal: Path, second: Path, **settings) -> DataConfig:
    train = f"{unequal}/*.tar::{second}/*.tar"
    return config_of(train, **{"train_weights": [3, 1.5], "resampled": True, **settings})


def of_second(key: str) -> bool:
    return key.startswith("x")


@pytest.fixture(scope="module")
def weighted(unequal, second) -> list[list[str]]:
    return keys_of(mixed(unequal, second), 60)[0]


@pytest.fixture(scope="module")
def in_epochs(unequal, second) -> list[list[str]]:
    return keys_of(mixed(unequal, second, resampled=False), 9)[0]


@pytest.mark.parametrize("world_size, workers", LAYOUTS)
def test_weighted_sources_are_the_same_on_every_layout(
    unequal, second, weighted, in_epochs, world_size, workers
):
    assert keys_of(mixed(unequal, second, workers=workers), 30, world_size)[0] == weighted[:30]
    epochs = mixed(unequal, second, workers=workers, resampled=False)
    assert keys_of(epochs, 9, world_size)[0] == in_epochs


@pytest.mark.parametrize("stop, world_size, workers", [(7, 1, 3), (24, 4, 1), (38, 2, 0)])
def test_weighted_sources_resume_on_another_layout(
    unequal, second, weighted, stop, world_size, workers
):
    again, _ = keys_of(mixed(unequal, second, workers=workers), 5, world_size, step=stop)
    assert again == weighted[stop : stop + 5]


def test_shares_hold_in_every_batch_and_stream(weighted):
    counts = [sum(map(of_second, batch)) for batch in weighted]
    assert all(abs(count - 8) <= 2 for count in counts)  # a third of 24
    assert abs(sum(counts) - 480) <= 3
    by_stream = [[key for batch in weighted for key in batch[3 * s : 3 * s + 3]] for s in range(8)]
    assert all(abs(sum(map(of_second, stream)) - 60) <= 4 for stream in by_stream)


# steps 0 to 8 from the first source alone, then half of each, then the second source alone
CHANGING = [
    {"until_step": 9, "train_weights": [1, 0]},
    {"until_step": 20, "train_weights": [1, 1]},
    {"until_step": 26, "train_weights": [0, 2]},
]


@pytest.fixture(scope="module")
def changing(unequal, second) -> list[list[str]]:
    return keys_of(mixed(unequal, second, train_weights_schedule=CHANGING, resampled=False), 40)[0]


def test_weights_change_at_their_steps(changing):
    counts = [sum(map(of_second, batch)) for batch in changing]
    assert counts[:9] == [0] * 9 and counts[20:26] == [24] * 6
    assert all(abs(count - 12) <= 2 for count in counts[9:20])
    assert all(abs(count - 8) <= 2 for count in counts[26:])


def test_epochs_of_a_source_go_on_while_its_weight_changes(unequal, second, changing):
    """What the second source gives, stream by stream, is what it gives with other weights."""
    second_alone = [{"until_step": 30, "train_weights": [0, 1]}]  # blocks are as large as there
    other, _ = keys_of(
        mixed(unequal, second, train_weights_schedule=second_alone, resampled=False), 30
    )
    for stream in range(8):
        own = [k for batch in changing for k in batch[3 * stream : 3 * stream + 3] if of_second(k)]
        expected = [k for batch in other for k in batch[3 * stream : 3 * stream + 3]]
        assert len(own) > 40 and own == expected[: len(own)]


@pytest.mark.parametrize(
    "stop, world_size, workers", [(7, 1, 3), (19, 4, 1), (24, 2, 0), (30, 3, 2)]
)
def test_changing_weights_resume_on_another_layout(
    unequal, second, changing, stop, world_size, workers
):
    config = mixed(
        unequal, second, train_weights_schedule=CHANGING, resampled=False, workers=workers
    )
    assert keys_of(config, 6, world_size, step=stop)[0] == changing[stop : stop + 6]


def test_restarted_data_changes_weights_at_the_same_steps(unequal, second):
    """The order starts at step 15 anew; the pieces are those of the run's steps."""
    config = mixed(unequal, second, train_weights_schedule=CHANGING)
    arguments = {"image_size": 8, "context_length": 8, "seed": 5, "global_size": 24}
    with TrainLoader(config, **arguments, step=17, order_start=15) as loader:
        counts = [sum(map(of_second, next(loader).keys)) for _ in range(12)]
    assert all(abs(count - 12) <= 2 for count in counts[:3]) and counts[3:9] == [24] * 6
    assert all(abs(count - 8) <= 2 for count in counts[9:])


def test_other_weights_over_steps_are_refused_at_a_resume(unequal, second):
    config = mixed(unequal, second, train_weights_schedule=CHANGING)
    with loader_of(config) as loader:
        state = {**loader.state(), "step": 0}
    scaled = [
        {**stage, "train_weights": [5 * w for w in stage["train_weights"]]} for stage in CHANGING
    ]
    with loader_of(mixed(unequal, second, train_weights_schedule=scaled)) as loader:
        loader.load_state_dict(state)
    for other in (None, CHANGING[:2], [*CHANGING[:2], {"until_step": 27, "train_weights": [0, 2]}]):
        with (
            loader_of(mixed(unequal, second, train_weights_schedule=other)) as loader,
            pytest.raises(
                UserError, match=r"data\.train_weights_schedule was \[\[9, \[1\.0, 0\.0\]\], "
            ),
        ):
            loader.load_state_dict(state)


def test_each_source_keeps_its_own_order(unequal, second):
    """The first source of a mixture gives what it gives alone, stream by stream, with epochs of its own."""
    keys, _ = keys_of(mixed(unequal, second, shuffle_block=9, resampled=False), 60)
    alone, _ = keys_of(
        config_of(f"{unequal}/*.tar", shuffle_block=6), 60
    )  # 9 x 3 / 4.5: blocks are shared
    for stream in range(8):
        own = [
            key
            for batch in keys
            for key in batch[3 * stream : 3 * stream + 3]
            if not of_second(key)
        ]
        assert (
            own
            == [key for batch in alone for key in batch[3 * stream : 3 * stream + 3]][: len(own)]
        )


# -- mistakes


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"train_weights": [1]}, r"data.train_weights \(\[1.0\]\) must have one for each of the 2"),
        ({"train_weights": [1, 0]}, r"train_weights \(\[1, 0\]\)"),
        ({"train_weights": "1::2::3"}, r"one for each of the 2 sources"),
        ({"resampled": [True, False]}, r"data.resampled"),
        (
            {"train_weights_schedule": [{"until_step": 9, "train_weights": [1, 2]}]},
            r"data\.train_weights_schedule .* needs data\.train_weights",
        ),
        (
            {"train_weights": [1, 2], "train_weights_schedule": CHANGING[::-1]},
            r"must rise from piece to piece, got \[26, 20, 9\]; sort them",
        ),
        (
            {
                "train_weights": [1, 2],
                "train_weights_schedule": [{"until_step": 9, "train_weights": [1, 2, 3]}],
            },
            r"train_weights \(\[1\.0, 2\.0, 3\.0\]\) until step 9 must have one number for each of the 2",
        ),
        (
            {
                "train_weights": [1, 2],
                "train_weights_schedule": [{"until_step": 9, "train_weights": [0, 0]}],
            },
            r"and one above 0",
        ),
        (
            {
                "train_weights": [1, 2],
                "train_weights_schedule": [{"until_step": 9, "train_weights": [-1, 2]}],
            },
            r"data\.train_weights_schedule\.0\.train_weights",
        ),
        (
            {"train_weights_schedule": [{"until": 9, "train_weights": [1, 2]}]},
            r"train_weights_schedule\.0\.until \(9\): no such key; known keys are until_step, train_weights",
        ),
    ],
)
def test_mistakes_are_explained(settings, message):
    with pytest.raises(UserError, match=message):
        check_config({"run": {"steps": 1}, "data": {"train": "a.tar::b.tar", **settings}}, "recipe")


def test_weights_as_openclip_writes_them():
    assert DataConfig(train="a.tar::b.tar", train_weights="1::2.5").train_weights == [1.0, 2.5]


# -- how many streams


@pytest.mark.parametrize(
    "global_size, streams, block",
    [
        (256, 64, 512),
        (2048, 64, 512),
        (8192, 256, 128),
        (32_768, 1024, 32),
        (65_536, 1024, 32),
        (40_000, 1000, 32),
    ],
)
def test_streams_grow_with_the_global_batch_and_blocks_shrink(global_size, streams, block):
    sizes = BatchSizes((global_size,))
    assert resolve_streams("auto", sizes) == streams
    for given, expected in (("auto", block), (7, 7)):
        keys = order_keys(DataConfig(train="x", shuffle_block=given), sizes, 0)
        assert keys["data.shuffle_block"] == expected


@pytest.mark.parametrize(
    "global_size, expected", [(96, 48), (100, 50), (7, 7), (97, 24), (134, 33), (1009, 64)]
)
def test_auto_streams(global_size, expected):
    assert resolve_streams("auto", BatchSizes((global_size,))) == expected


def test_auto_streams_divide_all_sizes_of_a_schedule_if_possible():
    def streams(*stages, last):
        return resolve_streams("auto", BatchConfig(global_size=last, schedule=stages).sizes)

    assert streams({"until_step": 9, "global_size": 96}, last=128) == 32
    rising = [{"until_step": 1 + i, "global_size": 96 + 48 * i} for i in range(8)]
    assert streams(*rising, last=480) == 48
    assert (
        streams({"until_step": 9, "global_size": 96}, last=127) == 24
    )  # a quarter of the smallest
    assert streams({"until_step": 9, "global_size": 2}, last=4096) == 2


def test_any_number_of_streams_goes():
    assert resolve_streams(7, BatchSizes((96,))) == 7
    assert resolve_streams(200, BatchSizes((96,))) == 200


def open_shards() -> int:
    return sum(
        os.path.realpath(f"/proc/self/fd/{fd}").endswith(".tar")
        for fd in os.listdir("/proc/self/fd")
    )


def test_many_streams_are_closed_between_blocks(unequal):
    """One process reads all 80 streams, whose shards it does not keep open; or two read 40 each, and do."""
    config = config_of(
        f"{unequal}/*.tar", lanes=80, verify="off"
    )  # a verified shard is opened for each block anyway
    gc.collect()  # what earlier loaders held open
    assert open_shards() == 0
    alone = loader_of(config, global_size=80)
    whole = [next(alone).keys for _ in range(20)]
    assert open_shards() == 0
    two = [loader_of(config, rank, 2, global_size=80) for rank in range(2)]
    assert [[key for loader in two for key in next(loader).keys] for _ in range(20)] == whole
    assert open_shards() > 0
