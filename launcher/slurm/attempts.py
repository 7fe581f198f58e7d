"""The history of a run's attempts, and the decision after each, from VERDICT and progress alone. No
torch here.

attempts.jsonl has two lines per attempt: `begin` (job, nodes, step) and `end` (verdict, step,
reason, blamed nodes, decision). An attempt without an `end` was lost with its node. Rank 0 adds a
`start` (launcher/train.py), without a batch script too: for the report, and for the step from which
the ranks resumed.
"""

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_train.metrics.jsonl import iter_jsonl
from clip_train.storage.local import open_own
from clip_train.storage.redact import redact
from launcher.runtime.verdict import Verdict

FILE = "attempts.jsonl"
MOST_FAILURES = 3  # in a row, without a new checkpoint: then it gives up


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, before the decision."""

    verdict: (
        str  # DONE, PREEMPTED, FAILED, FATAL; without one CRASHED, or LOST with the batch script
    )
    before: int  # the newest committed step when it began
    step: int  # and when it ended
    reason: str
    # the node of the rank that failed, if it may be the node's fault; twice if its GPU said so
    blamed: tuple[str, ...] = ()
    room: int = 0  # after out of memory: bytes that the next attempt's activations may take
    terminated: bool = False  # TERM reached the batch script: scancel, or Slurm requeues the job
    stop_file: bool = False


@dataclass(frozen=True)
class Decision:
    """The batch script's decision, and the counts for the history."""

    decision: str  # "done", "requeue", "leave", "stop" or "give up"
    why: str
    failures: int


class History:
    """The run's `attempts.jsonl`."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        # without lines that a power loss has torn
        self.lines = list(iter_jsonl(self.path)) if self.path.is_file() else []

    def append(self, event: str, **values: Any) -> None:
        line = {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **values}
        self.lines.append(line)
        # a last line that a power loss has torn: this one must not become part of it
        torn = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")
        with open_own(self.path, "ab") as f:
            f.write(b"\n" * torn + json.dumps(redact(line)).encode() + b"\n")

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == event]

    def next_number(self) -> int:
        return 1 + max((line.get("attempt", 0) for line in self.lines), default=0)

    def unfinished(self) -> dict[str, Any] | None:
        """The `begin` of an attempt that never ended: it runs, or its batch script was lost."""
        ended = [line["attempt"] for line in self.of("end")]
        return next((line for line in self.of("begin") if line["attempt"] not in ended), None)

    def failures(self) -> int:
        """Consecutive failures. Submitting again after a stop begins at 0."""
        ends = self.of("end")
        again = bool(ends) and ends[-1]["decision"] in ("requeue", "leave")
        return ends[-1]["failures"] if again else 0

    def room(self) -> float:
        """Bytes that the next attempt's activations may take, from attempts that ran out of memory.
        Unlimited if none did since the last submission after a stop."""
        room = float("inf")
        for end in self.of("end"):
            again = end["decision"] in ("requeue", "leave")
            room = (end.get("room") or room) if again else float("inf")
        return room

    def suspects(self) -> list[str]:
        """Nodes that were blamed more than once."""
        blamed = Counter(node for end in self.of("end") for node in end["blamed"])
        return sorted(node for node, count in blamed.items() if count > 1)


def next_action(outcome: Outcome, failures: int) -> Decision:
    """Decide by the verdict and by progress. failures: consecutive ones before this attempt. One
    that the time limit ends without a new checkpoint is a failure too."""
    progress = outcome.step > outcome.before
    failed = outcome.verdict != "DONE" and not outcome.terminated
    failures = 0 if progress else failures + failed
    rules: tuple[tuple[bool, str, str], ...] = (  # the first that holds
        (outcome.verdict == "DONE", "done", "trained to the last step"),
        (
            outcome.terminated,
            "leave",
            "Slurm ended the job (scancel, preemption, a lost node): it requeues it if it wants to",
        ),
        (outcome.verdict == "FATAL", "stop", f"it would fail again: {outcome.reason}"),
        (
            outcome.stop_file,
            "leave",
            "a STOP file asked for the stop (remove it if it still exists): submit again to resume",
        ),
        (
            failures >= MOST_FAILURES,
            "give up",
            f"{failures} failures in a row without a new checkpoint; the last: {outcome.reason}",
        ),
        (outcome.verdict == "PREEMPTED", "requeue", "preempted after a commit"),
        (progress, "requeue", "it failed, but made progress"),
        (
            True,
            "requeue",
            f"failure {failures} without a new checkpoint, of {MOST_FAILURES}",
        ),
    )
    decision, why = next((decision, why) for holds, decision, why in rules if holds)
    return Decision(decision, why, failures)


def explain(verdict: Verdict | None, status: int) -> tuple[str, str, tuple[str, ...]]:
    """An attempt's verdict, its reason and the blamed node, twice if its hardware failed.

    verdict: what VERDICT has, if it was written. status: of the command that ran the ranks.
    """
    if verdict is None:
        return "CRASHED", f"the ranks ended with status {status} and left no verdict", ()
    word, why = verdict
    if word == "PREEMPTED" and status > 128 and not why["step"]:
        # srun sends TERM to the other ranks, and ends with the status of the one that was killed
        return "CRASHED", f"a rank was killed before the first step (status {status})", ()
    reason, where = why["reason"], why.get("where", "")
    if not reason.startswith(where):  # of an earlier version
        reason = f"{where}: {reason}"
    blamed = (why["blamed"],) if "blamed" in why else ()
    return word, reason, blamed * (2 if why.get("hardware") else 1)
