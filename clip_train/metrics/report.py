"""Write `report.html`, one self-contained file with a run's curves, from `report.html.j2`.

It needs only the run's folder:

metrics.jsonl, eval.jsonl      the curves
attempts.jsonl, VERDICT        each start with its machine (event `start`), and how it ended
recipe.yaml                    the number of steps
invalid.json                   how many samples could not be used

Curves are SVG of at most 1,000 points each, whatever the length of the run; nothing is fetched from
elsewhere.
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

from clip_train.metrics.jsonl import iter_jsonl
from clip_train.metrics.progress import format_seconds
from clip_train.settings import as_yaml
from clip_train.storage.local import LocalStorage
from clip_train.yaml_text import load_yaml

DATE = "%a %d %b %Y %H:%M"
SIZE = 1000  # of a chart, in its own units: it is stretched to the width that there is
BUCKETS = 320  # of a curve as it is drawn; the mean, the least and the greatest are 960 points
RECENT = 50  # steps that the ETA is made from
SILENT_SECONDS = 300.0  # without a step, and twenty times the duration of one: something is wrong
CHARTS = {"loss": "loss", "lr": "learning rate", "samples_per_second": "samples per second"}
DATA_WAIT = "data wait, % of the step"
NO_CURVE = {"step", "num_samples", "zero_shot_samples"}  # of an evaluation

Level = Literal["ok", "warning", "error"]


def write_report(run_dir: Path | str) -> Path:
    """Write the page of a run from its folder; returns its path. OSError."""
    import jinja2

    path = Path(run_dir) / "report.html"
    run = Run(run_dir)
    scores = {name: name for name in run.eval_curves}
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"number": number, "yaml": as_yaml, "seconds": format_seconds}
    template = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        run=run,
        latest=run.starts[-1] if run.starts else None,
        charts=charts(run, run.curves, CHARTS),
        eval_charts=charts(run, run.eval_curves, scores, dots=True),
        now=time.time(),
        written=time.strftime(DATE),
    )
    LocalStorage(path.absolute().parent).put_bytes(path.name, page.encode())
    return path


# -- a run's folder


class Curve:
    """One number over the steps."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    @property
    def recent(self) -> float:
        """The mean of its last tenth."""
        return statistics.fmean(self.values[-max(1, len(self.values) // 10) :])


class Run:
    """A folder, read once: look again with another `Run`. A folder without files is a run that has
    not started."""

    def __init__(self, folder: Path | str) -> None:
        """OSError if it cannot be read."""
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        self.recipe = self._load("recipe.yaml")
        self.invalid = self._load("invalid.json")
        self.verdict = self._read_verdict()  # the word, and the reason; None while it trains
        attempts = list(self._records("attempts.jsonl"))
        self.starts = [record for record in attempts if record.get("event") == "start"]
        for start, following in itertools.zip_longest(self.starts, self.starts[1:]):
            start["ended"] = following.get("previous") if following else self.verdict
        # of a Slurm job's attempts that have ended
        self.gpu_hours = sum(record.get("gpu_hours", 0.0) for record in attempts)
        self.gpu_hours_lost = sum(record.get("gpu_hours_lost", 0.0) for record in attempts)
        self.curves: dict[str, Curve] = {}
        self.eval_curves: dict[str, Curve] = {}
        self.last: dict[str, Any] = {}  # record
        self.failed_saves = 0
        seconds = []  # of steps; the first of an attempt is compiling and warming up
        firsts = {1, *(start["step"] + 1 for start in self.starts)}
        for record in self._records("metrics.jsonl"):
            self.last = record
            numbers = {name: record.get(name) for name in CHARTS}
            if record.get("step_seconds"):
                waited = record.get("data_wait_seconds", 0.0)
                numbers[DATA_WAIT] = 100 * waited / record["step_seconds"]
            add_numbers(self.curves, record["step"], numbers)
            if record.get("step_seconds") and record["step"] not in firsts:
                seconds.append(record["step_seconds"])
            self.failed_saves = record.get("checkpoint_failures", self.failed_saves)
        self.evaluations = list(self._records("eval.jsonl"))
        for record in self.evaluations:
            scores = {
                name: value
                for name, value in record.items()
                if name.rpartition("/")[2] not in NO_CURVE
            }
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
        """A mapping in JSON or YAML; empty if it cannot be read."""
        parse = json.loads if name.endswith(".json") else load_yaml
        with contextlib.suppress(OSError, ValueError):
            found = parse((self.folder / name).read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}

    def notes(self) -> list[tuple[Level, str]]:
        """Is it healthy? Signs of a problem, each with a hint."""
        word, reason = self.verdict or ("", "")
        wait = self.curves[DATA_WAIT].recent if DATA_WAIT in self.curves else 0.0
        count = sum(self.invalid.get("bad_samples", {}).values())
        share = count / max(self.last.get("samples", 0), count, 1)
        rules: list[tuple[bool, Level, str]] = [
            (word in ("FAILED", "FATAL"), "error", f"{word}: {reason}"),
            (
                self.state == "silent",
                "error",
                f"no step for {format_seconds(self.silent_seconds)}: is it still running?",
            ),
            (
                bool(self.last) and self.last.get("loss") is None,
                "error",
                "the last loss is not a number",
            ),
            (
                self.failed_saves > 0,
                "warning",
                f"failed saves in a row: {self.failed_saves}; see clip-train checkpoints",
            ),
            (
                wait > 10,
                "warning",
                f"{wait:.0f}% of a step waits for data: data.workers, or a faster disk",
            ),
            ("slow_rank" in self.last, "warning", self.last.get("slow_rank", "")),
            (
                count > 0,
                "warning" if share > 0.01 else "ok",
                f"{count:,} invalid samples, {share:.2%} of all seen",
            ),
        ]
        found = [(level, text) for holds, level, text in rules if holds]
        return found or [("ok", "no problems: no failed save, and data arrives in time")]


def add_numbers(curves: dict[str, Curve], step: int, numbers: Mapping[str, Any]) -> None:
    """Each number to its curve. Not-a-number was written as null: it is left out."""
    for name, value in numbers.items():
        if isinstance(value, (int, float)) and math.isfinite(value):
            curve = curves.setdefault(name, Curve())
            curve.steps.append(step)
            curve.values.append(value)


# -- charts


def charts(
    run: Run, curves: Mapping[str, Curve], titles: Mapping[str, str], *, dots: bool = False
) -> list[dict[str, Any]]:
    """A chart for each title that has values, over one axis of steps: the mean as a line, with the
    band between the extremes.

    titles: by the curve's name. dots: mark each value.
    """
    last = run.step or 1
    starts = [start["step"] for start in run.starts[1:] if start["step"] <= last]
    return [
        {
            **_chart(curves[name], last, dots),
            "title": title,
            "starts": [f"{SIZE * step / last:.1f}" for step in starts],
        }
        for name, title in titles.items()
        if name in curves
    ]


def _chart(curve: Curve, last: int, dots: bool) -> dict[str, Any]:
    points = np.array([curve.steps, curve.values], dtype=np.float64).T
    parts = np.array_split(points, min(len(points), BUCKETS))
    summary = [(*part.mean(0), part[:, 1].min(), part[:, 1].max()) for part in parts]
    steps, mean, least, most = np.array(summary).T
    pad = 0.05 * (most.max() - least.min()) or 0.05 * abs(most.max()) or 1.0
    bottom, top = least.min() - pad, most.max() + pad

    def path(values: np.ndarray) -> list[str]:
        heights = SIZE * (top - values) / (top - bottom)
        return [f"{x:.1f},{y:.1f}" for x, y in zip(SIZE * steps / last, heights, strict=True)]

    line = path(mean)
    band = [*path(most), *reversed(path(least))] if len(curve.values) > len(line) else []
    heights = [(100 * (top - y) / (top - bottom), y) for y in ticks(bottom, top, 4)]
    return {
        "line": " ".join(line),
        "band": " ".join(band),
        "dots": "".join(f"M{point}h0" for point in line) if dots or len(line) == 1 else "",
        "value": number(curve.values[-1]),
        "x_ticks": [(f"{100 * x / last:.2f}", number(x)) for x in ticks(0, last, 4)],
        "y_ticks": [(f"{height:.2f}", number(y)) for height, y in heights],
        "bottom": bottom,
        "top": top,
        "last": last,
    }


def ticks(low: float, high: float, num: int) -> list[float]:
    """About `num` round numbers from low to high."""
    rough = (high - low) / num
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step)
    return [step * each for each in range(first, math.floor(high / step) + 1)]


def number(value: Any) -> str:
    """A short number: 4 digits, 12.3k, 4.56M. Other values stay as they are."""
    if value is None or isinstance(value, (bool, str)):
        return "-" if value is None else str(value)
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}" if abs(value) < 1e4 and value != int(value) else f"{value:,.0f}"
