"""A run as its folder shows it, for the report.

metrics.jsonl, eval.jsonl      the curves
attempts.jsonl, VERDICT        each start with what it ran on (event `start`), and how it ended
recipe.yaml                    every key
invalid.json                   samples that could not be used
"""

import contextlib
import itertools
import json
import math
import statistics
import time
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from clip_train.metrics.jsonl import iter_jsonl
from clip_train.metrics.progress import format_seconds

BUCKETS = 320  # of a curve as it is drawn; the mean, the least and the greatest are 960 points
RECENT = 50  # steps that the ETA is made from
SILENT_SECONDS = 300.0  # without a step, and twenty times as long as one lasts: something is wrong
CHARTS = {"loss": "loss", "lr": "learning rate", "samples_per_second": "samples per second"}
DATA_WAIT = "data wait, % of the step"
NO_CURVE = {"step", "num_samples", "zero_shot_samples"}  # of an evaluation

Level = Literal["ok", "warning", "error"]


class Curve:
    """One number over the steps."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    @property
    def recent(self) -> float:
        """The mean of its last tenth."""
        return statistics.fmean(self.values[-max(1, len(self.values) // 10) :])

    def thinned(self) -> np.ndarray:
        """[n, 4], n <= `BUCKETS`: the mean step, and the values' mean, least and greatest."""
        points = np.array([self.steps, self.values], dtype=np.float64).T
        parts = np.array_split(points, min(len(points), BUCKETS))
        return np.array([(*each.mean(0), each[:, 1].min(), each[:, 1].max()) for each in parts])


class Run:
    """A folder, read once: look again with another `Run`. Without files the run has not begun."""

    def __init__(self, folder: Path | str) -> None:
        """OSError where it cannot be read."""
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        self.recipe = self._load("recipe.yaml")
        self.invalid = self._load("invalid.json")
        self.verdict = self._read_verdict()  # the word, and the reason; None while it trains
        attempts = self._records("attempts.jsonl")
        self.starts = [record for record in attempts if record.get("event") == "start"]
        for start, following in itertools.zip_longest(self.starts, self.starts[1:]):
            start["ended"] = following.get("previous") if following else self.verdict
        self.curves: dict[str, Curve] = {}
        self.eval_curves: dict[str, Curve] = {}
        self.last: dict[str, Any] = {}  # record
        self.failed_saves = 0
        self.seconds, self.waited = 0.0, 0.0  # in steps; of these for data
        seconds = []  # of steps; the first of an attempt is compiling and warming up
        firsts = {1, *(start["step"] + 1 for start in self.starts)}
        for record in self._records("metrics.jsonl"):
            self.last = record
            numbers = {name: record.get(name) for name in CHARTS}
            if record.get("step_seconds"):
                waited = record.get("data_wait_seconds", 0.0)
                self.seconds += record["step_seconds"]
                self.waited += waited
                numbers[DATA_WAIT] = 100 * waited / record["step_seconds"]
            add_numbers(self.curves, record["step"], numbers)
            if record.get("step_seconds") and record["step"] not in firsts:
                seconds.append(record["step_seconds"])
            self.failed_saves = record.get("checkpoint_failures", self.failed_saves)
        self.evaluations = list(self._records("eval.jsonl"))
        for record in self.evaluations:
            scores = {name: value for name, value in record.items() if name not in NO_CURVE}
            add_numbers(self.eval_curves, record["step"], scores)
        self.step: int = self.last.get("step", 0)
        known = self.starts[-1].get("steps") if self.starts else None
        self.steps: int | None = known or (self.recipe.get("run") or {}).get("steps")
        self.eta_seconds: float | None = None  # where nothing is left or known
        if self.verdict is None and seconds and self.steps is not None:
            left = max(self.steps - self.step, 0)
            self.eta_seconds = left * statistics.median(seconds[-RECENT:])
        self.silent_seconds = 0.0  # since the last record
        with contextlib.suppress(OSError):
            self.silent_seconds = time.time() - (self.folder / "metrics.jsonl").stat().st_mtime
        longest = max(SILENT_SECONDS, 20 * max(seconds[-RECENT:], default=0.0))
        self.state = "silent" if self.silent_seconds > longest else "training"
        if self.verdict is not None:
            self.state = self.verdict[0]

    def _records(self, name: str) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            for record in iter_jsonl(self.folder / name):
                if isinstance(record.get("step"), int):
                    yield record

    def _read_verdict(self) -> tuple[str, str] | None:
        with contextlib.suppress(OSError, ValueError):
            word, _, line = (self.folder / "VERDICT").read_text(encoding="utf-8").partition("\n")
            return word, str(json.loads(line or "{}").get("reason", ""))
        return None

    def _load(self, name: str) -> dict[str, Any]:
        """A mapping in JSON or YAML; empty where it cannot be read."""
        parse = json.loads if name.endswith(".json") else yaml.safe_load
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            found = parse((self.folder / name).read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}

    def notes(self) -> list[tuple[Level, str]]:
        """Is it healthy? What speaks against it, each with what to look at."""
        found: list[tuple[Level, str]] = []
        if self.verdict is not None and self.verdict[0] in ("FAILED", "FATAL"):
            found.append(("error", f"{self.verdict[0]}: {self.verdict[1]}"))
        elif self.state == "silent":
            ago = format_seconds(self.silent_seconds)
            found.append(("error", f"no step for {ago}: is it still running?"))
        if self.last and self.last.get("loss") is None:
            found.append(("error", "the last loss is not a number"))
        if self.failed_saves:
            failed = f"failed saves in a row: {self.failed_saves}; see clip-train checkpoints"
            found.append(("warning", failed))
        wait = self.curves.get(DATA_WAIT)
        if wait is not None and wait.recent > 10:
            waits = f"{wait.recent:.0f}% of a step waits for data: data.workers, or a faster disk"
            found.append(("warning", waits))
        count = sum(self.invalid.get("bad_samples", {}).values())
        if count:
            share = count / max(self.last.get("samples", 0), count)
            said = f"{count:,} invalid samples, {share:.2%} of all seen"
            found.append(("warning" if share > 0.01 else "ok", said))
        fine = "nothing to remark: no failed save, data in time"
        return found or [("ok", fine)]


def add_numbers(curves: dict[str, Curve], step: int, numbers: Mapping[str, Any]) -> None:
    """Each number to its curve. Not-a-number was written as null: it is left out."""
    for name, value in numbers.items():
        if isinstance(value, (int, float)) and math.isfinite(value):
            curve = curves.setdefault(name, Curve())
            curve.steps.append(step)
            curve.values.append(value)
