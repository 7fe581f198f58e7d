"""Four ranks that make different collectives, or the same in another order, wait for each other for ever."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.launcher.conftest import finish, metrics, start

UNEVEN = ("batch.global_size=30", "batch.micro_size=3", "run.steps=8", "checkpoint.every_steps=3")


def sequences(folder: Path) -> list[dict[tuple[int, ...], list]]:
    """Of each rank: group -> its collectives, in order."""
    out = []
    for rank in range(4):
        by_group = defaultdict(list)
        for line in (folder / str(rank)).read_text().splitlines():
            group, name, what = json.loads(line)
            by_group[tuple(group)].append((name, what))
        out.append(dict(by_group))
    return out


@pytest.mark.distributed
@pytest.mark.parametrize(
    "engine",
    [
        ("engine.kind=deepspeed", "engine.zero_stage=1"),
        ("engine.kind=deepspeed", "engine.zero_stage=3"),
        ("engine.kind=fsdp", "engine.zero_stage=2", "engine.shard_ranks=2"),
    ],
    ids=["zero 1", "zero 3", "fsdp 2 in groups"],
)
def test_every_rank_of_a_group_makes_the_same(engine, recipe, tmp_path, data):
    """Shares of 8, 8, 7 and 7; saves and evaluations; a forward that fails, where a run can go on from it."""
    folder = tmp_path / "collectives"
    folder.mkdir()
    fails = engine[-1] == "engine.zero_stage=1"
    process = start(
        recipe,
        *engine,
        *UNEVEN,
        f"data.val={data.val}",
        f"evaluate.zero_shot_classes={data.classes}",
        "evaluate.every_steps=4",
        "loss.kind=tests.engine.recorded.Recorded",
        ranks=4,
        fault="memory:3" if fails else "",
        environ={"COLLECTIVES": str(folder)},
    )
    status, out = finish(process)
    assert status == 0, out
    assert not fails or "out of memory" in out, out
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 9))
    found = sequences(folder)
    groups = {group for of_rank in found for group in of_rank}
    assert tuple(range(4)) in groups
    assert not engine[2:] or {(0, 1), (2, 3)} <= groups
    for group in groups:
        of_members = [found[rank].get(group) for rank in group]
        assert all(each == of_members[0] for each in of_members), group
        outside = [rank for rank in range(4) if rank not in group]
        assert not any(group in found[rank] for rank in outside)
    assert len(found[0][tuple(range(4))]) > 100
