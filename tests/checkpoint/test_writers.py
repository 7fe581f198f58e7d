"""Checkpoint writers that are slow, stopped or killed: training goes on, and the next save is whole."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from clip_train import dist
from clip_train.checkpoint.commit import SaveRequest
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager
from clip_train.checkpoint.process import WriterProcess
from clip_train.checkpoint.retention import WriterSettings
from clip_train.checkpoint.snapshot import SharedMemory
from clip_train.errors import CheckpointError
from tests.checkpoint.parts import committed
from tests.checkpoint.runs import (
    PATIENCE,
    Gate,
    Run,
    assert_holds,
    kill_writer,
    stop_writer,
    wake_writers,
)
from tests.ranks import run_ranks

ENDED = "the checkpoint writer has ended"


class Rank(Run):
    """One rank's life, whose saves all ranks make together."""

    def __init__(self, folder: Path, **config: Any) -> None:
        super().__init__(folder, **{"keep_last": 50, **config})
        assert self.resume() is None
        self.manager.begin()

    def due(self, step: int) -> bool:
        self.numbers |= self.manager.poll()
        (due,) = set(dist.gather_objects(self.manager.due(step)))  # the same on all ranks
        return due

    def until_due(self, steps: Iterator[int]) -> int:
        """Training goes on: the first step at which a save is due, on all ranks."""
        end = time.monotonic() + PATIENCE
        while not self.due(step := next(steps)):
            assert time.monotonic() < end, self.said
            time.sleep(0.01)
        return step

    def start_when_free(self, step: int) -> None:
        """Where this rank's buffer or another's is still being written, again: all ranks learn of it."""
        end = time.monotonic() + PATIENCE
        while not self.start(step):
            assert time.monotonic() < end, self.said
            time.sleep(0.01)


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def parts_of(folder: Path, step: int) -> list[Path]:
    """The manifests of single ranks for a step, of all attempts."""
    return sorted(folder.glob(f"ckpt/s{step:010d}/*/_rank*.json"))


def assert_whole(folder: Path, steps: set[int]) -> None:
    """By other code's eyes: these are committed, hold what was saved, and nothing else is left."""
    found = committed(folder)
    assert set(found) == steps
    assert {path.parent for path in (folder / "ckpt").glob("*/*/*")} == set(found.values())
    assert set((folder / "ckpt").glob("*/*")) == set(found.values())
    assert not list(folder.rglob("*.part"))


def assert_readable(folder: Path, step: int) -> None:
    (attempt,) = (folder / "ckpt" / f"s{step:010d}").iterdir()
    elsewhere = folder.with_name(f"{folder.name}-elsewhere")
    resumed = CheckpointManager(CheckpointConfig(resume=str(attempt)), elsewhere).resume()
    assert resumed is not None
    assert_holds(resumed, step)


# -- a disk that hangs


def hanging_disk(folder: Path) -> dict[str, Any]:
    run, is_one, steps = (
        Rank(folder, every_steps=1, max_failed_saves=1),
        dist.rank() == 1,
        itertools.count(1),
    )

    def stop_rank_1() -> None:
        if is_one:
            stop_writer()
        dist.barrier()

    stop_rank_1()
    first = run.until_due(steps)
    assert run.start(first)
    wait_for(
        lambda: len(parts_of(folder, first)) == 1
    )  # rank 0's buffer is free, as far as it is concerned
    for _ in range(20):
        assert not run.due(next(steps))
        time.sleep(0.01)
    if is_one:
        wake_writers()
    late = run.until_due(steps)
    assert run.start(late)
    numbers = run.numbers | run.manager.poll()
    again = run.until_due(steps)
    stop_rank_1()
    assert run.start(again)
    assert not run.due(next(steps))
    if is_one:
        threading.Timer(0.3, wake_writers).start()
    last = next(steps)
    ended_well = run.start(last, wait=True)  # waits for the buffer, then for the commit
    run.manager.close()
    return {
        "saved": [first, late, again, last],
        "ended well": ended_well,
        "said": run.said,
        "numbers": numbers,
    }


