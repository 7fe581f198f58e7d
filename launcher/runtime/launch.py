"""`clip-train train` alone on a machine: one rank for each device, each a process that gets every signal once.

The store is here, so that it outlives every rank. Ranks end each other (`heartbeat`); this process only waits for them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from clip_train.errors import Preempted, UserError
from clip_train.stop import SIGNALS, StopRequest
from launcher.runtime import rendezvous
from launcher.runtime.environment import LAUNCHER, detect
from launcher.runtime.heartbeat import parse_claim
from launcher.runtime.watchdog import CLOSE_SECONDS

if TYPE_CHECKING:
    from torch.distributed import Store

TOGETHER_SECONDS = (
    CLOSE_SECONDS + 30
)  # for all ranks to end once one has failed; they do within 30 s, or close
LOST_SECONDS = (
    25.0  # the same once one is dead or frozen: no signal but KILL reaches a stopped process
)


def local_ranks(asked: int | None, environ: Mapping[str, str]) -> int:
    """How many ranks to start here: none of our own (1) where a launcher has started this process as a rank."""
    if asked is not None and asked < 1:
        raise UserError(f"--ranks ({asked}) must be at least 1; leave it out for one rank per GPU")
    if detect(environ).world_size > 1 or "RANK" in environ:
        return 1
    if asked is not None:
        return asked
    import torch

    return max(1, torch.cuda.device_count())


def launch_local(ranks: int, arguments: Sequence[str], stop: StopRequest) -> int:
    """Run `python -m launcher ARGUMENTS` as `ranks` ranks; their exit status. Preempted where `stop` was asked before.

    stop: has listened since the process began. A signal from now on goes to each rank, once.
    """
    handled = [
        number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN
    ]  # HUP is, under nohup
    signal.pthread_sigmask(
        signal.SIG_BLOCK, handled
    )  # the ranks begin with them blocked too, until they listen
    rendezvous.raise_open_files()
    store = rendezvous.serve("127.0.0.1", 0, seconds=60)
    world = {
        LAUNCHER: str(os.getpid()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    line = [sys.executable, "-m", "launcher", *arguments]
    processes: list[subprocess.Popen] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    try:
        if stop.look() is not None:
            raise Preempted(
                f"stopped by {stop.reason} before the first step; run the same line to begin"
            )
        for rank in range(ranks):
            environ = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # in sessions of their own: Ctrl-C of a terminal comes here alone
            processes.append(subprocess.Popen(line, env=environ, start_new_session=True))
        for number in handled:
            signal.signal(number, forward)
        if stop.look() is not None:  # a thread of some library has taken it
            forward(signal.SIGTERM, None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        return wait(processes, rendezvous.keys_of_ranks(store))
    finally:
        stop.ignore()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        for process in processes:
            process.kill()


def wait(processes: Sequence[subprocess.Popen], keys: Store) -> int:
    """0, or the exit status of the first rank that failed; after TOGETHER_SECONDS the others are given up, or after
    LOST_SECONDS. keys: the ranks' own in the store."""
    failed, end, aborted = 0, float("inf"), False
    while time.monotonic() < end:
        statuses = [process.poll() for process in processes]
        if not failed and any(statuses):
            failed = next(filter(None, statuses))
            end = min(end, time.monotonic() + TOGETHER_SECONDS)
        if None not in statuses:
            break
        if not aborted and keys.check(["abort"]):
            aborted = True
            if parse_claim(keys.get("abort")).lost:
                end = min(end, time.monotonic() + LOST_SECONDS)
        time.sleep(0.1)
    if failed > 0:
        return failed
    return 1 if failed or None in statuses else 0  # None: a rank that is given up
