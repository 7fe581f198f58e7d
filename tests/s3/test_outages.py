"""A store, or a checkpoint writer, that is away while training goes on."""

from __future__ import annotations

import queue
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_train import dist
from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import SaveRequest, acquire
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager, Saved
from clip_train.checkpoint.retention import WriterSettings
from clip_train.checkpoint.snapshot import SharedMemory, plan_file
from clip_train.checkpoint.writer import Event, Message, Writer
from clip_train.errors import CheckpointError
from clip_train.storage import object_store, remote
from clip_train.storage.errors import StorageError
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import open_storage
from tests.checkpoint.parts import committed, cut, whole
from tests.checkpoint.runs import kill_writer
from tests.ranks import run_ranks
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault
from tests.s3.runs import Run, assert_is

pytestmark = pytest.mark.usefixtures("runs")


def test_a_store_that_is_down_does_not_hold_up_training(
    tmp_path: Path, url: str, view: Bucket, proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIP_TRAIN_S3_PATIENCE_SECONDS", "600")
    run = Run(tmp_path, url)
    run.manager.begin()
    down = Fault("status", method="PUT|POST", key="ckpt/")
    proxy.faults = [down]
    assert run.save(1, wait=False)
    run.until(lambda: run.manager.last_good is not None and down.fired > 1)
    assert run.manager.last_good is not None and run.manager.last_good.step == 1  # on the disk
    assert set(committed(tmp_path)) == {1} and view.commits("run") == {}
    proxy.faults = []
    run.until(lambda: len(view.commits("run")) == 1)
    assert view.incomplete("run") == []


def test_an_upload_outlasts_an_outage_that_ends_other_requests(
    tmp_path: Path, url: str, view: Bucket, proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default it is repeated for as long as a save may take."""
    monkeypatch.delenv("CLIP_TRAIN_S3_PATIENCE_SECONDS")
    for module in (remote, object_store):  # in place of a minute
        monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.5)
    plan, memory, messages = plan_file(0, [], {}), SharedMemory(), queue.SimpleQueue[Message]()
    memory.reserve(plan.num_bytes).result()
    memory.fill(plan)
    store = open_storage(url)
    held = acquire(store, [LocalStorage(tmp_path)])
    settings = WriterSettings(CheckpointConfig(remote=url), held, str(tmp_path))
    writer = Writer(settings, memory.fd, messages.put)
    proxy.faults = [Fault("status", method="PUT|POST", key="ckpt/")]
    prefix = manifest.attempt_prefix(held.epoch, 1)
    writer.receive(
        SaveRequest(1, prefix, held.epoch, 0, 1, plan.num_bytes, plan.fragments, {}, scores={})
    )
    seen = [messages.get(timeout=60).event for _ in range(2)]
    for _ in range(2):
        with pytest.raises(StorageError, match="SlowDown"):
            store.put_file(__file__, "ckpt/other")
    assert view.commits("run") == {} and messages.empty()
    proxy.faults = []
    assert [*seen, messages.get(timeout=120).event] == [
        Event.WRITTEN,
        Event.LOCAL,
        Event.COMMITTED,
    ]
    assert len(view.commits("run")) == 1
    memory.close()


@pytest.mark.full
def test_a_failed_upload_fails_its_save_and_the_next_one_counts(
    tmp_path: Path, url: str, view: Bucket, proxy
) -> None:
    run = Run(tmp_path, url)
    run.manager.begin()
    proxy.faults = [Fault("status", method="PUT|POST", key="ckpt/s0000000001")]
    assert run.save(1, wait=False)
    run.until(lambda: len(run.said) > 0)
    assert "step 1 failed (1 in a row)" in run.said[0] and "SlowDown" in run.said[0]
    assert run.save(2)
    assert [marker["step"] for marker in view.commits("run").values()] == [2]
    assert_is(Run(tmp_path / "b", url).resume(), 2)


@pytest.mark.full
def test_a_bucket_that_goes_away_stops_the_run_after_some_misses(
    tmp_path: Path, url: str, view: Bucket, proxy
) -> None:
    run = Run(tmp_path, url, max_failed_saves=2)
    assert run.save(1)
    run.hurry()
    proxy.faults = [
        Fault("status", method="PUT|POST|GET|HEAD", key="", code=404, s3code="NoSuchBucket")
    ]
    assert run.save(2, wait=False)
    failed = r"step 2 failed \(1 in a row\).*create the bucket"
    run.until(lambda: any(re.search(failed, line) for line in run.said))
    assert run.save(3, wait=False)
    stops = r"step 3 failed \(2 in a row\).*create the bucket.*; the last good one is .*s0000000003"
    with pytest.raises(CheckpointError, match=stops):
        run.until(lambda: False)
    proxy.faults = []
    assert_is(Run(tmp_path, url).resume(), 3)  # what the disk has


@pytest.mark.full
def test_at_the_end_it_waits_no_longer_than_the_grace(
    tmp_path: Path, url: str, view: Bucket, proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIP_TRAIN_S3_PATIENCE_SECONDS", "600")
    run = Run(tmp_path, url, grace_seconds=4.5)  # enough for the disk, on a busy machine too
    run.manager.begin()
    proxy.faults = [Fault("hang", method="PUT|POST", key="ckpt/")]
    assert run.save(1, wait=False)
    run.until(lambda: run.manager.last_good is not None)  # on the disk, however slow that is
    began = time.monotonic()
    assert run.save(1) is False
    run.manager.close()
    assert time.monotonic() - began < 600  # this one would be tried for ten minutes
    waiting, abandoned = run.said
    assert re.fullmatch(rf"waiting up to \d s for step 1 to be committed at {url}", waiting)
    assert re.search(
        r"the save of step 1 was abandoned after \d s; the last good one is", abandoned
    )
    assert view.commits("run") == {} and set(committed(tmp_path)) == {1}
    proxy.faults = []
    later = Run(tmp_path, url)
    assert_is(later.resume(), 1)
    assert later.save(1)  # it is not in the store yet
    assert len(view.commits("run")) == 1


def killed_in_the_upload(folder: Path, url: str, hung: Path, victim: int) -> dict[str, Any]:
    """Each rank has a checkpoint writer of its own; one is killed while it uploads its part of step 2."""
    rank = dist.rank()
    said: list[str] = []
    config = CheckpointConfig(remote=url, grace_seconds=120.0)
    manager = CheckpointManager(config, folder, log=said.append, orphan_seconds=0.0)
    assert manager.resume() is None

    def save(step: int, *, wait: bool) -> bool:
        own = {"rng": torch.tensor([rank], dtype=torch.uint8), "padding": torch.zeros(3_000_000)}
        saved = manager.save(step, cut(whole(step), rank, 2), own, {"step": step}, wait=wait)
        return saved in (Saved.COMMITTED, Saved.UNDER_WAY)

    assert save(1, wait=True)
    said.clear()
    assert save(2, wait=False)
    while not (list(folder.glob("commit/*-s0000000002.json")) and hung.exists()):
        manager.poll()
        time.sleep(0.01)
    if rank == victim:
        kill_writer()
        manager.poll()
    dist.barrier()
    saved = save(3, wait=True)
    manager.close()
    return {
        "saved": saved,
        "said": [line for line in said if "waiting" not in line],
    }


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("victim", [0, 1])
def test_a_writer_that_is_killed_in_the_upload(
    tmp_path: Path, url: str, view: Bucket, proxy, victim: int
) -> None:
    hang = Fault("hang", times=1, method="PUT", key=f"s0000000002/.*rank0000{victim}.safetensors")
    proxy.faults = [hang]
    folder, hung = tmp_path / "run", tmp_path / "hung"
    over = threading.Event()

    def watch() -> None:
        while not hang.fired and not over.wait(0.01):
            pass
        hung.touch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        zero, one = run_ranks(killed_in_the_upload, 2, folder, url, hung, victim)
    finally:
        over.set()
        watcher.join()
    assert hang.fired > 0 and zero["saved"] and one["saved"]
    failed = [line for line in zero["said"] + one["said"] if "failed" in line]
    assert len(failed) <= 1 and all("step 2 failed (1 in a row)" in line for line in failed)
    assert "has ended (signal 9)" in (zero, one)[victim]["said"][0]
    assert [marker["step"] for marker in view.commits("run").values()] == [1, 3]
    assert view.orphans("run") == [] and view.incomplete("run") == []
    assert set(committed(folder)) == {1, 2, 3}
