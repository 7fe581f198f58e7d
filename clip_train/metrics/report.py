"""`report.html`: one file that shows how a run goes, or how several compare, to open anywhere; `report.html.j2` is it.

Curves are SVG of at most 1,000 points each, whatever the length of the run; nothing is fetched from elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from clip_train.metrics.progress import format_seconds
from clip_train.metrics.run import DATA_WAIT, MEMORY, Curve, Run
from clip_train.settings import as_yaml
from clip_train.storage.local import LocalStorage

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 60.0  # between two pages while a run trains
MOST_SHARE = 0.01  # of the time that they may take
ROWS = 500  # of a table of invalid samples
SIZE = 1000  # of a chart, in its own units: it is stretched to the width that there is
LOG_FROM = 50.0  # times the median that a curve goes up to: from here on its axis is logarithmic
CHARTS = {
    "loss": "loss",
    "logit_scale": "logit scale",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "samples_per_second": "samples per second",
    DATA_WAIT: "data wait, % of the step",
    MEMORY: "peak memory, GiB",
}
NOT_SHOWN = {"step_seconds", "data_wait_seconds", "num_samples", "zero_shot_samples"}


class ReportSink:
    """Keeps `report.html` up to date while a run trains, in at most `MOST_SHARE` of its time."""

    def __init__(self, run_dir: Path | str, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = Path(run_dir), clock
        self._run: Run | None = None
        self._due = -math.inf

    def write(self, record: dict[str, Any], kind: str = "train") -> None:
        """Of a record it takes no more than that there is one: the page is made from the run's folder. OSError."""
        if kind == "invalid":
            LocalStorage(self._folder).put_bytes("invalid.json", json.dumps(record).encode())
        started = self._clock()
        if kind != "train" or started < self._due:
            return
        if self._run is None:
            self._run = Run(self._folder)
        else:
            self._run.refresh()
        LocalStorage(self._folder).put_bytes("report.html", render([self._run]).encode())
        took = self._clock() - started
        self._due = started + max(REFRESH_SECONDS, took / MOST_SHARE)

    def close(self) -> None:
        """The last page needs the verdict: `write_report`, once there is one."""


def write_report(runs: Sequence[Path | str], output: Path | str | None = None) -> Path:
    """Write the page of a run, or of several beside each other, from their folders; returns its path. OSError.

    output: where to; by default `report.html` in the run's folder, or `comparison.html` here for several.
    """
    default = Path("comparison.html") if len(runs) > 1 else Path(runs[0]) / "report.html"
    path = Path(output or default)
    LocalStorage(path.absolute().parent).put_bytes(
        path.name, render([Run(each) for each in runs]).encode()
    )
    return path


def render(runs: Sequence[Run]) -> str:
    """The page, in HTML."""
    clocks = [_clock(run) for run in runs]
    return _template().render(
        title=" and ".join(run.name for run in runs),
        runs=[_shown(run) for run in runs],
        charts=[*_charts([run.curves for run in runs], runs)],
        eval_charts=[*_charts([run.eval_curves for run in runs], runs, dots=True)],
        clocks=clocks if all(each["parts"] for each in clocks) else [],
        final=_final(runs),
        differing=_differing(runs),
        now=time.time(),
        live=[run.state for run in runs] == ["training"],
    )


@cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"number": number, "yaml": as_yaml, "seconds": format_seconds}
    environment.filters["date"] = lambda seconds: time.strftime(
        "%a %d %b %Y %H:%M", time.localtime(seconds)
    )
    return environment.from_string(
        Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    )


# -- what the page says


