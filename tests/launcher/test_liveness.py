"""The thread beside a rank: limits, the clock, the STOP file, PROGRESS, and where a rank stands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque

import pytest

from clip_train.stop import StopRequest
from launcher.liveness import LaunchConfig, Liveness, phase_limit, position, stop_time
from tests.launcher.conftest import ROOT


def until(condition, timeout=10.0) -> bool:
    end = time.monotonic() + timeout
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


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
        "import ctypes, time; from clip_train.stop import StopRequest; from launcher.liveness import *\n"
        "stop = StopRequest(); stop.listen(); Liveness(LaunchConfig(), stop, environ={}).start()\n"
        "print('up', flush=True)\n"
        "mutex = ctypes.create_string_buffer(64); lock = ctypes.CDLL(None).pthread_mutex_lock\n"
        "lock(mutex); lock(mutex)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 75
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
