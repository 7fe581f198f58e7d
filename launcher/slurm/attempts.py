"""The history of a run's attempts, and what follows each: pure decisions over `attempts.jsonl`.

Two lines per attempt: `begin` (job, nodes, step) and `end` (verdict, step, reason, blamed nodes, decision). An attempt
without an `end` was lost with its node. Rank 0 adds a `start` (launcher/train.py), without a batch script too: for the
report, and for the step from which the ranks went on. No torch here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_train.storage.local import LocalStorage, open_own
from launcher.runtime.verdict import Failure

FILE = "attempts.jsonl"
NEEDED: dict[str, dict[str, type]] = {  # of each event's line, by those who read it here
    "begin": {"attempt": int, "nodes": list, "step": int},
    "start": {"step": int},
    "end": {"attempt": int, "blamed": list, "decision": str, "failures": int, "fruitless": int},
}
MOST_FAILURES = 3  # in a row, without a new checkpoint: then it gives up
MOST_FRUITLESS = 10  # attempts in a row, preempted ones too, without a new checkpoint: the same


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, before anything is decided."""

    verdict: str  # DONE, PREEMPTED, FAILED, FATAL; where there is none CRASHED, or LOST with the batch script
    before: int  # the newest committed step when it began
    step: int  # and when it ended
    reason: str
    blamed: tuple[str, ...] = ()  # the node of the rank that failed, if it may be the node's fault
    terminated: bool = (
        False  # by TERM to the batch script: scancel, or Slurm requeues the job itself
    )
    stop_file: bool = False


@dataclass(frozen=True)
class Decision:
    """What the batch script does, and the counts that go into the history."""

    decision: str  # "done", "requeue", "leave", "stop" or "give up"
    why: str
    failures: int
    fruitless: int


class History:
    """The run's `attempts.jsonl`, and `attempts/0001.job`, with which a job claims the first attempt."""

    def __init__(self, run_dir: Path) -> None:
        self.path, self.folder = run_dir / FILE, run_dir / "attempts"
        self.lines: list[dict[str, Any]] = []
        if self.path.exists():
            found = (parsed(text) for text in self.path.read_text(errors="replace").splitlines())
            self.lines = [line for line in found if line is not None]

    def append(self, event: str, **values: Any) -> None:
        line = {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **values}
        self.lines.append(line)
        with open_own(self.path, "a+b") as f:
            if f.tell():
                f.seek(-1, os.SEEK_END)
                if f.read(1) != b"\n":  # torn by a power loss: this line must not become part of it
                    f.write(b"\n")
            f.write(json.dumps(line).encode() + b"\n")

    def claim(self, number: int, **begin: Any) -> int | None:
        """The number of the attempt, begun by no other job; None where one has been quicker.

        number: the next one, as it was before this job looked whether another trains."""
        line = json.dumps({"event": "begin", "attempt": number, **begin})
        if not LocalStorage(self.folder).put_bytes(
            f"{number:04d}.job", line.encode(), if_absent=True
        ):
            return None
        self.append("begin", attempt=number, **begin)
        return number

    @property
    def ends(self) -> list[dict[str, Any]]:
        """One for each attempt: two jobs that start in the same moment may both settle a lost one."""
        return list(
            {line["attempt"]: line for line in self.lines if line["event"] == "end"}.values()
        )

    @property
    def begun(self) -> dict[int, dict[str, Any]]:
        """number -> `begin` line; of a job that was lost in the very moment, its claim."""
        found = {line["attempt"]: line for line in self.lines if line["event"] == "begin"}
        for file in self.folder.glob("[0-9]*.job"):
            with contextlib.suppress(OSError):
                line = parsed(file.read_text())
                if line is not None:
                    found.setdefault(line["attempt"], line)
        return found

    @property
    def next_number(self) -> int:
        """Above every attempt that is known or has left a log."""
        logs = [int(file.name[:4]) for file in self.folder.glob("[0-9][0-9][0-9][0-9]*")]
        return 1 + max([*logs, *self.begun, *(line["attempt"] for line in self.ends)], default=0)

    def unfinished(self) -> dict[str, Any] | None:
        """The `begin` of an attempt that never ended: it runs, or its batch script was lost."""
        ended = {line["attempt"] for line in self.ends}
        return next(
            (line for number, line in sorted(self.begun.items()) if number not in ended), None
        )

    def resumed(self) -> int | None:
        """The step after which the newest attempt went on, 0: it began anew; None: it did not come so far."""
        begun = [line for line in self.lines if line["event"] in ("begin", "start")]
        return begun[-1]["step"] if begun and begun[-1]["event"] == "start" else None

    def was_terminated(self, attempt: int) -> bool:
        return any(
            line["event"] == "terminated" and line.get("attempt") == attempt for line in self.lines
        )

    def counts(self) -> tuple[int, int]:
        """Failures and fruitless attempts in a row so far; a user who submits again after a stop starts anew."""
        if not self.ends or self.ends[-1]["decision"] not in ("requeue", "leave"):
            return 0, 0
        return self.ends[-1]["failures"], self.ends[-1]["fruitless"]

    def suspects(self) -> dict[str, int]:
        """Nodes that have been blamed more than once, and how often."""
        blamed = Counter(node for end in self.ends for node in end["blamed"])
        return {node: count for node, count in sorted(blamed.items()) if count > 1}


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