def _shown(run: Run) -> dict[str, Any]:
    """What of a run the page has in words and tables."""
    curves = run.curves
    recent = {name: number(curve.recent) for name, curve in curves.items()}
    seconds = curves["step_seconds"].total if "step_seconds" in curves else 0.0
    samples = run.last.get("samples", 0)
    waited = (
        curves["data_wait_seconds"].total / seconds
        if seconds and "data_wait_seconds" in curves
        else 0.0
    )
    first = number(curves["loss"].first) if "loss" in curves else "-"
    wait = f"{curves[DATA_WAIT].recent:.1f}%" if DATA_WAIT in curves else "-"
    tiles = [
        ("loss", recent.get("loss", "-"), f"first {first}"),
        (
            "samples per second",
            recent.get("samples_per_second", "-"),
            f"{number(samples / (seconds or 1))} in the mean",
        ),
        ("data wait", wait, f"{100 * waited:.1f}% of the whole run"),
        ("samples seen", number(samples), f"{format_seconds(seconds)} in steps"),
        ("peak memory", f"{recent.get(MEMORY, '-')} GiB", "of rank 0"),
        ("logit scale", recent.get("logit_scale", "-"), f"learning rate {recent.get('lr', '-')}"),
    ]
    names = [
        name
        for name in dict.fromkeys(key for each in run.evaluations for key in each)
        if name != "step"
    ]
    evaluations = [
        (name, [number(each.get(name)) for each in reversed(run.evaluations)]) for name in names
    ]
    return {
        "name": run.name, "state": run.state, "step": run.step, "steps": run.steps, "eta": run.eta_seconds,
        "done": 100 * min(run.step / run.steps, 1) if run.steps else None, "reason": (run.verdict or ("", ""))[1],
        "notes": run.notes(), "tiles": tiles, "starts": run.starts, "now": run.starts[-1] if run.starts else {},
        "evaluations": evaluations, "at": [each["step"] for each in reversed(run.evaluations)],
        "invalid": _invalid(run.invalid.get("bad_samples", {})), "epochs": _epochs(run.invalid.get("bad_epochs", [])),
        "recipe": _flat(run.recipe), "folder": str(run.folder),
        "pictures": run.invalid.get("pictures", []),
        "more_invalid": len(run.invalid.get("bad_samples", {})) - ROWS,
    }  # fmt: skip


def _invalid(counts: Mapping[str, int]) -> list[tuple[str, str, int]]:
    worst_first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:ROWS]
    return [(*key.split("\t", 1), count) for key, count in worst_first]  # type: ignore[misc]


def _epochs(epochs: Sequence[Mapping[str, int]]) -> list[tuple[int, int, int]]:
    before = [0, *(each["bad_samples"] for each in epochs)]
    pairs = zip(epochs, before, strict=False)
    return [(each["epoch"], each["step"], each["bad_samples"] - so_far) for each, so_far in pairs]


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{s}.{k}": v
        for s, keys in recipe.items()
        if isinstance(keys, dict)
        for k, v in keys.items()
    }


