"""The batch arithmetic."""

from __future__ import annotations

import pytest

from clip_train.batch import BatchConfig, plan_batch
from clip_train.errors import UserError


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
    told = (plan.per_rank, plan.accum_steps, plan.micro_size, plan.kept_graphs, plan.forwards_per_sample)
    assert told == expected


@pytest.mark.parametrize("N, W, nearest", [(100, 8, "96 and 104"), (3, 8, "8")])
def test_ranks_must_divide_the_global_batch(N, W, nearest):
    with pytest.raises(UserError, match=rf"batch.global_size \({N}\).*\({W}\).*{nearest}"):
        plan_batch(BatchConfig(global_size=N), W)
