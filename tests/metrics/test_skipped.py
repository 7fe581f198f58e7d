"""What fails on one rank alone leaves a trace too."""

from __future__ import annotations

import pytest

from clip_train import dist
from clip_train.metrics.skipped import Skipped
from tests.ranks import run_ranks


def _fail(rank: int) -> None:
    if dist.rank() >= rank:
        raise ValueError(f"on the ranks from {rank}")


def _skip() -> tuple[list[str], list[str]]:
    """The warnings and, after `gather`, the list of this rank."""
    warnings: list[str] = []
    skipped = Skipped(warnings.append, 3)
    for rank in (0, 1):
        skipped.attempt(f"callback {rank}", lambda rank=rank: _fail(rank), remedy="")
    skipped.attempt("the evaluation", lambda: dist.agreed(_fail, 1), remedy="", together=True)
    skipped.gather()
    return [line.partition(" failed")[0] for line in warnings], skipped.lines()


@pytest.mark.distributed
def test_each_rank_warns_and_rank_0_lists_what_others_skipped():
    (warned, listed), (warned_on_1, _) = run_ranks(_skip, 2)
    assert warned == ["callback 0", "the evaluation"]
    assert warned_on_1 == ["callback 0", "callback 1"]
    assert listed == [
        "callback 0 after step 3: ValueError: on the ranks from 0",
        "the evaluation after step 3: rank 1 failed: ValueError: on the ranks from 1",
        "rank 1: callback 1 after step 3: ValueError: on the ranks from 1",
    ]
