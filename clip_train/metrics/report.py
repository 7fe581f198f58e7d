"""`report.html`: one file that shows how a run went, to open anywhere; and `loss.png`."""

from __future__ import annotations

import base64
import html
import io
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clip_train.metrics.progress import format_seconds
from clip_train.metrics.sinks import iter_jsonl
from clip_train.storage.local import LocalStorage

Curve = tuple[Sequence[int], Sequence[float]]  # steps, and a value at each
_COLOUR, _PALE, _GRID = "#2f5d8a", "#b9cde0", "#e4e4e4"
_EXACT = {"learning rate", "logit scale"}  # charts without noise: a smoothed line would only be wrong
_SMOOTH_FROM = 50  # records from which on a smoothed line is drawn over the raw one
_WAIT = "data wait, %"
_CHARTS = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "logit_scale": "logit scale",
    "samples_per_second": "samples per second",
    _WAIT: "waiting for data, % of the step",
}
_SUMMARY: dict[str, tuple[str, Callable[[Sequence[float]], str]]] = {
    "step": ("steps", lambda values: f"{values[-1]:,.0f}"),
    "samples": ("samples seen", lambda values: f"{values[-1]:,.0f}"),
    "loss": ("loss, first and last", lambda values: f"{values[0]:.4f}, {values[-1]:.4f}"),
    "samples_per_second": ("samples per second, median", lambda values: f"{np.median(values):,.1f}"),
    "peak_memory_bytes": ("peak memory", lambda values: f"{max(values) / 2**30:.2f} GiB"),
    "step_seconds": ("time in steps", lambda values: format_seconds(sum(values))),
}
_SHOWN = {*_CHARTS, *_SUMMARY, "data_wait_seconds"}


def write_report(
    run_dir: Path | str,
    *,
    bad_samples: Mapping[str, int] | None = None,
    bad_epochs: Sequence[Mapping[str, int]] = (),
) -> Path:
    """Write `report.html` and `loss.png` into `run_dir`; returns the report's path.

    Reads `metrics.jsonl` and, where they exist, `eval.jsonl`, `recipe.yaml` and `VERDICT`.
    bad_samples: "reason<TAB>shard" -> count, as `Batch.bad_samples` has them; bad_epochs: for each epoch that
    has ended "epoch", "step", "bad_samples" (so far). OSError.
    """
    run_dir = Path(run_dir)
    curves = _curves(run_dir / "metrics.jsonl", _SHOWN)
    evals = _curves(run_dir / "eval.jsonl")
    evals.pop("step", None)
    loss_png = _draw({"loss": curves.get("loss", ([], []))}, width=8.0, height=4.0)
    training = {title: curves.get(name, ([], [])) for name, title in _CHARTS.items()}
    parts = [f"<h1>{html.escape(run_dir.resolve().name)}</h1>", _summary(run_dir, curves)]
    parts.append(_image("training", _draw(training)))
    if evals:
        parts.append("<h2>Validation</h2>")
        parts.append(_image("validation", _draw(evals, dots=True)))
        last = [(name, f"{values[-1]:.6g}") for name, (_, values) in evals.items()]
        parts.append(_table(("metric", "last value"), last))
    if bad_samples:
        parts.append("<h2>Invalid samples</h2>" + _bad_samples(bad_samples) + _bad_epochs(bad_epochs))
    recipe = run_dir / "recipe.yaml"
    if recipe.exists():
        parts.append(f"<h2>Recipe</h2><pre>{html.escape(recipe.read_text(encoding='utf-8'))}</pre>")
    storage = LocalStorage(run_dir)
    storage.put_bytes("loss.png", loss_png)
    storage.put_bytes("report.html", _page(run_dir.resolve().name, "\n".join(parts)).encode())
    return run_dir / "report.html"


# -- numbers