@pytest.mark.distributed
def test_a_save_that_comes_too_early_is_deferred(tmp_path: Path) -> None:
    zero, one = run_ranks(hanging_disk, 2, tmp_path)
    first, late, again, last = zero["saved"]
    assert zero["ended well"] and one["ended well"] and one["saved"] == zero["saved"]
    assert late - (first + 1) >= 20
    deferred = [line.split(" to ")[0] for line in zero["said"]]
    text = "checkpoint of step {} is deferred: step {} is still being written"
    assert deferred[0] == text.format(first + 1, first) and deferred[-1] == text.format(
        again + 1, again
    )
    assert not any("failed" in line for line in zero["said"]) and one["said"] == []
    assert_whole(tmp_path, {first, late, again, last})
    for step in zero["saved"]:
        assert_readable(tmp_path, step)


def test_minutes_count_from_the_save_that_was_deferred(tmp_path: Path) -> None:
    now = 0.0
    run = Rank(tmp_path, clock=lambda: now, every_steps=None, every_minutes=10.0)
    steps, saved_at = itertools.count(1), []
    while now < 2800:
        now += 1.0
        step = next(steps)
        if now == 500:
            stop_writer()
        if now == 1500:
            wake_writers()
            step = run.until_due(steps)  # within the same second, by this clock
        elif not run.due(step):
            continue
        saved_at.append(now)
        assert run.start(step, wait=now >= 1500)
    assert saved_at == [600, 1500, 2100, 2700]
    assert sum("is deferred" in line for line in run.said) == 1


def test_a_disk_that_hangs_for_good_ends_the_run(tmp_path: Path) -> None:
    now = 0.0
    run = Rank(
        tmp_path, clock=lambda: now, every_steps=1, max_failed_saves=2, save_timeout_minutes=1.0
    )
    stop_writer()
    assert run.due(1) and run.start(1)
    with pytest.raises(
        CheckpointError, match=r"step 2 failed \(2 in a row\).* step 1 is still being written to"
    ):
        for step in range(2, 100):
            assert not run.due(step)
            now += 15.0
    assert now > 120  # a minute for each failure
    assert (
        "is deferred" in run.said[0]
        and "step 2 failed (1 in a row)" in run.said[1]
        and len(run.said) == 2
    )
    kill_writer()


# -- writers that are killed

DEATHS = [
    (victims, moment)
    for moment in ("idle", "writing", "at the end")
    for victims in ((0,), (1,), (0, 1))
]


def deaths(
    folder: Path, remote: str | None, cases: Sequence[tuple[tuple[int, ...], str]]
) -> list[dict[str, Any]]:
    """A good save, a death, a good save; again and again."""
    run, rank = Rank(folder, remote=remote, max_failed_saves=2), dist.rank()
    steps, seen = itertools.count(1), []
    for victims, moment in cases:
        dies = rank in victims
        run.save(next(steps))
        run.said.clear()
        step = next(steps)
        if moment == "at the end" and dies:
            stop_writer()
            threading.Timer(0.3, kill_writer).start()
        dist.barrier()
        if moment == "at the end":
            survived = run.start(step, wait=True)
        else:
            survived = False
            if dies:
                stop_writer()
            dist.barrier()
            if moment == "writing":
                run.start_when_free(step)
            dist.barrier()
            if dies:
                kill_writer()
        dist.barrier()
        run.save(next(steps))
        seen.append({"moment": moment, "step": step, "survived": survived, "said": [*run.said]})
    run.manager.close()
    return seen


@pytest.mark.distributed
@pytest.mark.parametrize("remote", [False, True])
def test_writers_that_are_killed(tmp_path: Path, remote: bool) -> None:
    """What one had under way is a failed save, on all ranks; the next save starts another one."""
    folder, store = tmp_path / "local", tmp_path / "store"
    zero, one = run_ranks(deaths, 2, folder, str(store) if remote else None, DEATHS)
    lost = set()
    for (victims, moment), seen, other in zip(DEATHS, zero, one, strict=True):
        assert not seen["survived"] and not other["survived"]
        told = [seen["said"], other["said"]]
        for victim in victims:
            assert sum(ENDED in line and "failed" not in line for line in told[victim]) == 1, told
        failed = [line for line in seen["said"] if "failed" in line]
        if moment == "idle":
            assert failed == [], told
        else:
            lost.add(seen["step"])
            assert len(failed) == 1 and f"step {seen['step']} failed (1 in a row)" in failed[0], (
                told
            )
    last = 3 * len(DEATHS)
    idle = {seen["step"] for seen in zero if seen["moment"] == "idle"}
    assert_whole(folder, set(range(1, last + 1)) - lost - idle)
    assert_readable(folder, last)
    if remote:
        assert_whole(store, set(range(1, last + 1)) - lost - idle)


