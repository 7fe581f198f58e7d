"""Find the rank that the others wait for.

All ranks end a step together, so their steps take equally long. They differ in two times: waiting
for data, and computing until they need the others. Each rank sends both with its heartbeat, summed
over `WINDOW_SECONDS`, and rank 0 compares them: no collective.
"""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from clip_train.callbacks import Callback
from launcher.runtime.heartbeat import Beat, Heartbeat
from launcher.runtime.log import log, warn

WINDOW_SECONDS = 10.0
# A rank must be slow in SLOW_WINDOWS of the last WINDOWS: one may be noise, and a rank with a slow
# store waits once for each block of samples.
WINDOWS, SLOW_WINDOWS = 10, 5
LEAST_SHARE = 0.05  # of a step that a slow rank takes longer than the median
CAUSES = {  # the key of a record -> the activity of a slow rank
    "data_wait_seconds": "waits for data (its store, disk or loader workers)",
    "compute_seconds": "computes (a busy, hot or throttled processor)",
}


def slow_ranks(beats: Mapping[int, Beat]) -> dict[tuple[int, str], tuple[float, str]]:
    """By rank and cause: the additional time as a share of a step, and a text.

    beats: from the heartbeat, by rank.
    """
    lines = {rank: beat.value.decode().split(" ", 2) for rank, beat in beats.items()}
    sums = {rank: json.loads(parts[2]) for rank, parts in lines.items() if "{" in parts[-1]}
    found = {}
    for cause, does in CAUSES.items():
        shares = {rank: seconds[cause] / seconds["step_seconds"] for rank, seconds in sums.items()}
        typical = statistics.median_low(shares.values() or [0.0])
        for rank, share in shares.items():
            if share - typical > LEAST_SHARE:
                words = f"rank {rank} on {lines[rank][1]} {does} for {share:.0%} of each step"
                found[rank, cause] = share - typical, f"{words}, the median rank for {typical:.0%}"
    return found


class SlowRank(Callback):
    """While a rank is slow, rank 0's records have `slow_rank`, in words; the log has it once."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._sums: Counter[str] = Counter()  # seconds, of the present window
        self._windows = [slow_ranks({})]
        self._named: tuple[int, str] | None = None
        self._words = ""

    def after_step(
        self, record: dict[str, Any], keys: Sequence[str], invalid: Mapping[str, int]
    ) -> None:
        self._sums.update({key: record[key] for key in ("step_seconds", *CAUSES)})
        if self._sums["step_seconds"] >= WINDOW_SECONDS:
            self._heartbeat.line = json.dumps(self._sums)
            self._sums.clear()
            if self._heartbeat.env.rank == 0:
                self._compare(record["step"])
        if self._named is not None:
            record["slow_rank"] = self._words

    def _compare(self, step: int) -> None:
        latest = slow_ranks(dict(self._heartbeat.beats))
        self._windows = [*self._windows[1 - WINDOWS :], latest]
        times = Counter(chain(*self._windows))
        lasting = [found for found in latest if times[found] >= SLOW_WINDOWS]
        if lasting and self._named not in lasting:
            self._named = max(lasting, key=latest.__getitem__)
            others = {rank for rank, _ in lasting if rank != self._named[0]}
            more = f"; {len(others)} more ranks are slow" * bool(others)
            self._words = latest[self._named][1] + more
            warn(f"step {step}: {self._words}")
        elif self._named is not None and self._named not in chain(*self._windows[-SLOW_WINDOWS:]):
            log(f"step {step}: rank {self._named[0]} is not slow any more")
            self._named = None
