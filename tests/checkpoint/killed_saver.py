"""Run as a script: forks a child that saves on and on, kills it at a random moment, many times over.

argv: folder, number of trials, seed. After each trial this process's own eyes look at the folder. At the end it prints
the newest step that is committed, and how many kills have hit a save.
"""

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import torch

from clip_train.checkpoint import CheckpointConfig, CheckpointManager
from tests.checkpoint.parts import bits, committed, cut, whole


def child(folder: Path, pipe: int) -> None:
    # padding makes writing the data last long enough to be hit
    padding = torch.zeros(2_000_000)
    manager = CheckpointManager(CheckpointConfig(keep_last=2, orphan_grace_minutes=0.0), folder)
    resumed = manager.resume()
    manager.begin()
    step = resumed.step if resumed else 0
    if resumed:
        assert resumed.skipped == [], resumed.describe()  # a kill never makes a committed one damaged
        for (name, slot), tensor in whole(step).items():
            assert bits(resumed.reader.read(name, slot, 0, tensor.numel())) == bits(tensor)
    os.write(pipe, f"{manager._saver._process.pid}\n{step}\n".encode())  # type: ignore[union-attr]
    while True:
        step += 1
        if manager.save(step, cut(whole(step), 0, 1), {"padding": padding}, {"step": step}, wait=True):
            os.write(pipe, f"{step}\n".encode())


def wait_for_end(process: int) -> None:
    """process: a pidfd. The saver outlives the child by a moment, in which it may still commit, or remove."""
    end = select.poll()
    end.register(process, select.POLLIN)
    end.poll()
    os.close(process)


def main() -> None:
    folder, trials, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)  # nothing that a fork would lose
    told_before, mid_save, took = 0, 0, 0.0
    for _ in range(trials):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                child(folder, write_end)
            finally:
                os._exit(3)
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            saver = os.pidfd_open(int(pipe.readline()))
            lines = [pipe.readline()]  # it has resumed
            for _ in range(rng.randrange(3) if took else 1):
                began = time.monotonic()
                lines.append(pipe.readline())
                took = time.monotonic() - began  # a save's seconds, on this machine and as busy as it is
            time.sleep(rng.uniform(0.0, 1.2 * took))
            os.kill(pid, signal.SIGKILL)
            told = [int(line) for line in [*lines, *pipe.read().splitlines()] if line]
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"the child failed by itself: {status}"
        wait_for_end(saver)
        whole_ones = committed(folder)  # asserts that each is whole
        newest = max(whole_ones, default=0)
        # what it was told is committed is there; it may have been killed before it was told
        assert max(told) <= newest <= max(told) + 1, (told, newest)
        assert told[0] >= told_before, "a resume lost a committed step"
        attempts = set((folder / "ckpt").glob("*/*"))
        mid_save += bool(attempts - set(whole_ones.values())) or any((folder / "tmp").glob("*"))
        told_before = max(told)
    print(json.dumps({"newest": newest, "mid_save": mid_save}))


if __name__ == "__main__":
    main()