def decide(outcome: Outcome, failures: int, fruitless: int) -> Decision:
    """By the verdict and by progress, never by an exit code. failures, fruitless: in a row before this attempt."""
    progress = outcome.step > outcome.before
    failed = outcome.verdict not in ("DONE", "PREEMPTED") and not outcome.terminated
    failures = 0 if progress else failures + failed
    fruitless = 0 if progress else fruitless + (outcome.verdict != "DONE")

    failure = f"failure {failures} without a new checkpoint, of {MOST_FAILURES}"
    last = f"in a row without a new checkpoint; the last: {outcome.reason}"
    ended = "Slurm ended the job (scancel, preemption, a lost node): it requeues it if it wants to"
    rules: tuple[tuple[bool, str, str], ...] = (  # the first that holds
        (outcome.verdict == "DONE", "done", "trained to the last step"),
        (outcome.terminated, "leave", ended),
        (outcome.verdict == "FATAL", "stop", f"it would come again: {outcome.reason}"),
        (
            outcome.stop_file,
            "leave",
            "a STOP file asked for the stop (remove it if it is still there): submit again to resume",
        ),
        (failures >= MOST_FAILURES, "give up", f"{failures} failures {last}"),
        (fruitless >= MOST_FRUITLESS, "give up", f"{fruitless} attempts {last}"),
        (outcome.verdict == "PREEMPTED", "requeue", "preempted after a commit"),
        (True, "requeue", failure if failures else "it failed, but had come further"),
    )
    decision, why = next((decision, why) for holds, decision, why in rules if holds)
    return Decision(decision, why, failures, fruitless)


# What srun prints of a rank that ended badly: "srun: error: n2: task 1: Killed". The first one is the cause.
SRUN_ERROR = re.compile(
    r"srun: error: (\S+): tasks? ([\d,-]+): (?!Exited with exit code 75)(\w[\w ]*)"
)
# A rank that ends with one of our own statuses has reported why, or follows another rank's report.
OWN_STATUS = re.compile(r"Exited with exit code (1|2|130)$")
NODE_FAILURE = re.compile(r"srun: error: Node failure on ([\w.-]+)")


def lost_node(log: str) -> str | None:
    """A node that Slurm has given up."""
    found = NODE_FAILURE.search(log)
    return found[1] if found else None


def explain(
    word: str, report: Failure | None, log: str, status: int
) -> tuple[str, str, tuple[str, ...]]:
    """Verdict, reason and the node to blame, of an attempt that is neither done nor preempted by its VERDICT.

    report: of the first rank that failed, if it came to write one. log: the attempt's.
    """
    ended = list(SRUN_ERROR.finditer(log))
    killed = next(
        (rank for rank in ended if not OWN_STATUS.match(rank[3].strip())),
        ended[0] if ended and report is None else None,
    )
    node = lost_node(log)
    if node is not None:
        return word or "CRASHED", f"Slurm lost the node {node}", (node,)
    if (
        report is not None
        and report.word == "PREEMPTED"
        and (killed is None or "SIGTERM" not in report.message)
    ):
        return (
            "PREEMPTED",
            report.message,
            (),
        )  # before the first step; srun sends TERM when another rank has died
    if (
        report is not None
        and report.word != "PREEMPTED"
        and (report.node_suspect or not report.lost)
    ):
        verdict = "FATAL" if report.word == "FATAL" else word or "CRASHED"
        return verdict, str(report), (report.node,) if report.node_suspect else ()
    if killed is not None:
        reason = f"rank {killed[2]} on {killed[1]}: {killed[3].strip()}"
        return word or "CRASHED", reason, (killed[1],)
    reason = f"the ranks ended with status {status} and left no error report"
    return word or "CRASHED", reason if report is None else str(report), ()
