"""Savers that are slow, stopped or killed, on two real ranks: training goes on, and the next save is whole."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_train import dist
from clip_train.checkpoint import CheckpointConfig, CheckpointManager, client, schedule
from clip_train.checkpoint.client import SaverClient
from clip_train.checkpoint.layout import new_prefix
from clip_train.checkpoint.messages import peer_of
from clip_train.checkpoint.order import Order, Settings
from clip_train.checkpoint.outcomes import Outcomes
from clip_train.checkpoint.pipeline import Pipeline
from clip_train.checkpoint.retention import Policy
from clip_train.checkpoint.snapshot import SharedBuffer, plan_file
from clip_train.errors import CheckpointError
from tests.checkpoint.parts import bits, committed, cut, whole
from tests.ranks import run_ranks

ENDED = "the process that writes checkpoints has ended"
PATIENCE = 300.0  # seconds for what comes in a moment, on a machine that may hold any process up


class Rank:
    """One rank's life. Its saver stopped is a disk that hangs; each rank may have a saver to itself."""

    def __init__(self, folder: Path, *, own_saver: bool = True, **config: Any) -> None:
        self.said: list[str] = []
        self.numbers: dict[str, float] = {}
        if own_saver:
            client._node = lambda: (f"node {dist.rank()}", "", 0)
            client._EXIT_SECONDS = PATIENCE  # what it has ended of is told
        config = {"grace_seconds": PATIENCE, "orphan_grace_minutes": 0.0, "keep_last": 50, **config}
        self.manager = CheckpointManager(CheckpointConfig(**config), folder, log=self.said.append)
        assert self.manager.resume() is None
        self.manager.begin()

    def save(self, step: int, *, wait: bool = False) -> bool:
        rank, world_size = dist.rank(), dist.world_size()
        own = {"rng": torch.tensor([rank, step])}
        return self.manager.save(step, cut(whole(step), rank, world_size), own, {"step": step}, wait=wait)

    def signal(self, number: int) -> int:
        process = self.manager._saver._process  # type: ignore[union-attr]
        assert process is not None
        os.kill(process.pid, number)
        return process.pid

    def stop(self) -> None:
        """Returns when it does nothing any more."""
        pid, end = self.signal(signal.SIGSTOP), time.monotonic() + PATIENCE
        while not stands_still(pid):
            assert time.monotonic() < end
            time.sleep(0.01)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, self.said
            self.numbers |= self.manager.poll()
            time.sleep(0.01)

    def until_written(self) -> None:
        self.until(lambda: self.manager._outcomes.writing is None)
        dist.barrier()


def stands_still(pid: int) -> bool:
    try:
        return all(stat.read_text().rsplit(") ", 1)[1][0] == "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat"))
    except OSError:  # a thread that has just ended
        return False


def assert_whole(folder: Path, steps: set[int]) -> None:
    """By other code's eyes: these are committed, hold what was saved, and nothing else is left."""
    found = committed(folder)
    assert set(found) == steps
    assert {path.parent for path in (folder / "ckpt").glob("*/*/*")} == set(found.values())
    assert set((folder / "ckpt").glob("*/*")) == set(found.values())
    assert not list((folder / "tmp").glob("*"))


def assert_holds(folder: Path, step: int) -> None:
    (attempt,) = (folder / "ckpt" / f"s{step:010d}").iterdir()
    resumed = CheckpointManager(CheckpointConfig(resume=str(attempt)), folder).resume()
    assert resumed is not None
    for (name, slot), tensor in whole(step).items():
        assert bits(resumed.reader.read(name, slot, 0, tensor.numel())) == bits(tensor)


def hanging_disk(folder: Path) -> dict[str, Any]:
    run = Rank(folder, every_steps=2, max_failed_saves=1)
    due: list[int] = []

    def train(*steps: int) -> None:
        for step in steps:
            run.numbers |= run.manager.poll()
            if run.manager.due(step):
                due.append(step)
                assert run.save(step)
                if dist.is_main():  # its own buffer is free again, whatever rank 1's is
                    run.until(lambda: run.manager._outcomes.writing is None)

    if dist.rank() == 1:
        run.stop()
    dist.barrier()
    train(*range(1, 9))
    if dist.rank() == 1:
        run.go_on()
    run.until_written()
    train(9)
    run.until_written()
    train(10, 11)
    run.until_written()
    if dist.rank() == 1:
        run.stop()
    dist.barrier()
    train(12, 13, 14)
    if dist.rank() == 1:
        threading.Timer(0.5, run.go_on).start()
    last = run.save(15, wait=True)  # waits for the buffer, then for the commit
    run.manager.close()
    return {"due": due, "last": last, "said": run.said, "numbers": run.numbers}