def _curves(path: Path, names: Collection[str] | None = None) -> dict[str, Curve]:
    """What the records have numbers of (of `names`; None: all), in the order of appearance.

    Not-a-number was written as null: it is left out. One record at a time: a run may have a million.
    """
    curves: dict[str, tuple[array[int], array[float]]] = {}
    for record in iter_jsonl(path) if path.exists() else ():
        if "step" not in record:
            continue
        seconds, wait = record.get("step_seconds"), record.get("data_wait_seconds")
        if seconds and wait is not None:
            record[_WAIT] = 100 * wait / seconds
        for name in record if names is None else names:
            value = record.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                steps, values = curves.setdefault(name, (array("q"), array("d")))
                steps.append(record["step"])
                values.append(value)
    return dict(curves)


def _smooth(steps: Sequence[int], values: Sequence[float]) -> tuple[Any, Any]:
    """The mean over a fiftieth of the run, at the middle of what it is of."""
    width = max(len(values) // 50, 2)
    sums = np.cumsum(np.insert(np.asarray(values), 0, 0.0))
    return steps[width // 2 :][: len(sums) - width], (sums[width:] - sums[:-width]) / width


# -- pictures


def _draw(
    charts: Mapping[str, Curve], *, dots: bool = False, width: float = 10.0, height: float | None = None
) -> bytes:
    """A PNG of line charts by their titles over the step, two in a row. `Figure` draws by Agg: it needs no display."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(2, len(charts))
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(width, height or 2.6 * rows), dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(charts) :]:
        axis.set_visible(False)
    for axis, (title, (steps, values)) in zip(axes, charts.items(), strict=False):
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(color=_GRID, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        if len(values) >= _SMOOTH_FROM and not dots and title not in _EXACT:
            axis.plot(steps, values, color=_PALE, linewidth=0.8)
            axis.plot(*_smooth(steps, values), color=_COLOUR, linewidth=1.4)
        else:
            axis.plot(steps, values, color=_COLOUR, linewidth=1.4, marker="o" if dots else None, markersize=3)
    buffer = io.BytesIO()
    with rc_context({"agg.path.chunksize": 10_000}):  # a run may have a million steps
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


# -- HTML

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222 }
body { max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; margin-bottom: 0.2em } h2 { font-size: 1.1em; margin-top: 2em }
img { width: 100%; height: auto } table { border-collapse: collapse; font-size: 0.9em }
th, td { text-align: left; vertical-align: top; padding: 0.2em 1.2em 0.2em 0 }
td { border-bottom: 1px solid #e4e4e4 }
td:first-child { font-family: ui-monospace, monospace } th { font-weight: 600 }
"""


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>\n" + row(header, "th") + "\n" + "\n".join(row(each, "td") for each in rows) + "\n</table>"


def _image(alt: str, png: bytes) -> str:
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _summary(run_dir: Path, curves: Mapping[str, Curve]) -> str:
    if not curves:
        return "<p>No step has been recorded yet.</p>"
    numbers = {name: values for name, (_, values) in curves.items()}
    verdict = run_dir / "VERDICT"
    rows = [("verdict", verdict.read_text(encoding="utf-8").split("\n")[0])] if verdict.exists() else []
    rows += [(title, shown(numbers[name])) for name, (title, shown) in _SUMMARY.items() if name in numbers]
    if _WAIT in numbers:
        share = 100 * sum(numbers["data_wait_seconds"]) / sum(numbers["step_seconds"])
        rows.append(("waiting for data", f"{share:.1f}% of it"))
    return _table(("", ""), rows)


def _bad_samples(counts: Mapping[str, int]) -> str:
    worst_first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return _table(("reason", "shard", "samples"), [(*key.split("\t", 1), f"{count:,}") for key, count in worst_first])


def _bad_epochs(epochs: Sequence[Mapping[str, int]]) -> str:
    rows, before = [], 0
    for each in epochs:
        rows.append((str(each["epoch"]), f"{each['step']:,}", f"{each['bad_samples'] - before:,}"))
        before = each["bad_samples"]
    return _table(("epoch", "ended at step", "invalid samples in it"), rows) if rows else ""
