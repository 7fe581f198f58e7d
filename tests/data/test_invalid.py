"""The summary of an epoch, over ranks, and through a checkpoint."""

from __future__ import annotations

import json

from clip_train import dist
from clip_train.data.invalid import InvalidLog, InvalidRecord, table_of
from tests.ranks import run_ranks


def one_rank() -> tuple[str, str, dict]:
    lines: list[str] = []
    log = InvalidLog(epoch_at=lambda step: step // 4, log=lines.append)
    log.after_step({"step": 2}, [], {"no caption\ta.tar": 1 + dist.rank()})
    log.after_step({"step": 3}, [], {"no image\tb.tar": 2} if dist.rank() else {})
    assert not lines
    log.after_step({"step": 4}, [], {})
    log.after_step({"step": 5}, [], {})
    (told,) = lines
    saved: dict = {"step": 5}
    log.before_save(saved)
    resumed = InvalidLog(epoch_at=lambda step: step // 4, log=lines.append)
    resumed.resume(json.loads(json.dumps(saved)))
    resumed.after_step({"step": 8}, [], {"no caption\ta.tar": 1})
    resumed.before_save(saved)
    return told, lines[1], saved["bad_samples"]


def test_ranks_add_up_and_a_resumed_run_goes_on():
    for told, again, state in run_ranks(one_rank, 2):
        assert told.startswith("epoch 1 is done (step 4): 5 invalid samples so far\n")
        rows = [line.split() for line in told.splitlines()[2:]]
        assert rows == [["3", "no", "caption", "a.tar"], ["2", "no", "image", "b.tar"]]
        assert again.startswith("epoch 2 is done (step 8): 7 invalid samples so far\n")
        assert state == {"no caption\ta.tar": 5, "no image\tb.tar": 2}


def test_an_epoch_without_any_is_reported_too():
    lines: list[str] = []
    InvalidLog(epoch_at=lambda step: step // 7, log=lines.append).after_step({"step": 7}, [], {})
    assert lines == ["epoch 1 is done (step 7): no invalid samples"]


def test_keys_cannot_write_to_the_terminal():
    table = table_of([InvalidRecord("no image", "a.tar", "x\x1b[2J" + "y" * 500)])
    assert "\x1b" not in table and "x\\x1b[2J" in table and len(table) < 200


def test_a_table_has_the_first_keys_of_each_reason_and_shard():
    found = [
        InvalidRecord("no image", "a.tar", f"{rank}{n}") for rank in range(3) for n in range(2)
    ]
    assert " ".join(table_of(found).splitlines()[1].split()) == "6 no image a.tar 00, 01, 10"
