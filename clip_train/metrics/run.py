"""Read a run's folder: its curves, evaluations and attempts, and whether it is healthy.

metrics.jsonl, eval.jsonl      the curves
attempts.jsonl, VERDICT        each start with its machine (event `start`), and how it ended
resolved.yaml, recipe.yaml     the recipe, and the number of steps
invalid.json                   how many samples could not be used
examples.jsonl, examples/      validation images with the captions that the model ranks first
"""

import contextlib
import itertools
import json
import math
import statistics
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from clip_train.metrics.jsonl import iter_jsonl
from clip_train.metrics.process import is_running
from clip_train.metrics.progress import format_seconds
from clip_train.metrics.scores import Scores, read_scores
from clip_train.yaml_text import load_yaml

RECENT = 50  # the number of latest steps from which the ETA is computed
# A run is late (no ETA, and a warning) after this long without a step, and five times a step's
# duration. It is silent (an error) after SILENT_SECONDS and twenty times a step's duration.
LATE_SECONDS = 30.0
SILENT_SECONDS = 300.0
DATA_WAIT = "data_wait"
# The curves of metrics.jsonl, besides losses and gradient norms of parts of the model.
CURVES = (
    "loss", "lr", "logit_scale", "logit_bias", "grad_norm", "samples_per_second", "mfu",
    "mfu_computed",
)  # fmt: skip
PERCENT = ("mfu", "mfu_computed")  # fractions in metrics.jsonl

Level = Literal["ok", "warning", "error"]


