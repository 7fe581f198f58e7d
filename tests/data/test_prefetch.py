"""The next batch is on its way while this one is computed; the order, an error and an end are the source's."""

from __future__ import annotations

import threading

import pytest
import torch

from clip_train.batch import BatchSizes
from clip_train.data.config import DataConfig
from clip_train.data.loader import Prefetcher, TrainLoader
from clip_train.data.worker import shared_bytes, shared_images
from clip_train.errors import DataError, RankError
from clip_train.task import Batch
from tests.data.shards import write_dataset
from tests.toy import columns_of

CPU = torch.device("cpu")
PATIENCE = 60.0  # seconds


class Source:
    """Batches 0, 1, 2, ...; `fails_at` raises."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.given, self.closed = fails_at, 0, False
        self.asked = threading.Condition()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.working = False

    def __next__(self) -> Batch:
        with self.asked:
            number, self.given = self.given, self.given + 1
            self.asked.notify_all()
        self.working = True
        assert self.may_go_on.wait(PATIENCE)
        self.working = False
        if number == self.fails_at:
            raise DataError("a shard is gone")
        return Batch(
            columns_of(
                torch.full((2, 3, 4, 4), number, dtype=torch.uint8),
                torch.zeros(2, 5),
                torch.arange(2),
            )
        )

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None:
        assert not self.working
        self.closed = True

    def wait_for(self, number: int) -> bool:
        """Until batch `number` has been asked for."""
        with self.asked:
            return self.asked.wait_for(lambda: self.given > number, PATIENCE)


def number(batch: Batch) -> int:
    return int(batch.images[0, 0, 0, 0])


def test_exactly_one_batch_is_taken_ahead():
    source = Source()
    with_prefetch = Prefetcher(source, CPU)
    for step in range(20):
        assert number(next(with_prefetch)) == step
        assert source.wait_for(step + 1)  # nobody has asked for it yet
        assert source.given == step + 2
    with_prefetch.close()
    assert source.closed
    with pytest.raises(StopIteration):
        next(with_prefetch)


def test_an_error_comes_in_its_turn_and_closes_the_source():
    source = Source(fails_at=3)
    batches = Prefetcher(source, CPU)
    assert [number(next(batches)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="a shard is gone"):
        next(batches)
    assert source.closed


def test_closing_ends_the_thread():
    source = Source()
    batches = Prefetcher(source, CPU)
    next(batches)
    assert source.wait_for(1)  # one is ready
    batches.close()
    assert not any(
        thread.name == "prefetch" and thread.is_alive() for thread in threading.enumerate()
    )


def test_the_source_is_not_closed_under_the_thread():
    source = Source()
    batches = Prefetcher(source, CPU)
    next(batches)
    assert source.wait_for(1)
    source.may_go_on.clear()
    next(batches)
    assert source.wait_for(2)  # within the source, which is held up
    threading.Timer(0.2, source.may_go_on.set).start()
    batches.close()
    assert source.closed


@pytest.mark.parametrize("workers", [0, 1])
def test_the_training_loader_behind_it(tmp_path, workers):
    """Started, asked twice, closed, and closed again."""
    write_dataset(tmp_path, [21, 9])
    config = DataConfig(train=str(tmp_path / "*.tar"), workers=workers, lanes=2)
    loader = TrainLoader(config, image_size=16, context_length=16, global_size=8, seed=1)
    batches = Prefetcher(loader, CPU)
    assert len(next(batches)) == 8 and len(next(batches)) == 8
    batches.close()
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)


def test_shared_memory_without_room_is_an_error_in_words():
    with pytest.raises(RankError, match=r"data.workers \(2\).* enlarge /dev/shm"):
        shared_images((2, 2, 1 << 40, 1 << 10))


@pytest.mark.parametrize(
    ("workers", "prefetch", "bytes_of_rank"),
    [
        (0, 2, 0),
        (1, 2, 1 * 3 * 4 * 768),  # workers, slots, samples, bytes of an image
        (4, 5, 4 * 3 * 4 * 768),  # they share the rank's stream and its prefetched batches
    ],
)
def test_shared_memory_of_two_ranks_in_numbers_by_hand(workers, prefetch, bytes_of_rank):
    config = DataConfig(train="x.tar", workers=workers, prefetch=prefetch, lanes=2)
    assert shared_bytes(config, BatchSizes((8,)), (3, 16, 16), 2) == 2 * bytes_of_rank