@pytest.mark.distributed
def test_a_save_that_comes_too_early_is_put_off(tmp_path: Path) -> None:
    zero, one = run_ranks(hanging_disk, 2, tmp_path)
    assert zero["due"] == one["due"] == [2, 9, 10, 12]
    assert zero["last"] and one["last"]
    assert zero["numbers"]["checkpoint_late_steps"] == 5  # 9, which was due at 4
    assert [line.split(" to ")[0] for line in zero["said"]] == [
        f"checkpoint of step {step} is put off: step {held} is still being written" for step, held in ((4, 2), (14, 12))
    ]
    assert one["said"] == []
    assert_whole(tmp_path, {2, 9, 10, 12, 15})
    for step in (2, 9, 15):
        assert_holds(tmp_path, step)


def test_minutes_count_from_the_save_that_was_put_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(schedule, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    run = Rank(tmp_path, own_saver=False, every_steps=None, every_minutes=10.0)
    due = []
    for step in range(1, 2801):
        now[0] += 1.0
        if step == 500:
            run.stop()
        if step == 1500:
            run.go_on()
            run.until_written()
        if run.manager.due(step):
            due.append(step)
            assert run.save(step)
            if step >= 1500:
                run.until_written()
    run.manager.close()
    assert due == [600, 1500, 2100, 2700]
    assert sum("is put off" in line for line in run.said) == 1


def test_a_disk_that_hangs_for_good_ends_the_run(tmp_path: Path) -> None:
    run = Rank(tmp_path, own_saver=False, every_steps=1, max_failed_saves=2, save_timeout_minutes=0.005)
    run.stop()
    assert run.manager.due(1) and run.save(1)
    step = iter(range(2, 10**6))
    with pytest.raises(CheckpointError, match=r"step 2 failed \(2 in a row\).* step 1 is still being written to"):
        run.until(lambda: run.manager.due(next(step)))
    assert "is put off" in run.said[0] and "step 2 failed (1 in a row)" in run.said[1] and len(run.said) == 2
    run.kill()
    run.manager.close()


DEATHS = [
    (victims, moment) for victims in ((0,), (1,), (0, 1)) for moment in ("idle", "writing", "written", "at the end")
]


def deaths(folder: Path, remote: str | None) -> list[dict[str, Any]]:
    """A good save, a death, a good save; again and again."""
    run, rank = Rank(folder, remote=remote), dist.rank()
    steps, seen = itertools.count(1), []
    for victims, moment in DEATHS:
        dies = rank in victims
        assert run.save(next(steps), wait=True)
        run.until_written()  # rank 1's word is there a moment before it hears that its buffer is free
        run.said.clear()
        if (moment in ("writing", "at the end") and dies) or (moment == "written" and not dies):
            run.stop()
        dist.barrier()
        survived = None
        if moment == "at the end":
            if dies:
                threading.Timer(0.3, run.kill).start()
            survived = run.save(next(steps), wait=True)
        elif moment != "idle":
            assert run.save(next(steps))
        if moment == "written" and dies:
            run.until(lambda: run.manager._outcomes.writing is None)
        dist.barrier()
        if dies and moment != "at the end":
            run.kill()
            run.until(lambda: not run.manager._saver.connected)  # type: ignore[union-attr]
        elif moment == "written":
            run.go_on()
        dist.barrier()
        step = next(steps)
        assert run.save(step, wait=True)
        seen.append({"victims": victims, "moment": moment, "survived": survived, "said": list(run.said), "step": step})
    run.manager.close()
    return seen


@pytest.mark.distributed
@pytest.mark.parametrize("remote", [False, True])
def test_savers_that_are_killed(tmp_path: Path, remote: bool) -> None:
    folder, store = tmp_path / "local", tmp_path / "store"
    zero, one = run_ranks(deaths, 2, folder, str(store) if remote else None)
    for seen, other in zip(zero, one, strict=True):
        told = [line for line in seen["said"] if ENDED in line]
        assert 1 <= len(told) <= len(seen["victims"]), seen
        assert "signal 9" in told[0] and not any("2 in a row" in line for line in seen["said"]), seen
        if seen["moment"] == "at the end":
            assert seen["survived"] and other["survived"], seen
        assert other["said"] == []
    last = zero[-1]["step"]
    found = committed(folder)
    # 3 saves for each death but where there was nothing to save; those that died with a saver are not there
    assert {seen["step"] for seen in zero} <= set(found) and len(found) >= 2 * len(DEATHS)
    assert_whole(folder, set(found))
    assert_holds(folder, last)
    if remote:
        assert_whole(store, set(committed(store)))
        assert {seen["step"] for seen in zero} <= set(committed(store))


def deaths_after_the_local_commit(folder: Path, store: Path) -> list[Any]:
    """The last save is on the disk, and its upload fails for a while: then a saver dies."""
    run, rank = Rank(folder, remote=str(store)), dist.rank()
    assert run.save(1, wait=True)
    saved = []
    for step in (2, 3):
        obstacle = store / "ckpt" / f"s{step:010d}"
        obstacle.touch()
        dist.barrier()

        def die(step: int = step, obstacle: Path = obstacle) -> None:
            while not list(folder.glob(f"commit/*-s{step:010d}.json")):
                time.sleep(0.01)
            run.kill()
            time.sleep(0.5)
            obstacle.unlink()

        if rank == step - 2:
            threading.Thread(target=die, daemon=True).start()
        saved.append(run.save(step, wait=True))
    run.manager.close()
    return [saved, run.said]


@pytest.mark.distributed
def test_a_save_that_was_committed_locally_is_uploaded_by_the_next_saver(tmp_path: Path) -> None:
    zero, one = run_ranks(deaths_after_the_local_commit, 2, tmp_path / "local", tmp_path / "store")
    assert zero[0] == one[0] == [True, True], zero
    assert sum(ENDED in line for line in zero[1]) == 2 and not any("another process" in line for line in zero[1])
    assert set(committed(tmp_path / "local")) == {1, 2, 3}
    assert_whole(tmp_path / "store", {1, 2, 3})
    resumed = CheckpointManager(CheckpointConfig(remote=str(tmp_path / "store")), tmp_path / "local").resume()
    assert resumed is not None and (resumed.step, resumed.skipped) == (3, [])


def death_of_the_common_one(folder: Path) -> list[Any]:
    client._EXIT_SECONDS = PATIENCE
    run = Rank(folder, own_saver=False)
    out: list[Any] = [run.save(1, wait=True)]
    run.until_written()
    if dist.is_main():
        run.stop()
    dist.barrier()
    out.append(run.save(2))
    dist.barrier()
    if dist.is_main():
        run.kill()
    run.until(lambda: not run.manager._saver.connected)  # type: ignore[union-attr]
    out += [run.save(3, wait=True), run.said]
    run.manager.close()
    return out


@pytest.mark.distributed
def test_a_saver_that_two_ranks_share_is_killed(tmp_path: Path) -> None:
    zero, one = run_ranks(death_of_the_common_one, 2, tmp_path)
    assert zero[:3] == one[:3] == [True, True, True]
    assert len(zero[3]) == 1 and f"step 2 failed (1 in a row): {ENDED} (signal 9)" in zero[3][0] and one[3] == []
    assert_whole(tmp_path, {1, 3})


def test_any_rank_of_a_node_may_start_the_next_saver(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """The first rank may not have noticed that its saver has died, and then wait for the others in a collective."""
    settings = Settings(str(tmp_path), None, True, 60.0, Policy(keep_last=1))
    ranks = [SaverClient(settings) for _ in range(4)]
    processes = [rank._process for rank in ranks]
    for rank in ranks[1:]:
        rank.close()
        rank._address, rank._leads = ranks[0]._address, False
    assert processes[0] is not None
    processes[0].kill()
    assert [told["told"] for told in ranks[0].news(PATIENCE)] == ["gone"]

    def on_all(action: Callable[[SaverClient], None]) -> None:
        """Each in a thread of its own, at once, as ranks do."""
        with ThreadPoolExecutor(len(ranks)) as pool:
            list(pool.map(action, ranks))

    on_all(lambda rank: rank.connect(0.0))
    assert all(rank.connected for rank in ranks)
    alive = [rank for rank in ranks if rank._process is not None and rank._process.poll() is None]
    on_all(SaverClient.close)
    assert len(alive) >= 1 and "Traceback" not in capfd.readouterr().err


@pytest.fixture
def bereft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SaverClient]:
    """Whose saver has died, and whose next one has a new address."""
    monkeypatch.setattr(client, "_CONNECT_SECONDS", 10 * PATIENCE)
    rank = SaverClient(Settings(str(tmp_path), None, True, 60.0, Policy(keep_last=1)))
    assert rank._process is not None
    rank._process.kill()
    assert [told["told"] for told in rank.news(PATIENCE)] == ["gone"]
    rank._address += "-next"
    yield rank
    rank.close()


def test_a_saver_that_is_dying_and_still_listens_is_not_taken_for_the_next(bereft: SaverClient) -> None:
    """Its end closes the connections one by one, and in any order."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + bereft._address)
        listener.listen()
        bereft._gone = os.getpid()

        def end() -> None:
            listener.accept()[0].close()
            listener.close()

        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        bereft.connect()
        ending.join()
    assert bereft._process is not None and bereft._connection is not None
    assert peer_of(bereft._connection)[0] == bereft._process.pid


def test_a_saver_that_has_its_address_and_does_not_listen_yet_is_waited_for(
    bereft: SaverClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank of the node has started it, and it is held up: those that are started beside it end at once."""
    start, starts = client._start, []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held_up:
        held_up.bind("\0" + bereft._address)

        def counted(address: str) -> Any:
            starts.append(address)
            if len(starts) == 3:
                held_up.listen()
            return start(address)

        monkeypatch.setattr(client, "_start", counted)
        monkeypatch.setattr(client, "_MOST_STARTS", 1)
        monkeypatch.setattr(client, "_LEADER_SECONDS", 0.0)
        bereft.connect()
        assert bereft._connection is not None and peer_of(bereft._connection)[0] == os.getpid()


def test_a_rank_that_has_more_than_a_thousand_files_open(tmp_path: Path) -> None:
    """Rank 0 of a large job has a connection to each of the others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1300), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    run = Rank(tmp_path, own_saver=False, every_steps=2)
    try:
        assert [run.manager.due(step) for step in (1, 2)] == [False, True]
        assert run.save(2, wait=True)
    finally:
        run.manager.close()
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_whole(tmp_path, {2})


def test_uploads_that_are_slower_than_saves_are_no_failures(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    policy = Policy(keep_last=9)
    pipeline = Pipeline(Settings(str(tmp_path / "local"), str(tmp_path / "store"), True, 60.0, policy), told.append)
    plan = plan_file(0, [], {"rng": torch.zeros(3)})
    buffer = SharedBuffer(plan.num_bytes, pin=False)
    buffer.fill(plan)
    pipeline.set_buffer(buffer.fd)
    begun, slow = threading.Event(), threading.Event()
    assert pipeline.remote is not None
    put_file = pipeline.remote.put_file

    def put_slowly(local: Path, name: str) -> None:
        begun.set()
        assert slow.wait(60)
        put_file(local, name)

    pipeline.remote.put_file = put_slowly  # type: ignore[method-assign,assignment]

    def until(kind: str, *steps: int) -> None:
        end = time.monotonic() + 60
        while {each["step"] for each in told if each["told"] == kind} != set(steps):
            assert time.monotonic() < end, told
            time.sleep(0.01)

    for step in (1, 2, 3, 4):
        pipeline.save(Order(step, new_prefix(0, step), 0, 0, 1, plan.num_bytes, {}))
        until("kept", *range(1, step + 1))
        assert begun.wait(60)
    until("overtaken", 2, 3)
    slow.set()
    until("done", 1, 4)
    until("rest", 1, 2, 3, 4)
    assert not any(each["told"] == "failed" for each in told)
    assert set(committed(tmp_path / "store")) == {1, 4} and set(committed(tmp_path / "local")) == {1, 2, 3, 4}
    outcomes = Outcomes(1, print)
    for step in (1, 2, 3, 4):
        outcomes.handed_over(step, next(each["prefix"] for each in told if each["step"] == step))
    for each in told:
        outcomes.hear(each)
    assert (outcomes.pending, outcomes.writing, outcomes.tidying, outcomes.failures) == ({}, None, set(), 0)
    assert outcomes.fatal is None and outcomes.last_good is not None and outcomes.last_good.step == 4
