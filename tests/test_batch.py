"""The batch arithmetic."""

from __future__ import annotations

import random

import pytest
import torch
from pydantic import ValidationError

from clip_train.batch import BatchConfig, BatchSizes, plan_batch
from clip_train.errors import UserError
from tests.toy import share, toy_batch


@pytest.mark.parametrize(
    "N, W, micro, kept, expected",
    [
        (64, 1, 64, 1, (64, 1, 64, 1, 1.0)),
        (64, 1, 24, 1, (64, 3, 24, 1, 2 - 16 / 64)),
        (64, 2, 256, 5, (32, 1, 32, 1, 1.0)),
        (64, 2, 8, "all", (32, 4, 8, 4, 1.0)),
        (64, 4, 4, 2, (16, 4, 4, 2, 1.5)),
    ],
)
def test_plans(N, W, micro, kept, expected):
    plan = plan_batch(BatchConfig(global_size=N, micro_size=micro, kept_graphs=kept), W)
    told = (
        plan.per_rank,
        plan.accum_steps,
        plan.micro_size,
        plan.kept_graphs,
        plan.forwards_per_sample,
    )
    assert told == expected


@pytest.mark.parametrize(
    "N, W, micro, kept, expected",
    [
        (100, 8, 4, 1, (13, 4, 4, 1)),
        (33, 2, 16, 1, (17, 2, 16, 1)),  # 16 + 1 and 15 + 1
        (5, 2, 1, "all", (3, 2, 1, 2)),  # 1 + 2 and 1 + 1: no rank has an empty one
        (3, 2, 64, 9, (2, 1, 2, 1)),
    ],
)
def test_plans_of_what_ranks_do_not_divide(N, W, micro, kept, expected):
    plan = plan_batch(BatchConfig(global_size=N, micro_size=micro, kept_graphs=kept), W)
    assert (plan.per_rank, plan.accum_steps, plan.micro_size, plan.kept_graphs) == expected


@pytest.mark.parametrize("micro_size", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_rank_has_equally_many_chunks_and_none_is_empty(micro_size, world_size):
    for N in range(world_size, 40):
        batches = [share(toy_batch(N), rank, world_size) for rank in range(world_size)]
        cuts = [[len(m.images) for m in batch.micro_batches(micro_size)] for batch in batches]
        plan = plan_batch(BatchConfig(global_size=N, micro_size=micro_size), world_size)
        assert {len(sizes) for sizes in cuts} == {plan.accum_steps}
        assert all(sum(sizes) == len(batch) for sizes, batch in zip(cuts, batches, strict=True))
        assert all(1 <= size <= max(micro_size, 2) for sizes in cuts for size in sizes)
        if N % world_size == 0:  # whole micro-batches, then what is left
            assert (
                cuts[0][:-1] == [plan.micro_size] * (plan.accum_steps - 1)
                and cuts[0][-1] <= plan.micro_size
            )
        joined = torch.cat(
            [m.sample_seeds for batch in batches for m in batch.micro_batches(micro_size)]
        )
        assert joined.tolist() == list(range(N))


def test_ranks_need_a_sample_each():
    with pytest.raises(
        UserError, match=r"batch.global_size \(3\).*ranks \(8\).*raise it to 8, or run on 3 ranks"
    ):
        plan_batch(BatchConfig(global_size=3), 8)
    schedule = [{"until_step": 5, "global_size": 6}]
    with pytest.raises(UserError, match=r"batch.schedule: a size \(6\) .*\(7\)"):
        plan_batch(BatchConfig(global_size=32, schedule=schedule), 7)


def random_schedule(draw: random.Random) -> BatchConfig:
    stages = [
        {"until_step": end, "global_size": draw.randint(1, 40)}
        for end in sorted(draw.sample(range(1, 60), draw.randint(0, 4)))
    ]
    return BatchConfig(global_size=draw.randint(1, 50), schedule=stages)


def sizes_by_definition(config: BatchConfig, steps: int) -> list[int]:
    out: list[int] = []
    for stage in config.schedule:
        out += [stage.global_size] * (stage.until_step - len(out))
    return (out + [config.global_size] * steps)[:steps]


@pytest.mark.parametrize("seed", range(40))
def test_sizes_and_their_sums(seed):
    config = random_schedule(random.Random(seed))
    sizes, expected = config.sizes, sizes_by_definition(config, 80)
    assert [sizes.at(step) for step in range(80)] == expected
    assert [sizes.before(step) for step in range(81)] == [
        sum(expected[:step]) for step in range(81)
    ]
    for step in range(1, 80):
        assert sizes.steps_for(sum(expected[:step])) == step
    assert set(sizes.sizes) == set(expected)


def test_sums_are_in_closed_form():
    sizes = BatchConfig(global_size=7, schedule=[{"until_step": 10**12, "global_size": 3}]).sizes
    assert sizes.before(10**12 + 5) == 3 * 10**12 + 35
    assert sizes.steps_for(sizes.before(123_456_789)) == 123_456_789


def test_steps_from_samples():
    assert BatchSizes((64,)).steps_for(10) == 1
    assert [BatchSizes((64,)).steps_for(samples) for samples in (640, 671, 673)] == [
        10,
        10,
        11,
    ]
    sizes = BatchConfig(global_size=100, schedule=[{"until_step": 10, "global_size": 10}]).sizes
    assert [sizes.steps_for(samples) for samples in (96, 100, 340, 360)] == [10, 10, 12, 13]


def test_a_plan_of_a_smaller_batch():
    schedule = [{"until_step": 5, "global_size": 6}]
    plan = plan_batch(
        BatchConfig(global_size=64, micro_size=8, kept_graphs="all", schedule=schedule), 2
    )
    assert (plan.global_size, plan.accum_steps, plan.micro_size, plan.kept_graphs) == (64, 4, 8, 4)
    small = plan.at(6)
    assert (small.global_size, small.accum_steps, small.micro_size, small.kept_graphs) == (
        6,
        1,
        3,
        1,
    )


@pytest.mark.parametrize(
    "schedule, said",
    [
        (
            [{"until_step": 9, "global_size": 4}, {"until_step": 9, "global_size": 8}],
            r"until_step must rise.*\[9, 9\]",
        ),
        ([{"until_step": 0, "global_size": 4}], "greater than 0"),
        ([{"until_step": 9, "global_size": 4, "until": 3}], "Extra inputs"),
    ],
)
def test_schedules_that_mean_nothing(schedule, said):
    with pytest.raises(ValidationError, match=said):
        BatchConfig(schedule=schedule)
