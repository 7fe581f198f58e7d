"""A rank that the others wait for is named, with the cause, by the real command; equal ranks are not.

The rule itself gets numbers of many windows: `benchmarks/view.py` has 8 real ranks on two cores.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import pytest

from launcher.runtime.environment import RankEnv
from launcher.runtime.heartbeat import Beat, Heartbeat
from launcher.runtime.slow_rank import SlowRank
from tests.launcher.conftest import ENDLESS, finish, kill, metrics, start, wait_for

Means = Callable[[int, int], tuple[float, float]]  # window, rank -> data wait, encoding: seconds
STEP = 20.0  # seconds of every rank: a window is one step


def words(means: Means, windows: int, ranks: int = 8) -> Iterator[str | None]:
    """What rank 0's record has after each window of one step."""
    board = Heartbeat(RankEnv(0, ranks, 0, ranks, "127.0.0.1", 0, "this test"))
    callback = SlowRank(board)
    for window in range(windows):
        board.beats = {}
        for rank in range(ranks):
            wait, encode = means(window, rank)
            seconds = {"step_seconds": STEP, "data_wait_seconds": wait, "compute_seconds": encode}
            board.beats[rank] = Beat(f"{window} n{rank // 4} {json.dumps(seconds)}".encode())
        record = {"step": window + 1, **seconds}
        callback.after_step(record, [], {})
        yield record.get("slow_rank")


@pytest.mark.parametrize(
    ("wait", "encode", "cause"), [(4.0, 0.0, "waits for data"), (0.0, 4.0, "computes")]
)
def test_a_slow_rank_is_named_in_its_fifth_slow_window(wait, encode, cause):
    def means(window: int, rank: int) -> tuple[float, float]:
        slow = rank == 5 and 2 <= window < 10
        return 0.2 + wait * slow, 6.0 + encode * slow

    said = list(words(means, 20))
    named = [window for window, line in enumerate(said) if line is not None]
    assert named == list(range(6, 14))
    assert said[6].startswith(f"rank 5 on n1 {cause}")


def test_a_rank_that_waits_for_each_block_of_samples_is_named():
    """Its store is slow, and it waits in every other window."""
    said = list(words(lambda window, rank: (9.0 * (rank == 5 and window % 2 == 0), 6.0), 20))
    assert said[7] is None and str(said[8]).startswith("rank 5 on n1 waits for data")


def test_a_node_whose_ranks_are_all_slow_is_named_once():
    """Which of them is the slowest differs from window to window."""
    dice = random.Random(1)

    def means(window: int, rank: int) -> tuple[float, float]:
        return 0.0, 6.0 + (rank >= 8) * dice.uniform(6.0, 12.0)

    said = [line for line in words(means, 30, ranks=12) if line]
    assert (
        len(set(said)) == 1 and " on n" in said[0] and said[0].endswith("; 3 more ranks are slow")
    )


def test_a_rank_with_two_causes_is_one_rank():
    said = [
        line
        for line in words(lambda _, rank: (4.0 * (rank == 5), 6.0 + 5.0 * (rank == 5)), 10)
        if line
    ]
    assert said and said[0].startswith("rank 5 on n1 computes") and "more ranks" not in said[0]


def test_even_ranks_with_hiccups_are_not_named():
    """Every rank encodes twice as long in one of twenty windows."""
    dice = random.Random(2)

    def means(window: int, rank: int) -> tuple[float, float]:
        return 0.4 * dice.random(), 5.0 * (1 + (dice.random() < 0.05)) * dice.uniform(0.9, 1.1)

    assert not any(words(means, 500))


def test_the_command_names_the_rank_that_encodes_slowly(recipe):
    process = start(recipe, *ENDLESS, ranks=3, fault="drag:1")
    run_dir = recipe.parent / "run"

    def said() -> list[
        str
    ]:  # windows of half a second: a busy machine may give another cause first
        lines = [record.get("slow_rank", "") for record in metrics(run_dir)]
        return [line for line in lines if line.startswith("rank 1 on ") and " computes " in line]

    try:
        wait_for(said, "rank 1 was not named", process)
    finally:
        kill(process)
    first = said()[0]
    _, out = finish(process)
    assert out.count(first) == 1


def test_a_rank_tells_each_window_alone():
    board = Heartbeat(RankEnv(1, 2, 1, 2, "127.0.0.1", 0, "this test"))
    callback = SlowRank(board)
    for wait in (1.0, 2.0):
        seconds = {"step_seconds": STEP, "data_wait_seconds": wait, "compute_seconds": 3.0}
        callback.after_step({"step": 1, "loss": 5.0, **seconds}, [], {})
        assert json.loads(board.line) == seconds
