"""Planted faults, in ranks only: Python imports this at its start where this folder is on
PYTHONPATH.

FAULT=die          every rank of number 1 is killed at its start
FAULT=bad:n2       ranks on the host n2 find no GPU
STEP_SECONDS=0.1   a step takes so long at least: a fast machine is not done before it is disturbed
HOLD=FILE          rank 0 goes no further than 30 steps while the file is there and nobody has asked it to stop: nor is
                   a slow machine done before it is disturbed
"""

import os
import signal
import socket
import sys
from pathlib import Path

in_rank = "SLURM_STEP_NUM_TASKS" in os.environ and "train" in getattr(sys, "orig_argv", [])
fault = os.environ.get("FAULT", "")
if in_rank and fault:
    rank = os.environ.get("SLURM_PROCID")
    if fault == "die" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.startswith("bad:") and socket.gethostname() == fault[4:]:
        from clip_train.errors import RankError
        from launcher.runtime.outcome import Outcome

        os._exit(Outcome().finish(RankError("LOCAL_RANK (0) has no GPU: this host shows 0")))

if in_rank and "STEP_SECONDS" in os.environ:
    import time

    from launcher.runtime.watchdog import Watchdog

    step_seconds, hold = float(os.environ["STEP_SECONDS"]), Path(os.environ.get("HOLD", "/nowhere"))
    first = os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "0"
    phase, begun, steps = Watchdog.phase, time.monotonic(), 0

    def slow_phase(self: Watchdog, name: str) -> None:
        global begun, steps  # noqa: PLW0603
        if name == "step":
            while first and steps >= 30 and hold.exists() and self.stop.look() is None:
                time.sleep(0.05)
            steps += 1
            time.sleep(max(0.0, begun + step_seconds - time.monotonic()))
            begun = time.monotonic()
        phase(self, name)

    Watchdog.phase = slow_phase
