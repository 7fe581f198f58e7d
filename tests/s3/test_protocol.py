"""Two processes and a server that misbehaves: what is committed stays whole, and who may commit is one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from clip_train.errors import CheckpointError
from tests.checkpoint.parts import committed
from tests.checkpoint.runs import kill_writer
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault, FaultyProxy
from tests.s3.runs import Run, assert_is

pytestmark = pytest.mark.usefixtures("runs")


def test_a_zombie_cannot_commit_over_its_successor(
    tmp_path: Path, url: str, view: Bucket, proxy
) -> None:
    zombie = Run(tmp_path / "a", url)
    assert zombie.save(1)
    proxy.faults = [Fault("status", method="PUT|POST", key=r"ckpt/s0000000002/.*safetensors")]
    assert zombie.save(2, wait=False)  # its upload is delayed
    successor = Run(tmp_path / "b", url)
    assert_is(successor.resume(), 1)
    successor.manager.begin()
    proxy.faults = []
    with pytest.raises(
        CheckpointError, match=r"writes to \w+://.* now \(its epoch is 1, this process's is 0\)"
    ):
        zombie.until(lambda: False)
    assert successor.save(2)
    assert [(m["epoch"], m["step"]) for m in view.commits("run").values()] == [(0, 1), (1, 2)]
    assert_is(Run(tmp_path / "c", url).resume(), 2)


@pytest.mark.full
def test_what_is_said_to_hold_without_conditional_writes_does(
    tmp_path: Path, url: str, view: Bucket, proxy
) -> None:
    deaf = Fault("unconditional", method="PUT", key="")
    proxy.faults = [deaf]
    old, new = Run(tmp_path / "old", url), Run(tmp_path / "new", url)
    assert old.save(1)
    assert_is(new.resume(), 1)
    new.manager.begin()
    with pytest.raises(CheckpointError, match=r"writes to \w+://.* now"):
        old.save(2, wait=False)
        old.until(lambda: False)
    assert new.save(2) and view.incomplete("run") == []
    proxy.faults = [Fault("hide", method="GET", key="", hidden="lease/"), deaf]
    twins = [
        Run(tmp_path / name, url) for name in ("one", "two")
    ]  # neither sees that the other has begun
    for twin in twins:
        assert_is(twin.resume(), 2)
        twin.manager.begin()
    proxy.faults = [deaf]
    with pytest.raises(
        CheckpointError, match=r"writes to \w+://.* now \(its epoch is 2, this process's is 2\)"
    ):
        twins[0].save(3)
    for step in (3, 4):
        assert twins[1].save(step)
        assert view.incomplete("run") == [] and view.newest_step("run") == step


def test_the_answer_to_the_commit_is_lost(tmp_path: Path, url: str, view: Bucket, proxy) -> None:
    run = Run(tmp_path, url)
    proxy.faults = [Fault("lost", method="PUT", key="run/commit/", times=1)]
    assert run.save(1) and proxy.fired == 1
    assert [line for line in run.said if "waiting" not in line] == [] and view.incomplete(
        "run"
    ) == []


@pytest.mark.full
def test_a_zombie_without_the_store_sees_its_successor_on_disk(
    tmp_path: Path, url: str, proxy: FaultyProxy
) -> None:
    """They share the run's folder; the zombie's own newest may not push out what the successor goes on from."""
    zombie = Run(tmp_path, url, keep_last=1)
    assert zombie.save(1)
    successor = Run(tmp_path, url)
    assert_is(successor.resume(), 1)
    assert successor.save(2)
    successor.manager.close()  # or it removes what the zombie is writing: these processes grant no grace
    proxy.faults = [Fault("reset", method="GET|PUT|HEAD|DELETE|POST", key="")]
    assert zombie.save(3, wait=False)
    with pytest.raises(
        CheckpointError, match=r"writes to .* now \(its epoch is 1, this process's is 0\)"
    ):
        zombie.until(lambda: False)
    assert set(committed(tmp_path)) == {1, 2}


@pytest.mark.full
def test_two_that_took_the_same_epoch(
    tmp_path: Path, url: str, view: Bucket, proxy: FaultyProxy
) -> None:
    """Possible where a server ignores If-None-Match: the last one to take it has it."""
    ignores = Fault("unconditional", method="PUT", key="")
    proxy.faults = [Fault("hide", key="", hidden="run/lease"), ignores]
    first, second = Run(tmp_path / "a", url), Run(tmp_path / "b", url)
    first.manager.begin()
    second.manager.begin()
    assert view.keys("run/lease") == ["run/lease/e000000.json"]
    proxy.faults = [ignores]
    with pytest.raises(
        CheckpointError, match=r"writes to \w+://.* now \(its epoch is 0, this process's is 0\)"
    ):
        first.save(1)
    assert second.save(1)
    assert view.incomplete("run") == [] and len(view.commits("run")) == 1


@pytest.mark.full
def test_a_marker_that_a_listing_hides_keeps_its_data(
    tmp_path: Path, url: str, view: Bucket, proxy: FaultyProxy
) -> None:
    run = Run(tmp_path, url, keep_last=9)
    assert run.save(1)
    proxy.faults = [Fault("hide", key="", hidden="commit/e000000-s0000000001")]
    assert run.save(2) and run.save(3)
    run.manager.close()
    assert view.incomplete("run") == [] and [m["step"] for m in view.commits("run").values()] == [
        1,
        2,
        3,
    ]


@pytest.mark.full
def test_saves_faster_than_uploads_are_not_failures(
    tmp_path: Path, url: str, view: Bucket, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload goes on, slowly; those that wait are superseded before they begin, and the run lives."""
    monkeypatch.setenv("CLIP_TRAIN_S3_PATIENCE_SECONDS", "600")
    run = Run(
        tmp_path, url, max_failed_saves=2, keep_last=9
    )  # none is removed while its file is read here
    run.manager.begin()
    proxy.faults = [Fault("status", method="PUT|POST", key="ckpt/s0000000001/.*safetensors")]
    for step in range(1, 7):
        assert run.save(step, wait=False)
        run.until(lambda step=step: step in committed(tmp_path))
    assert view.commits("run") == {}
    proxy.faults = []
    run.until(lambda: len(view.commits("run")) == 2)
    run.manager.close()
    assert [marker["step"] for marker in view.commits("run").values()] == [1, 6]
    superseded = [line for line in run.said if "superseded" in line]
    assert len(superseded) == 4 and "step 2 is not uploaded: superseded by step 3" in superseded[0]
    assert run.manager.poll().get("checkpoint_failures", 0) == 0


@pytest.mark.full
def test_what_a_writer_had_in_hand_is_one_failed_save(
    tmp_path: Path, url: str, view: Bucket, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIP_TRAIN_S3_PATIENCE_SECONDS", "600")  # until then no upload fails
    run = Run(tmp_path, url, max_failed_saves=2)
    run.manager.begin()
    proxy.faults = [Fault("hang", method="PUT|POST", key="ckpt/")]
    for step in (1, 2):
        assert run.save(step, wait=False)
        run.until(lambda step=step: step in committed(tmp_path))
    kill_writer()
    proxy.faults = []
    assert run.save(3)
    run.manager.close()
    assert [marker["step"] for marker in view.commits("run").values()] == [3]
    assert set(committed(tmp_path)) == {1, 2, 3}
    (failed,) = [line for line in run.said if "failed" in line]
    assert "step 2 failed (1 in a row): the checkpoint writer has ended (signal 9)" in failed
