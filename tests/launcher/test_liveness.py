"""The thread beside a rank: limits, the clock, the STOP file, PROGRESS, and where a rank stands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import Store

from clip_train import dist
from clip_train.stop import StopRequest
from launcher.runtime.environment import RankEnv
from launcher.runtime.error_reports import FOLDER, read_marks
from launcher.runtime.launch import run_agent
from launcher.runtime.rendezvous import meet
from launcher.runtime.watchdog import LaunchConfig, Liveness, phase_limit, position, stop_time, unfinished
from tests.launcher.conftest import PATIENCE, ROOT, free_port, until


def test_the_limit_of_a_step_follows_the_steps():
    config = LaunchConfig()
    assert phase_limit(config, "step", deque()) == 300
    assert phase_limit(config, "step", deque([1.0] * 9)) == 300
    assert 20 * 40 <= phase_limit(config, "step", deque([40.0] * 9)) <= 40 * 40
    assert phase_limit(LaunchConfig(hang_step_seconds=7), "step", deque([40.0])) == 7
    assert phase_limit(config, "save", deque([40.0])) == config.hang_save_seconds


@pytest.mark.parametrize(
    "end, now, expected",
    [("100000", 0, 100000 - 120), ("100", 0, 75), ("100", 200, 100), ("", 0, None), ("UNLIMITED", 0, None)],
)
def test_the_clock(end, now, expected):
    assert stop_time(LaunchConfig(), {"SLURM_JOB_END_TIME": end}, now) == expected


def test_the_stop_file_and_progress(tmp_path):
    stop = StopRequest()
    liveness = Liveness(LaunchConfig(), stop, run_dir=tmp_path, environ={})
    steps = iter([3])
    liveness.committed = lambda: next(steps, 5)
    liveness.start()
    try:
        assert until(lambda: (tmp_path / "PROGRESS").exists() and (tmp_path / "PROGRESS").read_text() == "5\n")
        assert stop.reason is None
        (tmp_path / "STOP").touch()
        assert until(lambda: stop.reason is not None)
        assert "STOP" in stop.reason
    finally:
        liveness.close()


def test_a_disk_that_does_not_answer_ends_no_watch(tmp_path):
    beats = []
    liveness = Liveness(LaunchConfig(), StopRequest(), run_dir=tmp_path / ("x" * 300), environ={})  # ENAMETOOLONG
    liveness.committed = lambda: beats.append(1) or len(beats)
    liveness.start()
    try:
        assert until(lambda: len(beats) > 2)
    finally:
        liveness.close()


def test_the_end_of_the_jobs_time_asks_for_a_stop():
    stop = StopRequest()
    liveness = Liveness(LaunchConfig(), stop, environ={"SLURM_JOB_END_TIME": str(int(time.time()))})
    liveness.start()
    try:
        assert until(lambda: stop.reason is not None)
    finally:
        liveness.close()


def test_the_first_step_belongs_to_the_start():
    told = []
    liveness = Liveness(
        LaunchConfig(), StopRequest(), environ={}, on_limit=lambda phase, limit: told.append((phase, limit)),
        on_first_step=lambda: told.append("first"),
    )  # fmt: skip
    try:
        liveness.phase("step")
        assert told == []
        liveness.phase("step")
        assert told == ["first", ("step", 300.0)]
        liveness.phase("save")
        liveness.phase("step")
        assert told[2:] == [("save", 3600.0), ("step", 300.0)]
    finally:
        liveness.close()


def test_where_a_rank_stands():
    told, waiting = position(sys._getframe())
    assert not waiting and "test_where_a_rank_stands" in told


@pytest.fixture
def wait_in_c() -> Iterator[Callable[[], object]]:
    """As tensor.tolist does, until the test is over."""
    lock = threading.Lock()
    lock.acquire()
    yield lock.acquire
    lock.release()


@contextmanager
def standing(work: Callable[[], object], inside: str, waits: bool) -> Iterator[tuple[str, bool]]:
    """Where a thread that does `work` stands, once it is in a function of this name and seen to wait, or not to."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    seen: list[tuple[str, bool]] = []

    def there() -> bool:
        """On its way to the call in C it may be caught in a helper."""
        frame = sys._current_frames().get(thread.ident)
        if frame is None or inside not in [f.name for f in traceback.extract_stack(frame)]:
            return False
        seen.append(position(frame))
        return seen[-1][1] is waits

    assert until(there, 120), seen[-1:]
    yield seen[-1]


