"""A run as its folder shows it, read again and again while it grows: for the report and for `clip-train watch`.

metrics.jsonl, eval.jsonl      the curves
attempts.jsonl, VERDICT        each start with what it ran on (event `start`), and how it ended
recipe.yaml                    every key
invalid.json                   samples that could not be used, with pictures of some
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from clip_train.metrics.jsonl import parse_record
from clip_train.metrics.progress import format_seconds

BUCKETS = 320  # of a curve; the mean, the least and the greatest of each are 960 points
RECENT = 50  # steps that the ETA is made from
SHOWN_EVALUATIONS = 8
SILENT_SECONDS = 300.0  # without a step, and twenty times as long as one lasts: something is wrong
DATA_WAIT, MEMORY = "data_wait", "peak_memory"  # of the step, %; GiB: made from what the record has

NO_CURVE = {
    "samples", "peak_memory_bytes", "micro_size", "accum_steps", "kept_graphs", "checkpoint_step",
    "checkpoint_seconds", "checkpoint_failures", "time",
}  # fmt: skip

Level = Literal["ok", "warning", "error"]


@dataclass(slots=True)  # one for each number of each record
class Bucket:
    """What is known of the steps that fall into it."""

    index: int  # step // the curve's width
    step: float  # the mean of its steps
    mean: float
    least: float
    most: float
    count: int

    def merge(self, step: float, mean: float, least: float, most: float, count: int) -> None:
        self.count += count
        share = count / self.count
        self.step += share * (step - self.step)
        self.mean += share * (mean - self.mean)
        self.least, self.most = min(self.least, least), max(self.most, most)


@dataclass
class Curve:
    """One number over the steps, in at most `BUCKETS` buckets of as many steps each: no extreme is lost."""

    width: int = 1  # steps
    buckets: list[Bucket] = field(default_factory=list)
    first: float = math.nan
    last: float = math.nan
    total: float = 0.0

    def add(self, step: int, value: float) -> None:
        self.first = self.first if self.buckets else value
        self.last, self.total = value, self.total + value
        self._append(step // self.width, step, value, value, value, 1)
        while len(self.buckets) > BUCKETS:
            self.width *= 2
            finer, self.buckets = self.buckets, []
            for each in finer:
                self._append(
                    each.index // 2, each.step, each.mean, each.least, each.most, each.count
                )

    def _append(self, index: int, *values: Any) -> None:
        if self.buckets and self.buckets[-1].index == index:
            self.buckets[-1].merge(*values)
        else:
            self.buckets.append(Bucket(index, *values))

    @property
    def recent(self) -> float:
        """The mean of its last tenth."""
        return statistics.fmean(
            each.mean for each in self.buckets[-max(1, len(self.buckets) // 10) :]
        )

    @property
    def median(self) -> float:
        return statistics.median(each.mean for each in self.buckets)


class _Rewritten(Exception):
    """What was read is not there any more: a resumed run cuts its records."""


class Run:
    """Of a folder; `refresh` reads what is new in it. A million steps need as much memory as a thousand."""

    def __init__(self, folder: Path | str) -> None:
        """OSError where it cannot be read; a folder without any of the files is a run that has not begun."""
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        self._forget()
        self.refresh()

    def _forget(self) -> None:
        self._read: dict[
            str, tuple[int, bytes]
        ] = {}  # file -> the end of what was read, and its last line
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self.curves: dict[str, Curve] = {}
        self.eval_curves: dict[str, Curve] = {}
        self.evaluations: deque[dict[str, Any]] = deque(maxlen=SHOWN_EVALUATIONS)
        self.saves = Curve()  # steps of the checkpoints
        self.starts: list[
            dict[str, Any]
        ] = []  # of each attempt; `ended`: how, None where nobody knows
        self._start_steps = {0}  # after which they began
        self.clock: list[
            tuple[int, Curve]
        ] = []  # of each attempt: the step before it, seconds since 1970 over steps
        self.last: dict[str, Any] = {}  # record
        self.failed_saves = 0
        self.gpu_hours = self.gpu_hours_lost = 0.0  # of a batch job's attempts that have ended

    def refresh(self) -> None:
        try:
            self._look()
        except _Rewritten:
            self._forget()
            self._look()
        self.verdict = self._read_verdict()
        for start, following in itertools.zip_longest(self.starts, self.starts[1:]):
            start["ended"] = following.get("previous") if following else self.verdict
        self.recipe = self._load("recipe.yaml", yaml.safe_load)
        self.invalid = self._load("invalid.json", json.loads)

    def _look(self) -> None:
        for record in self._new_records("attempts.jsonl"):
            if record.get("event") == "start":
                self.starts.append(record)
                self._start_steps.add(record["step"])
            elif record.get("event") == "end":
                self.gpu_hours += record.get("gpu_hours", 0.0)
                self.gpu_hours_lost += record.get("gpu_hours_lost", 0.0)
        for record in self._new_records("metrics.jsonl"):
            self._add_step(record)
        for record in self._new_records("eval.jsonl"):
            self.evaluations.append(record)
            add_numbers(self.eval_curves, record)

    def _new_records(self, name: str) -> Iterator[dict[str, Any]]:
        """Of whole lines behind what was read before."""
        end, last = self._read.get(name, (0, b""))
        try:
            file = (self.folder / name).open("rb")
        except FileNotFoundError:
            if last:
                raise _Rewritten from None
            return
        with file:
            file.seek(end - len(last))
            if file.read(len(last)) != last:
                raise _Rewritten
            for line in file:
                if line.endswith(b"\n"):
                    end += len(line)
                    self._read[name] = end, line
                    record = parse_record(line)
                    if record is not None and isinstance(record.get("step"), int):
                        yield record

    def _add_step(self, record: dict[str, Any]) -> None:
        self.last, seconds = record, record.get("step_seconds")
        numbers = {name: value for name, value in record.items() if name not in NO_CURVE}
        if seconds and "data_wait_seconds" in record:
            numbers[DATA_WAIT] = 100 * record["data_wait_seconds"] / seconds
        if "peak_memory_bytes" in record:
            numbers[MEMORY] = record["peak_memory_bytes"] / 2**30
        if (
            seconds and record["step"] - 1 not in self._start_steps
        ):  # a first step is compiling and warming up
            self._seconds.append(seconds)
        if "time" in record:
            if not self.clock or record["step"] - 1 in self._start_steps:
                self.clock.append((record["step"] - 1, Curve()))
            self.clock[-1][1].add(record["step"], record["time"])
        if saved := record.get("checkpoint_step"):
            self.saves.add(saved, saved)
        self.failed_saves = record.get("checkpoint_failures", self.failed_saves)
        add_numbers(self.curves, numbers)

    def _read_verdict(self) -> tuple[str, str] | None:
        """The word, and the reason; None while it trains."""
        with contextlib.suppress(OSError, ValueError):
            word, _, line = (self.folder / "VERDICT").read_text(encoding="utf-8").partition("\n")
            return word, str(json.loads(line or "{}").get("reason", ""))
        return None

    def _load(self, name: str, parse: Any) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            found = parse((self.folder / name).read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}

    # -- what follows from it

    @property
    def step(self) -> int:
        return self.last.get("step", 0)

    @property
    def steps(self) -> int | None:
        """In all, where it is known."""
        known = self.starts[-1].get("steps") if self.starts else None
        return known or (self.recipe.get("run") or {}).get("steps")

    @property
    def eta_seconds(self) -> float | None:
        """By the median of the latest steps but an attempt's first; None where nothing is left or known."""
        if self.verdict is not None or not self._seconds or self.steps is None:
            return None
        return max(self.steps - self.step, 0) * statistics.median(self._seconds)

    @property
    def silent_seconds(self) -> float:
        """Since the last record."""
        with contextlib.suppress(OSError):
            return time.time() - (self.folder / "metrics.jsonl").stat().st_mtime
        return 0.0

    @property
    def state(self) -> str:
        """The verdict, or `training`, or `silent` where no step has come for long."""
        if self.verdict is not None:
            return self.verdict[0]
        longest = max(SILENT_SECONDS, 20 * max(self._seconds, default=0.0))
        return "silent" if self.silent_seconds > longest else "training"

    def notes(self) -> list[tuple[Level, str]]:
        """Is it healthy? What speaks against it, each with what to look at."""
        found: list[tuple[Level, str]] = []
        if self.verdict is not None and self.verdict[0] in ("FAILED", "FATAL"):
            found.append(("error", f"{self.verdict[0]}: {self.verdict[1]}"))
        elif self.state == "silent":
            found.append(
                (
                    "error",
                    f"no step for {format_seconds(self.silent_seconds)}: is it still running?",
                )
            )
        if self.last and self.last.get("loss") is None:
            found.append(("error", "the last loss is not a number"))
        if self.failed_saves:
            found.append(
                (
                    "warning",
                    f"failed saves in a row: {self.failed_saves}; see clip-train checkpoints",
                )
            )
        loss, rate, wait = (
            self.curves.get(each) for each in ("loss", "samples_per_second", DATA_WAIT)
        )
        if loss is not None and len(loss.buckets) > 20 and loss.recent > loss.buckets[0].mean:
            found.append(
                (
                    "warning",
                    f"the loss ({loss.recent:.4g}) is above where it was at first ({loss.first:.4g})",
                )
            )
        if wait is not None and wait.recent > 10:
            found.append(
                (
                    "warning",
                    f"{wait.recent:.0f}% of a step waits for data: data.workers, or a faster disk",
                )
            )
        if rate is not None and len(rate.buckets) > 20 and rate.recent < 0.7 * rate.median:
            slow = f"{rate.recent:,.0f} samples/s of late, {rate.median:,.0f} in the median: has a node slowed down?"
            found.append(("warning", slow))
        if count := sum(self.invalid.get("bad_samples", {}).values()):
            share = count / max(self.last.get("samples", 0), count)
            found.append(
                (
                    "warning" if share > 0.01 else "ok",
                    f"{count:,} invalid samples, {share:.2%} of all seen",
                )
            )
        return found or [
            ("ok", "nothing to remark: no failed save, data in time, throughput steady")
        ]


def add_numbers(curves: dict[str, Curve], record: dict[str, Any]) -> None:
    """Each number of the record to its curve. Not-a-number was written as null: it is left out."""
    for name, value in record.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step":
            curves.setdefault(name, Curve()).add(record["step"], value)
