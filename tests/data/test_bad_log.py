"""The summary of an epoch, over ranks, and through a checkpoint."""

from __future__ import annotations

import json

from clip_train import dist
from clip_train.data import BadSampleLog, epoch_of
from clip_train.data.bad_log import NO_EPOCH
from clip_train.data.bad_samples import Bad, BadTable
from tests.ranks import run_ranks


def one_rank() -> tuple[str | None, str | None, dict]:
    log = BadSampleLog()
    log.add({"no caption\ta.tar": 1 + dist.rank()})
    log.add({"no image\tb.tar": 2} if dist.rank() else {})
    assert log.reached(0, 3) is None
    told = log.reached(1, 4)
    assert log.reached(1, 5) is None
    resumed = BadSampleLog.load({**json.loads(json.dumps(log.state())), "cursors": {0: {"epoch": 1}, 1: {"epoch": 2}}})
    resumed.add({"no caption\ta.tar": 1})
    again = resumed.reached(2, 9)
    return told, again, resumed.state()


def test_ranks_add_up_and_a_resumed_run_goes_on():
    for told, again, state in run_ranks(one_rank, 2):
        assert told is not None and told.startswith("epoch 1 is done (step 4): 5 bad samples in it, 5 so far\n")
        rows = [line.split() for line in told.splitlines()[2:]]
        assert rows == [["3", "no", "caption", "a.tar"], ["2", "no", "image", "b.tar"]]
        assert again is not None and again.startswith("epoch 2 is done (step 9): 2 bad samples in it, 7 so far\n")
        assert state == {
            "bad_samples": {"no caption\ta.tar": 5, "no image\tb.tar": 2},
            "bad_epochs": [{"epoch": 1, "step": 4, "bad_samples": 5}, {"epoch": 2, "step": 9, "bad_samples": 7}],
        }


def test_nothing_bad_is_told_too():
    assert BadSampleLog().reached(1, 7) == "epoch 1 is done (step 7): no bad samples"


def test_the_slowest_lane_counts():
    assert epoch_of({3: {"epoch": 2}, 4: {"epoch": 1}}) == 1
    assert epoch_of({0: {"count": 9, "sources": [{"epoch": 3}, {"epoch": 0}]}}) == 0
    assert epoch_of({}) == NO_EPOCH and BadSampleLog().reached(NO_EPOCH, 1) is None


def test_keys_cannot_write_to_the_terminal():
    table = BadTable()
    table.add([Bad("no image", "a.tar", "x\x1b[2J" + "y" * 500)])
    assert "\x1b" not in str(table) and "x\\x1b[2J" in str(table) and len(str(table)) < 200
