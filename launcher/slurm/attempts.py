"""The history of a run's attempts, and what to do after each: pure decisions over `attempts.jsonl`.

Two lines per attempt: `begin` (job, nodes, step) and `end` (verdict, step, reason, nodes to blame, decision).
An attempt without an `end` was lost with its node. No torch here.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FILE = "attempts.jsonl"
NEEDED = {  # of each event's line, by those who read it here
    "begin": {"attempt": int, "nodes": list, "step": int},
    "end": {"attempt": int, "blamed": list, "decision": str, "failures": int, "fruitless": int},
}
Action = Literal["done", "requeue", "leave", "stop", "give up"]


@dataclass(frozen=True)
class Limits:
    """When to give up."""

    failures: int = 3  # in a row, without a new checkpoint
    fruitless: int = 10  # attempts in a row, preempted ones too, without a new checkpoint
    node_failures: int = 2  # after which a node is left out


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, before anything is decided."""

    verdict: str  # DONE, PREEMPTED, FAILED, FATAL; where there is none CRASHED, or LOST with the batch script
    before: int  # the newest committed step when it began
    after: int  # and when it ended
    reason: str
    blamed: tuple[str, ...] = ()
    terminated: bool = False  # Slurm told the batch script to end: scancel, or Slurm requeues the job itself
    stop_file: bool = False


@dataclass(frozen=True)
class Decision:
    """What the batch script does, and the counts that go into the history."""

    action: Action
    why: str
    failures: int
    fruitless: int


class History:
    """The run's `attempts.jsonl`; written by the batch script alone."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        self.lines: list[dict[str, Any]] = []
        # before the lines: who makes a log adds its `begin` afterwards
        self._logs = {file.name for file in (run_dir / "attempts").glob("[0-9][0-9][0-9][0-9]*")}
        if self.path.exists():
            told = (parsed(text) for text in self.path.read_text(errors="replace").splitlines())
            self.lines = [line for line in told if line is not None]

    def append(self, event: str, **values: Any) -> None:
        line = {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **values}
        self.lines.append(line)
        with self.path.open("a+b") as f:
            if f.tell():
                f.seek(-1, os.SEEK_END)
                if f.read(1) != b"\n":  # torn by a power loss: this line must not become part of it
                    f.write(b"\n")
            f.write(json.dumps(line).encode() + b"\n")

    @property
    def ends(self) -> list[dict[str, Any]]:
        """One for each attempt: two jobs that start in the same moment may both settle a lost one."""
        return list({line["attempt"]: line for line in self.lines if line["event"] == "end"}.values())

    @property
    def next_number(self) -> int:
        """Above every attempt that is told of here or has left a log: its marks are not the next one's."""
        return 1 + max(self._begun + [int(name[:4]) for name in self._logs if name[:4].isdigit()], default=0)

    @property
    def announced(self) -> bool:
        """The newest attempt has a log and is not told of here: its job is about to begin it, or died then."""
        return f"{self.next_number - 1:04d}.log" in self._logs and self.next_number - 1 not in self._begun

    @property
    def _begun(self) -> list[int]:
        return [line["attempt"] for line in self.lines if line["event"] in NEEDED]

    def unfinished(self) -> dict[str, Any] | None:
        """The `begin` of an attempt that never ended: its batch script went down with the node."""
        ended = {line["attempt"] for line in self.ends}
        return next((b for b in self.lines if b["event"] == "begin" and b["attempt"] not in ended), None)

    def counts(self) -> tuple[int, int]:
        """Failures and fruitless attempts in a row so far; a user who submits again after a stop starts anew."""
        if not self.ends or self.ends[-1]["decision"] not in ("requeue", "leave"):
            return 0, 0
        return self.ends[-1]["failures"], self.ends[-1]["fruitless"]

    def bad_nodes(self, limits: Limits) -> list[str]:
        """Nodes that have been blamed too often."""
        blamed = Counter(node for end in self.ends for node in end["blamed"])
        return sorted(node for node, count in blamed.items() if count >= limits.node_failures)


def parsed(text: str) -> dict[str, Any] | None:
    """One line of the history; None where it is torn, or not one of ours."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        return None
    needed = NEEDED.get(line["event"], {})
    return line if all(isinstance(line.get(name), kind) for name, kind in needed.items()) else None


def decide(outcome: Outcome, failures: int, fruitless: int, limits: Limits) -> Decision:
    """By the verdict and by progress, never by an exit code. failures, fruitless: in a row before this attempt."""
    progress = outcome.after > outcome.before
    failed = outcome.verdict not in ("DONE", "PREEMPTED") and not outcome.terminated
    failures = 0 if progress else failures + failed
    fruitless = 0 if progress else fruitless + (outcome.verdict != "DONE")

    failure = f"failure {failures} without a new checkpoint, of {limits.failures}"
    rules: tuple[tuple[bool, Action, str], ...] = (  # the first that holds
        (outcome.verdict == "DONE", "done", "trained to the last step"),
        (
            outcome.terminated,
            "leave",
            "Slurm ended the job (scancel, preemption, a lost node): it requeues it if it wants to",
        ),
        (outcome.verdict == "FATAL", "stop", f"it would come again: {outcome.reason}"),
        (outcome.stop_file, "leave", "the run directory has a STOP file: remove it and submit again to go on"),
        (
            failures >= limits.failures,
            "give up",
            f"{failures} failures in a row without a new checkpoint; the last: {outcome.reason}",
        ),
        (
            fruitless >= limits.fruitless,
            "give up",
            f"{fruitless} attempts in a row without a new checkpoint; the last: {outcome.reason}",
        ),
        (outcome.verdict == "PREEMPTED", "requeue", "preempted after a commit"),
        (True, "requeue", failure if failures else "it failed, but had come further"),
    )
    action, why = next((action, why) for holds, action, why in rules if holds)
    return Decision(action, why, failures, fruitless)