def test_a_rank_that_reads_the_result_of_a_collective_waits(wait_in_c, monkeypatch):
    """NCCL's collectives return at once; the rank stands in .tolist(), outside torch.distributed."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **more: None)
    monkeypatch.setattr(torch, "tensor", lambda *values, **more: SimpleNamespace(tolist=wait_in_c))
    with standing(lambda: dist.max_scalars(1.0), "max_scalars", True) as (told, waiting):
        assert waiting and told.startswith("waiting in max_scalars, called from launcher/test_liveness.py")


def test_a_rank_that_does_its_own_work_under_an_agreement_hangs_by_itself(wait_in_c):
    def read_a_disk_that_does_not_answer() -> None:
        wait_in_c()

    name = "read_a_disk_that_does_not_answer"
    with standing(lambda: dist.agreed(read_a_disk_that_does_not_answer), name, False) as (told, waiting):
        assert not waiting and name in told


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_waits_for_the_others_to_come_waits(missing):
    def env(rank: int) -> RankEnv:
        return RankEnv(rank, 2, 0, 1, "127.0.0.1", port, "this test")

    port = free_port()
    inside = "_wait_for_word" if missing else "open_store"  # rank 0 holds the store
    stores: list[Store] = []  # kept until both have met: rank 0's is the server, and would hang up on rank 1
    with standing(lambda: stores.append(meet(env(1 - missing), 300)), inside, True) as (told, waiting):
        assert waiting and told.startswith("waiting in meet, called from launcher/test_liveness.py")
        stores.append(meet(env(missing), 300))
        assert until(lambda: len(stores) == 2)


def entry(name: str, state: str, group: str = "0", retired: bool = False) -> dict:
    return {"process_group": [group, "default_pg"], "profiling_name": name, "state": state, "retired": retired}


@pytest.mark.parametrize(
    "entries, told",
    [
        ([], None),
        ([entry("nccl:all_reduce", "completed")], None),
        ([entry("nccl:all_reduce", "completed"), entry("nccl:all_reduce", "scheduled")], "nccl:all_reduce"),
        ([entry("nccl:all_gather", "started", "7"), entry("nccl:all_reduce", "completed")], "nccl:all_gather"),
        ([entry("nccl:send", "scheduled"), entry("nccl:coalesced", "completed")], None),
        ([entry("nccl:send", "scheduled"), entry("nccl:coalesced", "started")], "nccl:coalesced"),
        ([entry("nccl:all_reduce", "scheduled", retired=True)], None),
        ([entry("gloo:all_reduce", "scheduled")], None),  # blocks in torch.distributed itself
    ],
)
def test_a_collective_that_is_not_finished(entries, told):
    assert unfinished(entries) == told


def test_the_flight_recorder_of_this_torch_can_be_read():
    code = (
        "import torch, torch.distributed as d; from launcher.runtime.watchdog import recorded, unfinished\n"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
        "d.all_reduce(torch.ones(2)); entries, missing = recorded()\n"
        "assert {'process_group', 'profiling_name', 'state', 'retired'} <= entries[-1].keys(), (entries, missing)\n"
        "entries[-1]['profiling_name'] = 'nccl:all_reduce'; assert unfinished(entries) is None, entries\n"
        "d.destroy_process_group()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=PATIENCE)


def test_the_mark_of_a_rank_behind_an_unfinished_collective_says_that_it_waits(tmp_path):
    code = (
        "import sys, time; from launcher.runtime import watchdog as liveness\n"
        "pending = {'profiling_name': 'nccl:all_reduce', 'state': 'scheduled'}\n"
        "liveness.recorded = lambda: ([pending], '')\n"
        "config = liveness.LaunchConfig(hang_start_seconds=0.5)\n"
        "liveness.Liveness(config, liveness.StopRequest(), environ={}).start(); time.sleep(1000)\n"
    )
    environ = {**os.environ, FOLDER: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, check=False, timeout=PATIENCE)
    (mark,) = read_marks(tmp_path)
    assert (done.returncode, mark.kind, mark.waiting) == (1, "hang", True)
    assert "nccl:all_reduce is unfinished" in mark.message


def test_a_signal_that_comes_as_the_agent_ends_does_not_change_its_status():
    """Python hands handlers back to the system when it ends, not what is ignored."""
    assert run_agent(lambda: None, StopRequest()) == 0
    assert {signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)} == {signal.SIG_IGN}


def test_signals_are_flags_and_a_second_term_does_not_kill():
    stop = StopRequest()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        stop.listen()
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.reason == "SIGUSR1"  # the first
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_is_seen_while_the_main_thread_is_in_c(tmp_path):
    """A process that never returns to Python, as in a rendezvous whose other ranks are gone."""
    code = (
        "import ctypes, time; from clip_train.stop import StopRequest; from launcher.runtime.watchdog import *\n"
        "stop = StopRequest(); stop.listen(); Liveness(LaunchConfig(), stop, environ={}).start()\n"
        "print('up', flush=True)\n"
        "mutex = ctypes.create_string_buffer(64); lock = ctypes.CDLL(None).pthread_mutex_lock\n"
        "lock(mutex); lock(mutex)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 75
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