def _differing(runs: Sequence[Run]) -> list[list[str]]:
    """Each key that is not the same in all recipes, with its values."""
    recipes = [_flat(run.recipe) for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    rows = [
        [key, *(as_yaml(recipe[key]) if key in recipe else "-" for recipe in recipes)]
        for key in keys
    ]
    return [row for row in rows if len(set(row[1:])) > 1]


def _final(runs: Sequence[Run]) -> list[list[str]]:
    """The last number of each curve and evaluation, of the losses and rates their latest mean."""
    rows = [["step", *(f"{run.step:,}" for run in runs)]]
    for name, title in CHARTS.items():
        rows.append(
            [
                title,
                *(number(run.curves[name].recent) if name in run.curves else "-" for run in runs),
            ]
        )
    for name in dict.fromkeys(name for run in runs for name in run.eval_curves):
        rows.append(
            [
                name,
                *(
                    number(run.eval_curves[name].last if name in run.eval_curves else None)
                    for run in runs
                ),
            ]
        )
    return rows


# -- charts


def _charts(
    curves: Sequence[Mapping[str, Curve]], runs: Sequence[Run], *, dots: bool = False
) -> Iterator[dict[str, Any]]:
    """One for each name, the known ones first, with the curves of all runs over one axis of steps."""
    names = dict.fromkeys([*CHARTS, *(name for each in curves for name in each)])
    last = max((run.step for run in runs), default=0) or 1
    events = _events(runs[0], last) if len(runs) == 1 else {"starts": [], "saves": []}
    for name in names:
        found = [(colour, each[name]) for colour, each in enumerate(curves) if name in each]
        if found and name not in NOT_SHOWN:
            yield _chart(CHARTS.get(name, name), found, last, dots) | events


def _events(run: Run, last: int) -> dict[str, list[str]]:
    """Where an attempt began, and where a checkpoint was committed."""
    starts = [each["step"] for each in run.starts[1:]]
    return {
        "starts": [f"{SIZE * step / last:.1f}" for step in starts if step <= last],
        "saves": [f"{SIZE * min(each.step / last, 1):.1f}" for each in run.saves.buckets],
    }


def _clock(run: Run) -> dict[str, Any]:
    """When its steps were, in seconds since the run began: of each attempt that has records the pairs [step, seconds],
    from its start on; and when each attempt started, those without records too."""
    began = [seconds for each in run.starts if (seconds := _seconds(each.get("time"))) is not None]
    zero = min([curve.first for _, curve in run.clock] + began, default=0.0)
    ends = [before for before, _ in run.clock[1:]] + [run.step]
    parts = []
    for (before, curve), end in zip(run.clock, ends, strict=False):
        start = max((each for each in began if each <= curve.first), default=curve.first)
        points = [
            (before, start),
            *((each.step, each.mean) for each in curve.buckets),
            (end, curve.last),
        ]
        parts.append([(round(step, 2), round(seconds - zero, 1)) for step, seconds in points])
    return {"parts": parts, "starts": [round(each - zero, 1) for each in began]}


def _seconds(text: Any) -> float | None:
    """Of a time as attempts.jsonl has it, since 1970; None of anything else."""
    with contextlib.suppress(ValueError, TypeError):
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    return None


def _chart(
    title: str, curves: Sequence[tuple[int, Curve]], last: int, dots: bool
) -> dict[str, Any]:
    """Title, axes, and of each curve its mean as a line with the band between its extremes."""
    low = min(bucket.least for _, curve in curves for bucket in curve.buckets)
    high = max(bucket.most for _, curve in curves for bucket in curve.buckets)
    log = (
        title != CHARTS[DATA_WAIT]
        and low > 0
        and high > LOG_FROM * max(curve.median for _, curve in curves)
    )
    scale: Callable[[float], float] = math.log10 if log else float
    pad = 0.05 * (scale(high) - scale(low)) or 0.05 * abs(scale(high)) or 1.0
    bottom, top = scale(low) - pad, scale(high) + pad

    def at(step: float, value: float) -> str:
        return f"{SIZE * step / last:.1f},{SIZE * (top - scale(value)) / (top - bottom):.1f}"

    series = []
    for colour, curve in curves:
        points = [at(each.step, each.mean) for each in curve.buckets]
        band = [at(each.step, each.most) for each in curve.buckets]
        band += [at(each.step, each.least) for each in reversed(curve.buckets)]
        series.append({
            "colour": colour % 8, "run": colour, "line": " ".join(points),
            "band": " ".join(band) if curve.width > 1 else "",
            "dots": "".join(f"M{point}h0" for point in points) if dots or len(points) == 1 else "",
            "last": number(curve.last),
        })  # fmt: skip
    y_ticks = [
        (f"{100 * (top - y) / (top - bottom):.2f}", number(10**y if log else y))
        for y in ticks(bottom, top, 4)
    ]
    x_ticks = [(f"{100 * x / last:.2f}", number(x)) for x in ticks(0, last, 4)]
    return {
        "title": title + ", logarithmic" * log, "series": series, "y_ticks": y_ticks, "x_ticks": x_ticks,
        "bottom": bottom, "top": top, "log": log, "last": last,
    }  # fmt: skip


def ticks(low: float, high: float, num: int) -> list[float]:
    """About `num` round numbers from low to high."""
    rough = (high - low) / num
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step)
    return [step * each for each in range(first, math.floor(high / step) + 1)]


def number(value: Any) -> str:
    """Short: 4 digits, 12.3k, 4.56M; as it is where it is none."""
    if value is None or isinstance(value, (bool, str)):
        return "-" if value is None else str(value)
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}" if abs(value) < 1e4 and value != int(value) else f"{value:,.0f}"