def dies_in_the_upload(folder: Path, store: Path) -> list[Any]:
    """The last save is on the disk, and its upload hangs: then a writer dies."""
    remote = f"tests.checkpoint.held.HeldStore://{store}"
    run, rank, hold = Rank(folder, remote=remote), dist.rank(), store / "hold"
    run.save(1)
    saved = []
    for step in (2, 3):
        hold.touch()
        dist.barrier()

        def die(step: int = step) -> None:
            wait_for(lambda: list(folder.glob(f"commit/*-s{step:010d}.json")))
            kill_writer()
            hold.unlink()

        dies = threading.Thread(target=die, daemon=True)
        if rank == step - 2:
            dies.start()
        saved.append(run.start(step, wait=True))
        if rank == step - 2:
            dies.join()  # a late unlink would let the next step through
        dist.barrier()
    run.save(4)
    run.manager.close()
    return [saved, run.said]


@pytest.mark.distributed
def test_a_save_whose_writer_died_in_the_upload_is_on_the_disk(tmp_path: Path) -> None:
    zero, one = run_ranks(dies_in_the_upload, 2, tmp_path / "local", tmp_path / "store")
    assert zero[0] == one[0] == [False, False], zero
    assert any(ENDED in line for line in zero[1] + one[1]) and not any(
        "another process" in line for line in zero[1]
    )
    assert set(committed(tmp_path / "local")) == {1, 2, 3, 4}
    assert set(committed(tmp_path / "store")) == {1, 4}


def a_writer_that_always_dies(folder: Path) -> list[Any]:
    """Rank 1's, each time that it is started."""
    run = Rank(folder, max_failed_saves=9)
    run.save(1)
    if dist.rank() == 1:
        real = subprocess.Popen
        subprocess.Popen = lambda line, **more: real(
            [sys.executable, "-c", "raise SystemExit(3)"], **more
        )  # type: ignore[misc,assignment]
        kill_writer()
    saved = [run.start(step, wait=True) for step in (2, 2)]
    if dist.rank() == 1:
        subprocess.Popen = real  # type: ignore[misc]
    saved.append(run.start(2, wait=True))
    run.save(3)
    run.manager.close()
    return [saved, run.said]


@pytest.mark.distributed
def test_a_writer_that_always_dies_is_a_failed_save_on_all_ranks(tmp_path: Path) -> None:
    zero, one = run_ranks(a_writer_that_always_dies, 2, tmp_path)
    assert zero[0] == one[0] == [False, False, True], zero
    failed = [line for line in zero[1] if "failed" in line]
    assert len(failed) == 2
    for count, line in enumerate(failed, 1):
        assert f"step 2 failed ({count} in a row): rank 1: {ENDED} (exit status 3)" in line
    assert one[1] and all(
        line.startswith("rank 1: ") and "writer has ended" in line for line in one[1]
    )
    assert_whole(tmp_path, {1, 2, 3})


# -- one rank


def test_a_rank_that_has_more_than_a_thousand_files_open(tmp_path: Path) -> None:
    """Rank 0 of a large job has a connection to each of the others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1300), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    run = Run(tmp_path, every_steps=2)
    try:
        assert [run.manager.due(step) for step in (1, 2)] == [False, True]
        run.save(2)
    finally:
        run.manager.close()
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_whole(tmp_path, {2})


HICCUP = """
from clip_train.storage.local import LocalStorage

class Store(LocalStorage):
    '''Fails once.'''
    failures = 1

    def __init__(self, url, *, patience_seconds=None):
        super().__init__(url.partition("://")[2])

    def put_bytes(self, *args, **options):
        if self.failures:
            self.failures -= 1
            raise OSError("a hiccup")
        return super().put_bytes(*args, **options)
