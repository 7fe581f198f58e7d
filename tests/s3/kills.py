"""A process that saves to a store on and on, and is killed: with its checkpoint writer, at any moment."""

from __future__ import annotations

import multiprocessing
import os
import random
import select
import shutil
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from tests.checkpoint.eyes import damaged_in, newest_in
from tests.checkpoint.runs import the_writer
from tests.s3.bucket import Bucket
from tests.s3.runs import Run, assert_is

PADDING = 1_500_000  # floats: an upload in two parts, which lasts long enough to be hit


def save_on_and_on(folder: Path, url: str, pipe: Connection) -> None:
    """Says which process writes, from which step it goes on, and then each step that is committed in the store."""
    run = Run(folder, url, keep_last=2)
    resumed = run.resume()
    step = 0
    if resumed is not None:
        # a kill never damages a committed one
        assert assert_is(resumed, resumed.step).skipped == {}
        step = resumed.step
    run.manager.begin()
    pipe.send(the_writer())
    pipe.send(step)
    while True:
        step += 1
        assert run.save(step, padding=PADDING), run.said
        pipe.send(step)


def newest_of(bucket: Bucket, disk: Path) -> int:
    """The step to go on from: a kill may leave a checkpoint on the disk whose upload was not complete."""
    stored = [(marker["epoch"], marker["step"]) for marker in bucket.commits("run").values()]
    return max([*newest_in(disk), *stored], default=(0, 0))[1]


@dataclass
class Kills:
    """What came of them."""

    kills: int = 0
    in_a_save: int = 0  # the store had files of a save that was not committed
    fresh_disks: int = 0
    resumed: int = 0  # lives that went on from a checkpoint
    steps: int = 0
    wrong: list[str] = field(default_factory=list)


def kill_again_and_again(bucket: Bucket, folder: Path, kills: int, seed: str) -> Kills:
    """Lives of one run, on this disk or on an empty one; after each kill the store is read by code that is not the
    package's."""
    rng, result, took = random.Random(seed), Kills(), 1.0
    url, disk = f"{bucket.url}/run", folder / "disk"
    for _ in range(kills):
        if rng.random() < 0.5:  # another machine
            shutil.rmtree(disk, ignore_errors=True)
            result.fresh_disks += 1
        expected = newest_of(bucket, disk)
        receiver, sender = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=save_on_and_on, args=(disk, url, sender))
        process.start()
        sender.close()
        writer = os.pidfd_open(receiver.recv())
        heard = [receiver.recv()]
        if heard[0] != expected:
            result.wrong.append(f"went on from {heard[0]} instead of {expected}")
        for _ in range(rng.randrange(3)):
            began = time.monotonic()
            heard.append(receiver.recv())
            took = time.monotonic() - began
        time.sleep(rng.uniform(0.0, 1.2 * took))
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            result.wrong.append(f"a process has failed by itself: {process.exitcode}")
        signal.pidfd_send_signal(writer, signal.SIGKILL)
        end = select.poll()
        end.register(writer, select.POLLIN)
        end.poll()
        os.close(writer)
        while receiver.poll():
            try:
                heard.append(receiver.recv())
            except EOFError:
                break
        time.sleep(0.3)  # a request that is on its way may still be carried out
        newest = bucket.newest_step("run") or 0
        committed = max(heard[1:], default=0)  # in the store; the first may be on the disk alone
        if committed > newest:
            result.wrong.append(f"step {committed} was committed, and the store has {newest}")
        result.wrong += bucket.incomplete("run") + damaged_in(disk)
        result.in_a_save += bool(bucket.orphans("run"))
        result.kills += 1
        result.resumed += heard[0] > 0
        result.steps = max(heard)
    last = Run(disk, url, keep_last=2)
    assert_is(last.resume(), newest_of(bucket, disk))
    # these clear up after all the kills
    assert last.save(result.steps + 2) and last.save(result.steps + 3)
    last.manager.close()
    result.wrong += bucket.incomplete("run")
    result.wrong += [f"left over: {key}" for key in bucket.orphans("run")]
    return result
