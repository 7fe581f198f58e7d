"""`report.html`: one file that shows how a run goes, or how several compare, to open anywhere;
`report.html.j2` is it.

Curves are SVG of at most 1,000 points each, whatever the length of the run; nothing is fetched from
elsewhere.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from clip_train.metrics.progress import format_seconds
from clip_train.metrics.run import CHARTS, DATA_WAIT, Curve, Run
from clip_train.settings import as_yaml
from clip_train.storage.local import LocalStorage

REFRESH_SECONDS = 60.0  # between two pages while a run trains
MOST_SHARE = 0.01  # of the time that they may take
ROWS = 500  # of a table of invalid samples
SHOWN_EVALUATIONS = 8
DATE = "%a %d %b %Y %H:%M"
SIZE = 1000  # of a chart, in its own units: it is stretched to the width that there is


class ReportSink:
    """Keeps `report.html` up to date while a run trains, in at most `MOST_SHARE` of its time."""

    def __init__(self, run_dir: Path | str, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = Path(run_dir), clock
        self._due = -math.inf

    def write(self, record: dict[str, Any], kind: str = "train") -> None:
        """The page is made from the run's folder; a record only says that there is something new.
        OSError.
        """
        if kind == "invalid":
            LocalStorage(self._folder).put_bytes("invalid.json", json.dumps(record).encode())
        started = self._clock()
        if kind == "train" and started >= self._due:
            write_report([self._folder])
            took = self._clock() - started
            self._due = started + max(REFRESH_SECONDS, took / MOST_SHARE)

    def close(self) -> None:
        """The last page needs the verdict: `write_report`, once there is one."""


def write_report(runs: Sequence[Path | str], output: Path | str | None = None) -> Path:
    """Write the page of a run, or of several beside each other, from their folders; returns its
    path. OSError.

    output: where to; by default `report.html` in the run's folder, or `comparison.html` here for
    several.
    """
    default = Path("comparison.html") if len(runs) > 1 else Path(runs[0]) / "report.html"
    path = Path(output or default).absolute()
    page = render([Run(folder) for folder in runs])
    LocalStorage(path.parent).put_bytes(path.name, page.encode())
    return Path(output or default)


def render(runs: Sequence[Run]) -> str:
    """The page, in HTML."""
    recipes: list[dict[str, Any]] = [{} for _ in runs]
    for run, recipe in zip(runs, recipes, strict=True):
        for name, section in run.recipe.items():
            keys = section if isinstance(section, dict) else {}
            recipe |= {f"{name}.{key}": value for key, value in keys.items()}
    differing = []
    for key in dict.fromkeys(key for recipe in recipes for key in recipe):
        values = [as_yaml(recipe[key]) if key in recipe else "-" for recipe in recipes]
        if len(set(values)) > 1:
            differing.append([key, *values])
    return _template().render(
        title=" and ".join(run.name for run in runs),
        runs=[_shown(run) | {"recipe": flat} for run, flat in zip(runs, recipes, strict=True)],
        charts=charts(runs, [run.curves for run in runs], CHARTS),
        eval_charts=charts(runs, [run.eval_curves for run in runs], scores_of(runs), dots=True),
        differing=differing,
        now=time.time(),
        written=time.strftime(DATE),
        live=[run.state for run in runs] == ["training"],
    )


@cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"number": number, "yaml": as_yaml, "seconds": format_seconds}
    template = Path(__file__).with_name("report.html.j2")
    return environment.from_string(template.read_text(encoding="utf-8"))


# -- what the page says


def _shown(run: Run) -> dict[str, Any]:
    """What the page has of a run in words and tables."""
    recent = {name: number(curve.recent) for name, curve in run.curves.items()}
    samples, memory = run.last.get("samples", 0), run.last.get("peak_memory_bytes", 0)
    first = number(run.curves["loss"].values[0]) if "loss" in run.curves else "-"
    seconds = run.seconds or 1.0
    scale = number(run.last.get("logit_scale"))
    tiles = [
        ("loss", recent.get("loss", "-"), f"first {first}"),
        (
            "samples per second",
            recent.get("samples_per_second", "-"),
            f"{number(samples / seconds)} in the mean",
        ),
        (
            "data wait",
            f"{recent.get(DATA_WAIT, '-')}%",
            f"{100 * run.waited / seconds:.1f}% of the whole run",
        ),
        ("samples seen", number(samples), f"{format_seconds(run.seconds)} in steps"),
        ("peak memory", f"{number(memory / 2**30)} GiB", "of rank 0"),
        ("logit scale", scale, f"learning rate {recent.get('lr', '-')}"),
    ]
    latest = run.evaluations[: -SHOWN_EVALUATIONS - 1 : -1]
    names: dict[str, None] = {}  # in the order of their first appearance
    for evaluation in latest:
        names |= dict.fromkeys(evaluation)
    names.pop("step", None)
    done_at = time.localtime(time.time() + (run.eta_seconds or 0))
    counts = sorted(run.invalid.get("bad_samples", {}).items(), key=lambda row: (-row[1], row[0]))
    return {
        "name": run.name, "state": run.state, "step": run.step, "steps": run.steps,
        "eta": run.eta_seconds,
        "done": 100 * min(run.step / run.steps, 1) if run.steps else None,
        "done_at": time.strftime(DATE, done_at),
        "notes": run.notes(), "tiles": tiles, "starts": run.starts,
        "now": run.starts[-1] if run.starts else {},
        "evaluations": [(name, [number(each.get(name)) for each in latest]) for name in names],
        "at": [each["step"] for each in latest],
        "invalid": [(*key.split("\t", 1), count) for key, count in counts[:ROWS]],
        "more_invalid": len(counts) - ROWS,
        "folder": str(run.folder),
    }  # fmt: skip


def scores_of(runs: Sequence[Run]) -> dict[str, str]:
    """The scores of all evaluations with their titles."""
    return {name: name for run in runs for name in run.eval_curves}


# -- charts


def charts(
    runs: Sequence[Run],
    curves: Sequence[Mapping[str, Curve]],
    titles: Mapping[str, str],
    *,
    dots: bool = False,
) -> list[dict[str, Any]]:
    """A chart for each title that has values: the curves of all runs over one axis of steps.

    titles: by the curve's name. dots: mark each value.
    """
    last = max((run.step for run in runs), default=0) or 1
    starts = []  # steps where an attempt began
    if len(runs) == 1:
        starts = [start["step"] for start in runs[0].starts[1:] if start["step"] <= last]
    shown = []
    for name, title in titles.items():
        found = {run: of_run[name] for run, of_run in enumerate(curves) if name in of_run}
        if found:
            lines = [f"{SIZE * step / last:.1f}" for step in starts]
            shown.append({**_chart(found, last, dots), "title": title, "starts": lines})
    return shown


def _chart(curves: Mapping[int, Curve], last: int, dots: bool) -> dict[str, Any]:
    """The axes, and of each run's curve the mean as a line with the band between its extremes."""
    thinned = {run: curve.thinned() for run, curve in curves.items()}
    low = min(points[:, 2].min() for points in thinned.values())
    high = max(points[:, 3].max() for points in thinned.values())
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    bottom, top = low - pad, high + pad

    def path(steps: np.ndarray, values: np.ndarray) -> list[str]:
        heights = SIZE * (top - values) / (top - bottom)
        return [f"{x:.1f},{y:.1f}" for x, y in zip(SIZE * steps / last, heights, strict=True)]

    series = []
    for run, points in thinned.items():
        steps, mean, least, most = points.T
        line = path(steps, mean)
        band = [*path(steps, most), *reversed(path(steps, least))]
        values = curves[run].values
        series.append({
            "colour": run % 8, "line": " ".join(line), "last": number(values[-1]),
            "band": " ".join(band) if len(values) > len(points) else "",
            "dots": "".join(f"M{point}h0" for point in line) if dots or len(line) == 1 else "",
        })  # fmt: skip
    y_ticks = [
        (f"{100 * (top - y) / (top - bottom):.2f}", number(y)) for y in ticks(bottom, top, 4)
    ]
    x_ticks = [(f"{100 * x / last:.2f}", number(x)) for x in ticks(0, last, 4)]
    return {
        "series": series, "y_ticks": y_ticks, "x_ticks": x_ticks,
        "bottom": bottom, "top": top, "last": last,
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
