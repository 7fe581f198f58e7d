"""The summary of an epoch, over ranks, and through a checkpoint."""

from __future__ import annotations

import json

from clip_train import dist
from clip_train.data.invalid import Invalid, InvalidLog, table_of
from tests.ranks import run_ranks


def one_rank() -> tuple[str | None, str | None, dict]:
    log = InvalidLog()
    log.add({"no caption\ta.tar": 1 + dist.rank()})
    log.add({"no image\tb.tar": 2} if dist.rank() else {})
    assert log.reached(0, 3) is None
    told = log.reached(1, 4)
    assert log.reached(1, 5) is None
    resumed = InvalidLog.load(json.loads(json.dumps(log.state())), 1)
    resumed.add({"no caption\ta.tar": 1})
    again = resumed.reached(2, 9)
    return told, again, resumed.state()


def test_ranks_add_up_and_a_resumed_run_goes_on():
    for told, again, state in run_ranks(one_rank, 2):
        assert told is not None and told.startswith(
            "epoch 1 is done (step 4): 5 invalid samples in it, 5 so far\n"
        )
        rows = [line.split() for line in told.splitlines()[2:]]
        assert rows == [["3", "no", "caption", "a.tar"], ["2", "no", "image", "b.tar"]]
        assert again is not None and again.startswith(
            "epoch 2 is done (step 9): 2 invalid samples in it, 7 so far\n"
        )
        assert state == {
            "bad_samples": {"no caption\ta.tar": 5, "no image\tb.tar": 2},
            "bad_epochs": [
                {"epoch": 1, "step": 4, "bad_samples": 5},
                {"epoch": 2, "step": 9, "bad_samples": 7},
            ],
        }


def test_an_epoch_without_any_is_reported_too():
    assert InvalidLog().reached(1, 7) == "epoch 1 is done (step 7): no invalid samples"


def test_a_few_pictures_of_each_reason_are_kept():
    log = InvalidLog()
    for number in range(9):
        log.add(
            {},
            [{"reason": reason, "key": f"{reason}{number}"} for reason in "ab"[: 1 + number % 2]],
        )
    assert [each["key"] for each in log.pictures] == ["a0", "a1", "b1", "a2", "b3", "b5"]
    assert "picture" not in json.dumps(log.state())  # a checkpoint goes without


def test_keys_cannot_write_to_the_terminal():
    table = table_of([Invalid("no image", "a.tar", "x\x1b[2J" + "y" * 500)])
    assert "\x1b" not in table and "x\\x1b[2J" in table and len(table) < 200


def test_a_table_has_the_first_keys_of_each_reason_and_shard():
    found = [Invalid("no image", "a.tar", f"{rank}{n}") for rank in range(3) for n in range(2)]
    assert " ".join(table_of(found).splitlines()[1].split()) == "6 no image a.tar 00, 01, 10"
