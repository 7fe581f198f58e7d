"""Agreeing on errors: the lowest failing rank raises its own, the others a RemoteRankError, and nobody waits."""

from __future__ import annotations

import pytest

from clip_train import dist
from clip_train.errors import RemoteRankError, UserError
from tests.ranks import RankFailedError, run_ranks


def outcome(action):
    try:
        return action()
    except (UserError, RemoteRankError) as e:
        return type(e).__name__, str(e)


def agree(failing: set[int]):
    def action():
        if dist.rank() in failing:
            raise UserError(f"no {dist.rank()}")
        return dist.rank()

    return outcome(lambda: dist.agreed(action)), outcome(lambda: dist.on_main(action))


@pytest.mark.distributed
def test_an_error_is_told_by_one_rank():
    (a0, m0), (a1, m1), (a2, m2) = run_ranks(agree, 3, {1, 2})
    assert a1 == ("UserError", "no 1")
    assert a0[0] == a2[0] == "RemoteRankError" and "rank 1 failed: UserError: no 1" in a0[1]
    assert m0 == m1 == m2 == 0
    (_, m0), (_, m1), _ = run_ranks(agree, 3, {0})
    assert m0 == ("UserError", "no 0") and m1[0] == "RemoteRankError"


def test_alone():
    assert dist.agreed(lambda: 5) == dist.on_main(lambda: 5) == 5
    with pytest.raises(UserError, match="no"):
        dist.agreed(lambda: (_ for _ in ()).throw(UserError("no")))
    assert (dist.rank(), dist.world_size(), dist.gather_objects(3)) == (0, 1, [3])


def numbers():
    return (
        dist.sum_scalars(1.5, dist.rank()),
        dist.max_scalars(dist.rank()),
        dist.any_rank(dist.rank() == 1),
    )


@pytest.mark.distributed
def test_numbers():
    assert run_ranks(numbers, 2) == [([3.0, 1.0], [1.0], True)] * 2


def fail_on_one():
    if dist.rank() == 1:
        raise ValueError("only here")


@pytest.mark.distributed
def test_the_harness_tells_which_rank_failed():
    with pytest.raises(RankFailedError) as e:
        run_ranks(fail_on_one, 2)
    assert e.value.errors[1] == ("ValueError", "only here")