class Curve:
    """One number over the steps."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    @property
    def recent(self) -> float:
        """The mean of the last tenth of the values."""
        return statistics.fmean(self.values[-max(1, len(self.values) // 10) :])


class Run:
    """The state of a run's folder when it was read; make another `Run` to read it again. A folder
    without files is a run that has not started."""

    def __init__(self, folder: Path | str) -> None:
        """OSError if it cannot be read."""
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        self.recipe = self._load("resolved.yaml") or self._load("recipe.yaml")
        self.invalid = self._load("invalid.json")
        self.verdict = self._read_verdict()  # the word, and the reason; None while the run trains
        attempts = list(self._records("attempts.jsonl"))
        self.starts = [record for record in attempts if record.get("event") == "start"]
        for start, following in itertools.zip_longest(self.starts, self.starts[1:]):
            start["ended"] = following.get("previous") if following else self.verdict
        beginnings = [record for record in attempts if record.get("event") in ("begin", "start")]
        self._last_beginning = beginnings[-1] if beginnings else None
        # sums over a Slurm job's attempts that have ended
        self.gpu_hours = sum(record.get("gpu_hours", 0.0) for record in attempts)
        self.gpu_hours_lost = sum(record.get("gpu_hours_lost", 0.0) for record in attempts)
        self.curves: dict[str, Curve] = {}  # by key of metrics.jsonl, and DATA_WAIT
        self.last: dict[str, Any] = {}  # the last record of metrics.jsonl
        self.failed_saves = 0
        self.steps_recorded = 0
        self.steps_computed_twice = 0  # because exponentials underflowed
        self.step_hours = 0.0  # of all steps in metrics.jsonl, without saves and evaluations
        # of the latest steps, without the first one of each attempt
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._read_metrics()
        self.step: int = self.last.get("step", 0)
        started_with = self.starts[-1].get("steps") if self.starts else None
        self.steps: int | None = started_with or self.key("run.steps")
        evaluations = list(self._records("eval.jsonl"))
        self.scores: Scores = read_scores(
            evaluations,
            places=self.key("data.val"),
            labelled=self.key("evaluate.zero_shot_data"),
            sets=self.key("evaluate.sets"),
            keep_best=self.key("checkpoint.keep_best"),
        )
        self.examples: list[dict[str, Any]] = []
        with contextlib.suppress(OSError):
            self.examples = list(self._records("examples.jsonl"))
        self._read_state()

    def _read_metrics(self) -> None:
        # the first step of each attempt includes compiling and warming up
        first_steps = {1, *(start["step"] + 1 for start in self.starts)}
        for record in self._records("metrics.jsonl"):
            self.last = record
            self.steps_recorded += 1
            seconds = record.get("step_seconds")
            numbers = {name: record.get(name) for name in CURVES}
            for name, value in record.items():
                if name.endswith("_loss") or name.startswith("grad_norm_"):
                    numbers[name] = value
            for name in PERCENT:
                value = numbers[name]
                if isinstance(value, (int, float)):
                    numbers[name] = 100 * value
            if seconds:
                numbers[DATA_WAIT] = 100 * record.get("data_wait_seconds", 0.0) / seconds
                self.step_hours += seconds / 3600
            add_numbers(self.curves, record["step"], numbers)
            if seconds and record["step"] not in first_steps:
                self._seconds.append(seconds)
            self.failed_saves = record.get("checkpoint_failures", self.failed_saves)
            self.steps_computed_twice += (record.get("rounds") or 1) > 1

    def _read_state(self) -> None:
        """Set `state`: the verdict's word; without a verdict "ended" (the process has ended),
        "silent" (no step for a long time) or "training"."""
        now = time.time()
        self.seconds_since_step: float | None = None
        if self.last:
            self.seconds_since_step = max(0.0, now - self._modified("metrics.jsonl"))
        # the start of an attempt and an evaluation are activity too
        files = ("metrics.jsonl", "attempts.jsonl", "eval.jsonl")
        last_active = max(self._modified(name) for name in files)
        self.idle_seconds = max(0.0, now - last_active) if last_active else 0.0
        step_seconds = statistics.median(self._seconds) if self._seconds else 0.0
        # rank 0's process; empty while a batch script starts another attempt
        self.process: dict[str, Any] = {}
        if self.starts and self._last_beginning is self.starts[-1]:
            self.process = self.starts[-1].get("process") or {}
        self.running = is_running(self.process)  # None: this machine cannot tell
        self.late = self.idle_seconds > max(LATE_SECONDS, 5 * step_seconds)
        if self.verdict is not None:
            self.state = self.verdict[0]
            self.late = False
        elif self.running is False:
            self.state = "ended"
        elif self.idle_seconds > max(SILENT_SECONDS, 20 * step_seconds):
            self.state = "silent"
        else:
            self.state = "training"
        self.eta_seconds: float | None = None  # None: the run has ended, or it is unknown
        if self.state == "training" and not self.late and self._seconds and self.steps:
            self.eta_seconds = max(self.steps - self.step, 0) * step_seconds

    def _modified(self, name: str) -> float:
        """Seconds since the epoch; 0 without the file."""
        with contextlib.suppress(OSError):
            return (self.folder / name).stat().st_mtime
        return 0.0

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
        """A mapping in JSON or YAML; empty if it cannot be read."""
        parse = json.loads if name.endswith(".json") else load_yaml
        with contextlib.suppress(OSError, ValueError):
            content = parse((self.folder / name).read_text(encoding="utf-8"))
            return content if isinstance(content, dict) else {}
        return {}

    def key(self, name: str) -> Any:
        """The value of a recipe's key such as `optim.lr`; None if the recipe does not have it."""
        section, _, key = name.partition(".")
        values = self.recipe.get(section)
        return values.get(key) if isinstance(values, dict) else None

    def progress(self, separator: str = "  ") -> str:
        """The step, the time left and the time since the last step, in one line."""
        parts = [f"step {self.step:,}"]
        if self.steps:
            parts[0] += f" of {self.steps:,}"
        if self.eta_seconds is not None:
            parts.append(f"{format_seconds(self.eta_seconds)} left")
        if self.verdict is None and self.seconds_since_step is not None:
            parts.append(f"last step {format_seconds(self.seconds_since_step)} ago")
        return separator.join(parts)

    def notes(self) -> list[tuple[Level, str]]:
        """Signs of a problem, each with a hint; one note if there is none."""
        notes: list[tuple[Level, str]] = []
        word, reason = self.verdict or ("", "")
        if word in ("FAILED", "FATAL"):
            notes.append(("error", f"{word}: {reason}"))
        if self.state == "ended":
            text = (
                f"ended without a verdict: process {self.process.get('pid')} on "
                f"{self.process.get('host')} is gone, so it was killed (out of memory?) or the "
                f"machine restarted; {self._last_step()}. Run the same command to continue"
            )
            notes.append(("error", text))
        if self.state == "silent":
            notes.append(("error", f"{self._last_step()}: {self._why_no_step()}"))
        if self.state == "training" and self.late:
            notes.append(("warning", f"{self._last_step()}: {self._why_no_step()}"))
        if self.last and self.last.get("loss") is None:
            notes.append(("error", "the last loss is not a number"))
        if self.failed_saves:
            text = f"failed saves in a row: {self.failed_saves}; see clip-train checkpoints"
            notes.append(("warning", text))
        wait = self.curves[DATA_WAIT].recent if DATA_WAIT in self.curves else 0.0
        if wait > 10:
            text = f"{wait:.0f}% of a step waits for data: data.workers, or a faster disk"
            notes.append(("warning", text))
        if "slow_rank" in self.last:
            notes.append(("warning", self.last["slow_rank"]))
        if "gpu_throttled" in self.last:
            notes.append(("warning", f"rank 0's GPU is throttled: {self.last['gpu_throttled']}"))
        count = sum(self.invalid.get("bad_samples", {}).values())
        if count:
            share = count / max(self.last.get("samples", 0), count)
            text = f"{count:,} invalid samples, {share:.2%} of all seen"
            notes.append(("warning" if share > 0.01 else "ok", text))
        if not notes:
            notes.append(("ok", "no problems: no failed save, and data arrives in time"))
        return notes

    def _last_step(self) -> str:
        if self.seconds_since_step is None:
            return f"no step yet, {format_seconds(self.idle_seconds)} after its start"
        return f"last step {format_seconds(self.seconds_since_step)} ago"

    def _why_no_step(self) -> str:
        """The possible reasons why a run makes no steps."""
        host = self.process.get("host", "another machine")
        if self.running:
            return (
                f"process {self.process.get('pid')} still runs: it starts, saves, evaluates, or "
                "hangs"
            )
        if self.state == "silent":
            return (
                f"it has probably ended (killed, or its node is lost). It ran on {host}, and this "
                "machine cannot see its processes there"
            )
        return f"it runs on {host}: it starts, saves, evaluates, or has ended"


def add_numbers(curves: dict[str, Curve], step: int, numbers: Mapping[str, Any]) -> None:
    """Append each number to its curve. Other values, such as null in place of NaN, are left
    out."""
    for name, value in numbers.items():
        if isinstance(value, (int, float)) and math.isfinite(value):
            curve = curves.setdefault(name, Curve())
            curve.steps.append(step)
            curve.values.append(value)
