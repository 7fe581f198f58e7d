"""Heartbeats: a silent rank is named once, the first failure decides for all, and who leaves in
order disturbs nobody.

The ranks are threads over one store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from clip_train.processes import node_name
from launcher.runtime.environment import RankEnv
from launcher.runtime.heartbeat import SILENT_BEATS, Heartbeat
from launcher.runtime.verdict import Failure
from tests.launcher.conftest import until

BEAT = 0.05  # seconds
A_WHILE = 3 * SILENT_BEATS * BEAT


class Client:
    """One rank's client of the store that all share; once it is `broken` it fails, or never answers
    again."""

    def __init__(self, store: HashStore) -> None:
        self.store, self.broken, self.error = store, threading.Event(), False

    def __getattr__(self, name: str) -> object:
        if self.broken.is_set():
            if self.error:
                raise RuntimeError("Connection reset by peer")
            threading.Event().wait(1000)
        return getattr(self.store, name)


class Ranks:
    """As many heartbeats over one store; `published` is what their ranks have printed."""

    def __init__(self, count: int) -> None:
        store = HashStore()
        self.published: list[tuple[int, Failure]] = []
        self.ranks: list[Heartbeat] = []
        self.clients = [Client(store) for _ in range(count)]
        for rank, client in enumerate(self.clients):
            where = RankEnv(rank, count, rank, count, "127.0.0.1", 0, "this test")
            publish = lambda failure, trace, rank=rank: self.published.append((rank, failure))  # noqa: E731
            self.ranks.append(Heartbeat(where, publish, beat_seconds=BEAT, silent_seconds=1.0))
            self.ranks[-1].open(client, server=store if rank == 0 else None)  # type: ignore[arg-type]
        for beat in self.ranks:
            beat.all_joined = True

    def die(self, rank: int) -> None:
        """Without a trace."""
        self.clients[rank].broken.set()

    def lose_store(self, *, error: bool) -> None:
        for client in self.clients:
            client.error = error
            client.broken.set()

    def all_know(self, left: list[int]) -> bool:
        return until(lambda: all(self.ranks[rank].abort is not None for rank in left))


@pytest.fixture
def start() -> Iterator:
    worlds: list[Ranks] = []

    def make(count: int) -> Ranks:
        worlds.append(Ranks(count))
        return worlds[-1]

    yield make
    for world in worlds:
        world.lose_store(error=True)


@pytest.mark.parametrize("doomed", [0, 1, 2])
def test_a_death_is_known_to_all_and_published_by_one(start, doomed):
    """Of rank 0 too, whose store answers here all the same."""
    world = start(3)
    time.sleep(3 * BEAT)
    world.die(doomed)
    left = [rank for rank in range(3) if rank != doomed]
    assert world.all_know(left) and until(lambda: world.published)
    ((_, failure),) = world.published
    assert (failure.rank, failure.node, failure.lost, failure.status) == (
        doomed,
        node_name(),
        True,
        1,
    )
    assert f"rank {doomed} on {node_name()} has died or is frozen" in failure.message
    assert all(world.ranks[rank].abort == failure for rank in left)


def test_a_rank_that_beats_is_not_lost(start):
    world = start(3)
    time.sleep(A_WHILE)
    assert [rank.abort for rank in world.ranks] == [None] * 3


@pytest.mark.parametrize("finder", [0, 1])
def test_what_one_rank_is_asked_all_know(start, finder):
    world = start(3)
    for request in ("where are you?", "and now?"):
        world.ranks[finder].pass_on(request)
        assert until(lambda request=request: {each.request for each in world.ranks} == {request})


def test_the_first_failure_decides_for_all(start):
    world = start(3)
    first = Failure(1, "n1", "no memory", "FAILED", 1)
    assert world.ranks[1].claim(first, "a traceback") == first
    assert world.ranks[2].claim(Failure(2, "n2", "lost contact", status=2)) == first
    assert world.ranks[0].wait(30) == first
    assert world.published == [(1, first)]


def test_two_ranks_that_notice_the_same_death_publish_it_once(start):
    world = start(3)
    death = Failure(0, "n", "rank 0 on n has died", lost=True)
    for rank in (1, 2):
        assert world.ranks[rank].claim(death) == death
    assert world.published == [(1, death)]


def test_two_threads_of_a_rank_publish_one_failure(start):
    world = start(2)
    failures = [Failure(0, "n", f"from thread {number}") for number in range(8)]
    threads = [
        threading.Thread(target=world.ranks[0].claim, args=(failure,)) for failure in failures
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(world.published) == 1


def test_who_leaves_in_order_is_not_lost(start):
    world = start(3)
    world.ranks[2].leave()
    world.ranks[2].leave()  # again does nothing
    time.sleep(A_WHILE)
    assert world.ranks[0].abort is None and world.ranks[1].abort is None


def test_who_holds_the_store_leaves_last(start):
    world = start(2)
    last = threading.Thread(target=world.ranks[0].leave)
    last.start()
    last.join(0.5)
    assert last.is_alive()
    world.ranks[1].leave()
    last.join(30)
    assert not last.is_alive()


@pytest.mark.parametrize("error", [True, False])
def test_a_store_that_is_gone_is_the_loss_of_rank_0(start, error):
    """It has failed, or its machine is off and nothing answers: then the watchdog's look finds out."""
    world = start(3)
    world.die(0)
    world.lose_store(error=error)
    assert until(lambda: all(world.ranks[rank].check() is not None for rank in (1, 2)))
    assert [(rank, failure.rank) for rank, failure in world.published] == [(1, 0)]
    leaving = [threading.Thread(target=world.ranks[rank].leave, daemon=True) for rank in (1, 2)]
    for thread in leaving:
        thread.start()
    assert until(lambda: not any(thread.is_alive() for thread in leaving), 10.0)


def test_alone_there_is_nobody_to_ask():
    published = []
    alone = Heartbeat(
        RankEnv(0, 1, 0, 1, "127.0.0.1", 0, "this test"), lambda *failure: published.append(failure)
    )
    failure = Failure(0, "n", "m")
    assert (
        alone.claim(failure, "trace") == failure
        and alone.claim(Failure(0, "n", "later")) == failure
    )
    alone.leave()
    assert published == [(failure, "trace")]
