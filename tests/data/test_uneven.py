"""Global batches of varying size that neither ranks nor lanes divide: the same samples on every layout."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path

import pytest
import torch

from clip_train.batch import BatchConfig, BatchSizes
from clip_train.data.config import DataConfig, resolve_streams
from clip_train.data.loader import TrainLoader
from clip_train.data.order import Partition, hash64
from clip_train.errors import UserError
from tests.covering import pairwise
from tests.data.test_loader import config_of, folder, loader_of  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning"
)  # more than cores

SCHEDULE = [
    {"until_step": 3, "global_size": 7},
    *({"until_step": 4 + i, "global_size": 10 + 3 * i} for i in range(6)),
    {"until_step": 11, "global_size": 5},
]
SIZES = BatchConfig(global_size=23, schedule=SCHEDULE).sizes
G = [7, 7, 7, 10, 13, 16, 19, 22, 25, 5, 5, *[23] * 9]
LANES = (5, 12, 31)


def steps_of(
    config: DataConfig,
    steps: int,
    world_size: int = 1,
    sizes: BatchSizes | int = SIZES,
    step: int = 0,
):
    """Per step: what all ranks hold in turn, and how much each holds."""
    loaders: list[TrainLoader] = [
        loader_of(config, rank=r, world_size=world_size, global_size=sizes, step=step)
        for r in range(world_size)
    ]
    out, bads = [], collections.Counter()
    for _ in range(steps):
        batches = [next(loader) for loader in loaders]
        assert {batch.shares for batch in batches} == {tuple(map(len, batches))}
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
        for batch in batches:
            bads.update(batch.bad_samples)
        out.append(
            {
                "keys": [key for batch in batches for key in batch.keys],
                "seeds": [seed for batch in batches for seed in batch.sample_seeds.tolist()],
                "images": b"".join(batch.images.numpy().tobytes() for batch in batches),
                "texts": torch.cat([batch.texts for batch in batches]).tolist(),
            }
        )
    for loader in loaders:
        loader.close()
    return out, bads


def seeds_by_definition(lanes: int, sizes: list[int], seed: int = 5) -> list[list[int]]:
    """Position p is the (p // L)-th sample of lane p mod L; a batch is G positions, lane after lane."""
    out, start = [], 0
    for size in sizes:
        positions = sorted(range(start, start + size), key=lambda p: (p % lanes, p))
        out.append([hash64(seed, p % lanes, p // lanes) for p in positions])
        start += size
    return out


@pytest.fixture(scope="module")
def reference(folder):  # noqa: F811
    """lanes -> the steps of one rank without workers."""
    return {lanes: steps_of(config_of(folder, lanes=lanes), len(G)) for lanes in LANES}


@pytest.mark.parametrize("lanes", LANES)
def test_the_order_is_what_its_definition_says(reference, lanes):
    assert [step["seeds"] for step in reference[lanes][0]] == seeds_by_definition(lanes, G)


@pytest.mark.parametrize("lanes, world_size, workers", pairwise(LANES, (2, 3, 5), (0, 1, 2)))
def test_ranks_and_workers_change_nothing(folder: Path, reference, lanes, world_size, workers):  # noqa: F811
    assert (
        steps_of(config_of(folder, lanes=lanes, workers=workers), len(G), world_size)
        == reference[lanes]
    )


@pytest.mark.parametrize(
    "lanes, stop, first, second", pairwise(LANES, (1, 6, 13), (1, 2, 4), ((1, 3), (3, 1), (5, 0)))
)
def test_resume_anywhere_on_another_layout(folder: Path, reference, lanes, stop, first, second):  # noqa: F811
    """In a stage of its own: of several steps, of one, after the last."""
    (ranks, workers), whole = second, reference[lanes][0]
    begun, _ = steps_of(config_of(folder, lanes=lanes), stop, first)
    assert begun == whole[:stop]
    resumed, _ = steps_of(
        config_of(folder, lanes=lanes, workers=workers), len(G) - stop, ranks, step=stop
    )
    assert resumed == whole[stop:]


def test_restarted_data_continues_the_batch_size_schedule(folder: Path):  # noqa: F811
    """In another order, by seeds that no sample has had."""
    config = config_of(folder, lanes=5)
    with loader_of(config, global_size=SIZES) as loader:
        before = [next(loader) for _ in range(6)]
    ranks = [
        loader_of(config, rank=r, world_size=2, global_size=SIZES, step=6, order_start=6)
        for r in range(2)
    ]
    after = [[next(loader) for loader in ranks] for _ in range(6)]
    assert [sum(map(len, batches)) for batches in after] == G[6:12]
    seeds = [s for batch in before for s in batch.sample_seeds.tolist()]
    again = [s for batches in after for batch in batches for s in batch.sample_seeds.tolist()]
    assert len({*seeds, *again}) == sum(G[:12])
    with loader_of(config, global_size=SIZES, step=8, order_start=6) as loader:
        assert next(loader).keys == [key for batch in after[2] for key in batch.keys]
    assert loader.epoch(6) == 0 and loader.epoch(9) == (G[6] + G[7] + G[8]) // 56


def test_more_ranks_than_samples_are_refused(folder: Path):  # noqa: F811
    with pytest.raises(UserError, match=r"batch\.schedule: a size \(5\).*ranks \(6\).*5 ranks"):
        loader_of(config_of(folder), global_size=SIZES, world_size=6)
    with pytest.raises(UserError, match=r"batch\.global_size \(1\).*ranks \(2\).*1 rank$"):
        loader_of(config_of(folder), global_size=1, world_size=2)


@pytest.mark.parametrize("lanes, world_size", [(64, 8), (7, 3), (30, 4), (1, 5), (64, 5), (50, 50)])
def test_every_sample_of_a_batch_is_decoded_on_one_rank(lanes, world_size):
    stages = [{"until_step": 1 + i, "global_size": 60 + 580 * i // 40} for i in range(40)]
    sizes = BatchConfig(global_size=640, schedule=stages).sizes
    shares = [Partition(sizes, lanes, rank, world_size) for rank in range(world_size)]
    met = [set() for _ in range(world_size)]
    for step, parts in zip(
        range(90), zip(*(share.steps(0) for share in shares), strict=True), strict=False
    ):
        taken = collections.Counter()
        for rank, own in enumerate(parts):
            assert sum(map(len, own.values())) in (
                sizes.at(step) // world_size,
                -(-sizes.at(step) // world_size),
            )
            for stream, numbers in own.items():
                assert len(numbers)
                taken.update((stream, number) for number in numbers)
                met[rank] |= {stream} if step > 40 else set()
        assert set(taken.values()) == {1} and len(taken) == sizes.at(step)
    if lanes == 64 and world_size == 8:
        assert met[3] == set(range(24, 32))  # of the steps behind the schedule


@pytest.mark.parametrize(
    "num, expected", [(1, [160]), (3, [50, 60, 50]), (4, [40] * 4), (40, [20] * 40)]
)
def test_workers_share_the_work(num, expected):
    workers = Partition(BatchSizes((640,)), 64, 1, 4).workers(num)
    for step in (50, 51):
        shares = [next(worker.steps(step)) for worker in workers]
        assert [sum(map(len, share.values())) for share in shares] == expected
    assert all(worker.most() == size for worker, size in zip(workers, expected, strict=True))


def pieces_in_turn(workers: list[Partition], start: int):
    """For each step, (worker, its part) of those whose turn it is."""
    begun = [(worker, worker.steps(start)) for worker in workers]
    while True:
        for turn in range(workers[0].turns):
            its = [(worker, next(steps)) for worker, steps in begun if worker.turn == turn]
            assert len(its) == len(workers) // workers[0].turns
            yield its


@pytest.mark.parametrize("sizes", [SIZES, BatchSizes((23,)), BatchSizes((2,))])
@pytest.mark.parametrize("lanes, world_size, num", pairwise((1, 5, 12, 31), (1, 2), (1, 3, 8)))
def test_pieces_of_workers_in_turn_are_the_rank_s_share(sizes, lanes, world_size, num):
    for rank in range(world_size):
        whole = Partition(sizes, lanes, rank, world_size)
        workers = whole.workers(num)
        assert len(workers) == num
        for expected, pieces in itertools.islice(
            zip(whole.steps(3), pieces_in_turn(workers, 3), strict=True), 30
        ):
            assert [share for _, piece in pieces for share in piece.items()] == list(
                expected.items()
            )
            assert all(sum(map(len, piece.values())) <= w.most() for w, piece in pieces)


@pytest.mark.parametrize("size, world_size", [(8192, 64), (32_768, 512), (98_304, 1024)])
def test_a_rank_of_a_large_job_has_the_workers_it_asks_for(size, world_size):
    sizes = BatchSizes((size,))
    rank = Partition(sizes, resolve_streams("auto", sizes), world_size - 3, world_size)
    workers = rank.workers(16)
    assert len(workers) == 16 and len({worker.most() for worker in workers}) == 1
    for expected, pieces in itertools.islice(
        zip(rank.steps(5), pieces_in_turn(workers, 5), strict=True), 40
    ):
        assert [share for _, piece in pieces for share in piece.items()] == list(expected.items())
        assert all(piece for _, piece in pieces)  # nobody is idle
