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
from clip_train.errors import Preempted, UserError
from clip_train.stop import SIGNALS, StopRequest
from launcher.runtime.environment import RankEnv
from launcher.runtime.heartbeat import Heartbeat
from launcher.runtime.launch import launch_local, local_ranks
from launcher.runtime.outcome import Outcome
from launcher.runtime.rendezvous import connect, meet
from launcher.runtime.verdict import RUN_DIR, read_verdict
from launcher.runtime.watchdog import (
    LaunchConfig,
    Phase,
    Watchdog,
    longest_limit,
    phase_limit,
    position,
)
from tests.launcher.conftest import PATIENCE, ROOT, free_port, until


def test_the_limit_of_a_step_follows_the_steps():
    assert phase_limit(None, Phase.STEP, deque()) == 300
    assert phase_limit(None, Phase.STEP, deque([1.0] * 9)) == 300
    assert 20 * 40 <= phase_limit(None, Phase.STEP, deque([40.0] * 9)) <= 40 * 40
    assert phase_limit(7, Phase.STEP, deque([40.0])) == 7


@pytest.mark.parametrize(
    ("phase", "seconds"),
    [("start", 3600), ("save", 3600), ("evaluate", 7200), ("end", 3600), ("close", 3600)],
)
def test_hang_seconds_extends_the_limits_of_other_phases_and_shortens_none(phase, seconds):
    assert phase_limit(None, Phase(phase), deque([400.0])) == seconds
    assert phase_limit(7, Phase(phase), deque([400.0])) == seconds
    assert phase_limit(9000, Phase(phase), deque([400.0])) == 9000


@pytest.mark.parametrize(("hang_seconds", "longest"), [(None, 7200), (7, 7200), (9000, 9000)])
def test_no_phase_has_more_than_the_longest_limit(hang_seconds, longest):
    """Collectives time out after twice as long: the watchdog of the rank that hangs is first."""
    assert longest_limit(hang_seconds) == longest


def test_the_stop_file_and_progress(tmp_path):
    stop = StopRequest()
    watchdog = Watchdog(LaunchConfig(), stop, run_dir=tmp_path, environ={})
    steps = iter([3])
    watchdog.committed = lambda: next(steps, 5)
    watchdog.start()
    try:
        assert until(
            lambda: (
                (tmp_path / "PROGRESS").exists() and (tmp_path / "PROGRESS").read_text() == "5\n"
            )
        )
        assert stop.reason is None
        (tmp_path / "STOP").touch()
        assert until(lambda: stop.reason is not None)
        assert "STOP" in stop.reason
    finally:
        watchdog.end()


def test_nothing_that_goes_wrong_in_a_look_ends_the_watch(tmp_path):
    beats = []
    watchdog = Watchdog(LaunchConfig(), StopRequest(), run_dir=tmp_path, environ={})
    watchdog.committed = lambda: beats.append(1) or 1 / 0 if len(beats) < 3 else None
    watchdog.start()
    try:
        assert until(lambda: len(beats) > 2)
    finally:
        watchdog.end()


def test_a_disk_that_does_not_answer_ends_no_watch(tmp_path):
    beats = []
    watchdog = Watchdog(
        LaunchConfig(), StopRequest(), run_dir=tmp_path / ("x" * 300), environ={}
    )  # ENAMETOOLONG
    watchdog.committed = lambda: beats.append(1) or len(beats)
    watchdog.start()
    try:
        assert until(lambda: len(beats) > 2)
    finally:
        watchdog.end()


def test_the_first_step_belongs_to_the_start():
    watchdog = Watchdog(LaunchConfig(), StopRequest(), environ={})
    try:
        for phase, limit in (("step", 3600), ("step", 300), ("save", 3600), ("step", 300)):
            watchdog.phase(phase)
            assert watchdog.limit == limit
    finally:
        watchdog.end()


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
    """Where a thread that does `work` stands, once it is in a function of this name and seen to
    wait, or not to."""
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
        assert waiting and told.startswith(
            "waiting in max_scalars, called from launcher/test_watchdog.py"
        )


def test_a_rank_busy_inside_an_agreement_hangs_by_itself(wait_in_c):
    def read_a_disk_that_does_not_answer() -> None:
        wait_in_c()

    name = "read_a_disk_that_does_not_answer"
    with standing(lambda: dist.agreed(read_a_disk_that_does_not_answer), name, False) as (
        told,
        waiting,
    ):
        assert not waiting and name in told


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_waits_for_the_others_to_come_waits(missing):
    def env(rank: int) -> RankEnv:
        return RankEnv(rank, 2, 0, 1, "127.0.0.1", port, "this test")

    def join(rank: int) -> None:
        beat = Heartbeat(env(rank))
        held.append((beat, store := connect(env(rank), beat, 300)))
        meet(env(rank), beat, store, 300)
        met.append(rank)

    port = free_port()
    held: list[
        tuple[Heartbeat, Store]
    ] = []  # until both have met: rank 0's is the server, and would hang up on rank 1
    met: list[int] = []
    inside = "meet" if missing else "connect"  # rank 0 holds the store
    with standing(lambda: join(1 - missing), inside, True) as (where, waiting):
        assert waiting and where.startswith(
            f"waiting in {inside}, called from launcher/test_watchdog.py"
        )
        join(missing)
        assert until(lambda: len(met) == 2)
    for beat, _ in sorted(held, key=lambda each: -each[0].env.rank):
        beat.leave()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_before_there_are_ranks_starts_none(tmp_path, monkeypatch, number):
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    stop = StopRequest()
    stop.ask(number.name)
    before = {number: signal.getsignal(number) for number in SIGNALS if number != signal.SIGINT}
    try:
        with pytest.raises(Preempted, match=number.name) as caught:
            launch_local(2, ["train", "nowhere.yaml"], stop)
        assert Outcome().finish(caught.value) == 75
        # as Python ends it hands handlers back to the system, but not what is ignored
        assert {signal.getsignal(number) for number in before} == {signal.SIG_IGN}
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    word, why = read_verdict(tmp_path)
    assert word == "PREEMPTED" and number.name in why["reason"]


def test_a_number_of_ranks_that_cannot_be():
    with pytest.raises(UserError, match=r"--ranks \(-3\) must be at least 1"):
        local_ranks(-3, {})


def test_signals_are_flags_and_a_second_term_does_not_kill():
    stop = StopRequest()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        stop.listen()
        again = (signal.SIGTERM, signal.SIGUSR2, signal.SIGXCPU, signal.SIGINT)
        for number in (signal.SIGUSR1, signal.SIGTERM, *again):
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
        "import ctypes, time; from clip_train.stop import StopRequest; from "
        "launcher.runtime.watchdog import *\n"
        "stop = StopRequest(); stop.listen(); Watchdog(LaunchConfig(), stop, environ={}).start()\n"
        "print('up', flush=True)\n"
        "mutex = ctypes.create_string_buffer(64); lock = ctypes.CDLL(None).pthread_mutex_lock\n"
        "lock(mutex); lock(mutex)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        process.stdout.readline()
        time.sleep(1.0)  # it is on its way into the lock
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 75
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
