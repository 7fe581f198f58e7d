"""SIGKILL at any moment of a save leaves the previous checkpoint whole and found."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.checkpoint.parts import committed
from tests.checkpoint.runs import Run, assert_is, writers


def save_on_and_on(folder: Path, pipe: Connection) -> None:
    """Says which process writes, from which step it goes on, and then each step that is committed."""
    run = Run(folder, keep_last=2)
    resumed = run.resume()
    if resumed is not None:
        assert (
            assert_is(resumed, resumed.step).skipped == {}
        )  # a kill never makes a committed one damaged
    run.manager.begin()
    step = resumed.step if resumed else 0
    while not (found := writers()):  # it is there, but may have no command line for a moment
        time.sleep(0.01)
    pipe.send(found[0])
    pipe.send(step)
    padding = torch.zeros(2_000_000)  # writing lasts long enough to be hit
    while True:
        step += 1
        run.save(step, padding=padding)
        pipe.send(step)


def wait_for_end(process: int) -> None:
    """process: a pidfd. The writer outlives its rank by a moment, in which it may still commit, or remove."""
    end = select.poll()
    end.register(process, select.POLLIN)
    end.poll()
    os.close(process)


# The long one is for `make test-all`; benchmarks/checkpoint_storm.py kills whole trainings that save to a bucket.
# at_least: kills that hit a save; about half of them do, and of a few it may be none.
@pytest.mark.parametrize("trials, at_least", [(6, 0), pytest.param(40, 6, marks=pytest.mark.full)])
def test_kills_in_the_middle_of_saving(tmp_path: Path, trials: int, at_least: int) -> None:
    rng = random.Random(0)
    heard_before, in_a_save, took = 0, 0, 0.0
    for _ in range(trials):
        receiver, sender = Pipe(duplex=False)
        process = warm.process(save_on_and_on, tmp_path, sender)
        process.start()
        sender.close()
        writer = os.pidfd_open(receiver.recv())
        heard = [receiver.recv()]
        for _ in range(rng.randrange(3) if took else 1):
            began = time.monotonic()
            heard.append(receiver.recv())
            took = (
                time.monotonic() - began
            )  # seconds of a save, on this machine and as busy as it is
        time.sleep(rng.uniform(0.0, 1.2 * took))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it has failed by itself"
        while receiver.poll():
            try:
                heard.append(receiver.recv())
            except EOFError:
                break
        wait_for_end(writer)
        whole_ones = committed(tmp_path)  # asserts that each is whole
        newest = max(whole_ones, default=0)
        # what it has heard of is there; it may have been killed before it heard of the last one
        assert max(heard) <= newest <= max(heard) + 1, (heard, newest)
        assert heard[0] >= heard_before, "a resume has lost a committed step"
        receiver.close()
        attempts = set((tmp_path / "ckpt").glob("*/*"))
        in_a_save += bool(attempts - set(whole_ones.values())) or any(tmp_path.rglob("*.part"))
        heard_before = max(heard)
    assert in_a_save >= at_least, "too few kills hit a save: the test has lost its point"
    run = Run(tmp_path, keep_last=2)
    assert assert_is(run.resume(), newest).skipped == {}
    run.save(newest + 1)  # clears up after all the kills
    run.manager.close()
    with_files = {path.parent for path in (tmp_path / "ckpt").glob("*/*/*")}
    assert with_files == set(committed(tmp_path).values()) and len(with_files) <= 3
    assert not list((tmp_path / "ckpt").rglob("*.part"))