"""


def test_rank_0_learns_of_a_failed_save_though_its_writer_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hiccup.py").write_text(HICCUP)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/ckpt").write_bytes(b"in the way")
    config = CheckpointConfig(remote=f"hiccup.Store://{tmp_path}/store")
    settings = WriterSettings(config, folder=str(tmp_path / "disk"), shared=False)
    prefix = "ckpt/s0000000001/e000000-1"
    save = SaveRequest(1, prefix, epoch=0, rank=1, world_size=2, size=0, fragments={})
    writer = WriterProcess(settings, SharedMemory().fd)
    writer.send(save)
    writer.send(None)  # the run ends
    end = time.monotonic() + PATIENCE
    while writer.ended is None and time.monotonic() < end:
        writer.receive(1.0)
    writer.close()
    assert writer.ended == f"{ENDED} (exit status 0)"
    body = json.loads((tmp_path / "store" / prefix / "_rank00001.json").read_bytes())
    assert body["error"].startswith("FileExistsError")


def test_uploads_that_are_slower_than_saves_are_no_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the one that ends late the last good one, where the disk has newer ones."""
    folder, store = tmp_path / "local", tmp_path / "store"
    gate = Gate(store / "commit/e000000-s0000000001.json", tmp_path / "gate", monkeypatch)
    run = Run(folder, remote=str(store), keep_last=2, max_failed_saves=1)
    run.manager.begin()
    for step in (1, 2, 3, 4):
        assert run.start(step)
        run.until(
            lambda step=step: (
                run.manager.last_good is not None and run.manager.last_good.step == step
            )
        )
        if step == 1:
            run.until(gate.reached)
    gate.open()  # 4 has taken the place of 2 and 3
    good = {run.manager.last_good}
    run.until(lambda: good.add(run.manager.last_good) or run.numbers.get("checkpoint_step") == 4)
    assert good | {run.manager.last_good} == {
        (4, str(committed(place)[4])) for place in (folder, store)
    }
    run.manager.close()
    assert [" is not uploaded: superseded by step " in line for line in run.said] == [True, True], (
        run.said
    )
    assert run.numbers["checkpoint_failures"] == 0
    assert_whole(folder, {3, 4})
    assert_whole(store, {1, 4})


def test_a_running_save_is_awaited_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop request during an evaluation: the step was saved before it."""
    gate = Gate(tmp_path / "commit/e000000-s0000000001.json", tmp_path / "gate", monkeypatch)
    run = Run(tmp_path, orphan_seconds=3600.0)
    assert run.start(1)
    run.until(gate.reached)
    opening = threading.Timer(0.5, gate.open)
    opening.start()
    assert run.start(1, wait=True)
    opening.join()
    run.manager.close()
    assert len(list((tmp_path / "ckpt").glob("*/*"))) == 1, run.said
    assert_whole(tmp_path, {1})


def held_run(tmp_path: Path, hold: str) -> tuple[Run, Path]:
    """A run with step 1 in its store, which then holds up what `hold` says; and the file that does."""
    store = tmp_path / "store"
    run = Run(tmp_path / "local", remote=f"tests.checkpoint.held.HeldStore://{store}", keep_last=1)
    run.save(1)
    (store / hold).touch()
    return run, store / hold


def save_on_disk(run: Run, step: int) -> None:
    assert run.start(step)
    run.until(lambda: run.manager.last_good is not None and run.manager.last_good.step == step)


def test_a_store_that_is_down_does_not_fill_the_disk(tmp_path: Path) -> None:
    """Beside the one that is being uploaded and the one that waits, the disk keeps `keep_last`."""
    run, held = held_run(tmp_path, "hold")
    for step in range(2, 9):
        save_on_disk(run, step)
    wait_for(lambda: {path.name[-1] for path in tmp_path.glob("local/ckpt/*")} <= {"2", "7", "8"})
    assert sum("not uploaded: superseded by step" in line for line in run.said) >= 4
    held.unlink()
    run.until(lambda: run.numbers.get("checkpoint_step") == 8)
    run.manager.close()
    assert run.numbers["checkpoint_failures"] == 0
    assert_whole(tmp_path / "local", {8})
    assert_whole(tmp_path / "store", {8})


def test_a_store_that_hangs_in_retention_delays_no_local_commit(tmp_path: Path) -> None:
    run, held = held_run(tmp_path, "hold-removals")
    for step in range(2, 6):
        save_on_disk(run, step)
    held.unlink()
    run.until(lambda: run.numbers.get("checkpoint_step") == 5)
    run.manager.close()
    assert_whole(tmp_path / "local", {5})
    assert_whole(tmp_path / "store", {5})
