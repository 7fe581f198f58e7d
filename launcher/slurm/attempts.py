"""The history of a run's attempts, and the decision after each, from VERDICT and progress alone. No
torch here.

attempts.jsonl has two lines per attempt: `begin` (job, nodes, step) and `end` (verdict, step,
reason, blamed nodes, decision). An attempt without an `end` was lost with its node. Rank 0 adds a
line `start` (launcher/train.py), also in runs without a batch script: it has the step from which
the ranks resumed, and facts for the report.
"""

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from clip_train.metrics.jsonl import iter_jsonl
from clip_train.storage.local import open_own
from clip_train.storage.redact import redact
from launcher.runtime.verdict import Verdict

FILE = "attempts.jsonl"
MOST_FAILURES = 3  # in a row without a new checkpoint; then the batch script gives up


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended, before the decision."""

    # DONE, PREEMPTED, FAILED or FATAL; without a verdict CRASHED, or LOST with the batch script
    verdict: str
    before: int  # the newest committed step when the attempt began
    step: int  # the newest committed step when it ended
    reason: str
    # the node of the rank that failed, if it may be the node's fault; twice if its GPU failed
    blamed: tuple[str, ...] = ()
    room: int = 0  # after out of memory: bytes that the next attempt's activations may take
    terminated: bool = False  # TERM reached the batch script: scancel, or Slurm requeues the job
    stop_file: bool = False  # a STOP file asked for the stop


@dataclass(frozen=True)
class Decision:
    """The batch script's decision, and the counts for the history."""

    decision: str  # "done", "requeue", "leave", "stop" or "give up"
    why: str
    failures: int


class Explanation(NamedTuple):
    """The cause of an attempt's end, by its verdict or exit status."""

    verdict: str  # these are as in `AttemptResult`
    reason: str
    blamed: tuple[str, ...]


class History:
    """The run's `attempts.jsonl`."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        self.lines: list[dict[str, Any]] = []  # without a line that a power loss cut short
        if self.path.is_file():
            self.lines += iter_jsonl(self.path)

    def append(self, event: str, **values: Any) -> None:
        line = {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **values}
        self.lines.append(line)
        data = json.dumps(redact(line)).encode() + b"\n"
        # if a power loss cut the last line short, end that line first
        if self.path.is_file() and not self.path.read_bytes().endswith(b"\n"):
            data = b"\n" + data
        with open_own(self.path, "ab") as f:
            f.write(data)

    def of(self, event: str) -> list[dict[str, Any]]:
        """The lines of one event: `begin`, `end`, `start`, `terminated` or `exclude`."""
        return [line for line in self.lines if line.get("event") == event]

    def next_number(self) -> int:
        return 1 + max((line.get("attempt", 0) for line in self.lines), default=0)

    def unfinished(self) -> dict[str, Any] | None:
        """The `begin` of an attempt without an `end`: it runs, or its batch script was lost."""
        ended = [line["attempt"] for line in self.of("end")]
        for line in self.of("begin"):
            if line["attempt"] not in ended:
                return line
        return None

    def failures(self) -> int:
        """Consecutive failures up to now; 0 after a stop, so that a new submission begins at 0."""
        ends = self.of("end")
        if not ends or ends[-1]["decision"] not in ("requeue", "leave"):
            return 0
        return ends[-1]["failures"]

    def room(self) -> float:
        """Bytes that the next attempt's activations may take, from attempts that ran out of memory.
        Unlimited if none did since the last submission after a stop."""
        room = float("inf")
        for end in self.of("end"):
            if end["decision"] not in ("requeue", "leave"):
                room = float("inf")
            elif end.get("room"):
                room = end["room"]
        return room

    def suspects(self) -> list[str]:
        """Nodes that were blamed more than once."""
        blamed = Counter(node for end in self.of("end") for node in end["blamed"])
        return sorted(node for node, count in blamed.items() if count > 1)


def next_action(result: AttemptResult, failures: int) -> Decision:
    """Decide by the verdict and by progress.

    failures: consecutive failures before this attempt. An attempt that the time limit ends without
    a new checkpoint counts as a failure too.
    """
    progress = result.step > result.before
    if progress:
        failures = 0
    elif result.verdict != "DONE" and not result.terminated:
        failures += 1
    if result.verdict == "DONE":
        decision, why = "done", "trained to the last step"
    elif result.terminated:
        decision = "leave"
        why = (
            "Slurm ended the job (scancel, preemption, a lost node): it requeues it if it wants to"
        )
    elif result.verdict == "FATAL":
        decision, why = "stop", f"it would fail again: {result.reason}"
    elif result.stop_file:
        decision = "leave"
        why = (
            "a STOP file asked for the stop (remove it if it still exists): submit again to resume"
        )
    elif failures >= MOST_FAILURES:
        decision = "give up"
        why = f"{failures} failures in a row without a new checkpoint; the last: {result.reason}"
    elif result.verdict == "PREEMPTED":
        decision, why = "requeue", "preempted after a commit"
    elif progress:
        decision, why = "requeue", "it failed, but made progress"
    else:
        decision = "requeue"
        why = f"failure {failures} without a new checkpoint, of {MOST_FAILURES}"
    return Decision(decision, why, failures)


def explain_verdict(verdict: Verdict | None, status: int) -> Explanation:
    """How an attempt ended, and why.

    verdict: the content of VERDICT, if it was written. status: of the command that ran the ranks.
    """
    if verdict is None:
        reason = f"the ranks ended with status {status} and left no verdict"
        return Explanation("CRASHED", reason, ())
    word, content = verdict
    if word == "PREEMPTED" and status > 128 and not content["step"]:
        # srun sends TERM to the other ranks, and ends with the status of the one that was killed
        reason = f"a rank was killed before the first step (status {status})"
        return Explanation("CRASHED", reason, ())
    reason, where = content["reason"], content.get("where", "")
    # earlier versions wrote a reason without its place
    if not reason.startswith(where):
        reason = f"{where}: {reason}"
    blamed: tuple[str, ...] = ()
    if "blamed" in content:
        blamed = (content["blamed"],)
        # `History.suspects` needs two failures: a failure of the hardware counts as two
        if content.get("hardware"):
            blamed *= 2
    return Explanation(word, reason, blamed)
