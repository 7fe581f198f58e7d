"""Write `report.html`, one self-contained file about a run, from `report.html.j2`.

It needs only the run's folder (`clip_train.metrics.run`). Curves are SVG of at most 1,000 points
each, whatever the length of the run; images are in the page; nothing is fetched from elsewhere.
"""

import base64
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clip_train.metrics.progress import format_number, format_seconds
from clip_train.metrics.run import DATA_WAIT, Curve, Run
from clip_train.metrics.scores import DataSet, Score, score_text
from clip_train.settings import as_yaml
from clip_train.storage.local import LocalStorage

DATE = "%a %d %b %Y %H:%M"
SIZE = 1000  # width of a chart in its own units; the browser stretches it to the page
BUCKETS = 320  # per curve; each has a mean, a least and a greatest value: 960 points
EVALUATIONS_SHOWN = 6  # for the captions of an image: the first, the last and some between them


@dataclass(frozen=True)
class Line:
    """One curve in a chart, and how it is drawn."""

    title: str
    curve: Curve | Score
    color: int = 0
    dashed: bool = False
    factor: float = 1.0  # the chart shows the curve's values times this


@dataclass(frozen=True)
class Chart:
    """Lines with one axis. unit: "%" or nothing."""

    title: str
    lines: Sequence[Line]
    unit: str = ""

    def drawn_lines(self) -> list[Line]:
        """The lines of at least two values; a single value is shown as a number."""
        return [line for line in self.lines if len(line.curve.values) > 1]


def write_report(run_dir: Path | str) -> Path:
    """Write the page of a run from its folder; returns its path. OSError."""
    import jinja2

    path = Path(run_dir) / "report.html"
    run = Run(run_dir)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"number": format_number, "yaml": as_yaml, "seconds": format_seconds}
    training = training_charts(run)
    evaluation = evaluation_charts(run.scores.data_sets)
    template = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        run=run,
        latest=run.starts[-1] if run.starts else None,
        score_text=score_text,
        facts=facts(run),
        examples=examples(run),
        numbers=latest_numbers([chart for chart in training if not chart.drawn_lines()]),
        charts=[drawn(run, chart) for chart in training if chart.drawn_lines()],
        evaluation_charts=[drawn(run, chart) for chart in evaluation if chart.drawn_lines()],
        has_recall=any("image_to_text_R@1" in row.scores for row in run.scores.data_sets),
        now=time.time(),
        written=time.strftime(DATE),
    )
    LocalStorage(path.absolute().parent).put_bytes(path.name, page.encode(errors="replace"))
    return path


# -- what the charts show


def training_charts(run: Run) -> list[Chart]:
    """The curves of metrics.jsonl."""
    losses = [Line("loss", run.curves["loss"])] if "loss" in run.curves else []
    norms = [Line("whole model", run.curves["grad_norm"])] if "grad_norm" in run.curves else []
    for name, curve in run.curves.items():
        if name.endswith("_loss"):
            title = name.removesuffix("_loss").replace("_", " ")
            losses.append(Line(title, curve, color=len(losses)))
        if name.startswith("grad_norm_"):
            norms.append(Line(name.removeprefix("grad_norm_"), curve, color=len(norms)))
    utilization = (("mfu", "as if padded"), ("mfu_computed", "computed"))
    used = [
        Line(title, run.curves[name], color=i)
        for i, (name, title) in enumerate(utilization)
        if name in run.curves
    ]
    charts = [Chart("loss", losses)]
    for name, title, unit in (
        ("lr", "learning rate", ""),
        ("logit_scale", "logit scale", ""),
        ("logit_bias", "logit bias", ""),
    ):
        if name in run.curves:
            charts.append(Chart(title, [Line(title, run.curves[name])], unit))
    charts.append(Chart("gradient norm before the clip", norms))
    if "samples_per_second" in run.curves:
        rate = Line("samples per second", run.curves["samples_per_second"])
        charts.append(Chart("samples per second", [rate]))
    charts.append(Chart("MFU", used, "%"))
    if DATA_WAIT in run.curves:
        title = "data wait, share of the step"
        charts.append(Chart(title, [Line(title, run.curves[DATA_WAIT])], "%"))
    return [chart for chart in charts if chart.lines]


def evaluation_charts(data_sets: Sequence[DataSet]) -> list[Chart]:
    """One chart for all recalls of a data set; then those of zero-shot accuracy, of losses, and of
    scores of the user's own. Moving averages and narrow features are only in the table."""
    rows = [row for row in data_sets if not row.variant]
    charts = [recall_chart(row) for row in rows]
    for row in rows:
        accuracies = []
        for color, k in enumerate((1, 5)):
            score = row.scores.get(f"zero_shot_top{k}")
            if score is not None:
                accuracies.append(Line(f"top-{k}", score, color, factor=100))
        charts.append(Chart(f"{row.label}: zero-shot accuracy", accuracies, "%"))
    for row in rows:
        single = row.own_scores()
        if "val_loss" in row.scores:
            single.insert(0, row.scores["val_loss"])
        for score in single:
            charts.append(Chart(f"{row.label}: {score.title}", [Line(score.title, score)]))
    return [chart for chart in charts if chart.lines]


def recall_chart(row: DataSet) -> Chart:
    """Image to text as lines, text to image as dashed lines."""
    lines = []
    for color, k in enumerate((1, 5, 10)):
        for direction, words in (("image_to_text", "I→T"), ("text_to_image", "T→I")):
            score = row.scores.get(f"{direction}_R@{k}")
            if score is not None:
                dashed = direction == "text_to_image"
                lines.append(Line(f"{words} R@{k}", score, color, dashed=dashed, factor=100))
    return Chart(f"{row.label}: recall", lines, "%")


def latest_numbers(charts: Sequence[Chart]) -> list[tuple[str, str]]:
    """Titles and values, for a run that is too young for charts."""
    numbers = []
    for chart in charts:
        for line in chart.lines:
            title = chart.title
            if len(chart.lines) > 1 and line.title != title:
                title = f"{title}, {line.title}"
            numbers.append((title, format_number(line.curve.values[-1]) + chart.unit))
    return numbers


def facts(run: Run) -> list[tuple[str, str]]:
    """The facts about a run, as names and values; unknown ones are left out."""
    latest = run.starts[-1] if run.starts else {}
    out: list[tuple[str, str]] = []

    def add(name: str, text: Any) -> None:
        if text not in (None, ""):
            out.append((name, str(text)))

    model = run.key("model.name")
    parameters = latest.get("parameters")
    if parameters:
        model = f"{model or 'model'}, {format_number(float(parameters))} parameters"
    add("model", model)
    add("batch", batch_text(run))
    rate = run.key("optim.lr")
    if rate is not None:
        text = f"{rate} at its peak"
        if run.key("schedule.warmup_steps") is not None:
            text += f", {run.key('schedule.warmup_steps')} warmup steps"
        if run.key("schedule.name"):
            text += f", {run.key('schedule.name')}"
        if run.key("optim.name"):
            text += f"; {run.key('optim.name')}"
        add("learning rate", text)
    samples = latest.get("train_samples") or run.key("data.num_samples")
    data = run.key("data.train")
    if samples and data:
        data = f"{data} ({format_number(samples)} samples)"
    add("training data", data)
    add("validation data", ", ".join(validation_places(run)))
    seen = run.last.get("samples")
    if seen:
        text = f"{seen:,}"
        if samples:
            text += f", {seen / samples:.3g} epochs"
        add("samples seen", text)
    add("time", time_text(run))
    if run.steps_computed_twice:
        share = run.steps_computed_twice / max(run.steps_recorded, 1)
        add("steps computed twice", f"{run.steps_computed_twice:,} ({share:.1%})")
    return out


def batch_text(run: Run) -> str:
    """The global batch, and its parts in the last step."""
    size = run.key("batch.global_size")
    text = "" if size is None else str(size)
    micro, steps = run.last.get("micro_size"), run.last.get("accum_steps")
    ranks = run.starts[-1].get("ranks") if run.starts else None
    if micro and steps and ranks:
        ranks_text = "1 rank" if ranks == 1 else f"{ranks} ranks"
        text += f" = {ranks_text} x {steps} micro-batches of at most {micro}"
    return text


def validation_places(run: Run) -> list[str]:
    places = run.key("data.val")
    named = places if isinstance(places, dict) else {}
    named = named | {name: one["data"] for name, one in (run.key("evaluate.sets") or {}).items()}
    listed = [f"{name}: {place}" for name, place in named.items()]
    return [places, *listed] if isinstance(places, str) else listed


def time_text(run: Run) -> str:
    """GPU-hours as Slurm counts them, else those of the steps; on a CPU, hours of the steps."""
    if run.gpu_hours:
        return f"{run.gpu_hours:,.1f} GPU-hours, {run.gpu_hours_lost:,.1f} of them lost"
    if not run.step_hours:
        return ""
    text = f"{format_seconds(3600 * run.step_hours)} in steps"
    latest = run.starts[-1] if run.starts else {}
    if latest.get("device") == "cuda":
        text += f", {format_number(run.step_hours * latest.get('ranks', 1))} GPU-hours"
    return text


def examples(run: Run) -> list[dict[str, Any]]:
    """The images of the last evaluation, each with its captions as ranked there and earlier.

    Earlier evaluations of other images (`data.val` was changed) are left out.
    """
    by_step = {record["step"]: record for record in run.examples}
    records = [record for _, record in sorted(by_step.items())]
    try:
        return _examples(run.folder, records)
    except (KeyError, TypeError, AttributeError):  # the file is damaged
        return []


def _examples(folder: Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """records: of examples.jsonl, by ascending step."""
    if not records:
        return []
    images = []
    for i, image in enumerate(records[-1]["images"]):
        evaluations = []  # those of this image
        for record in records:
            if i < len(record["images"]) and record["images"][i]["key"] == image["key"]:
                ranked = [
                    {
                        "caption": caption["caption"],
                        "cosine": "-" if caption["cosine"] is None else f"{caption['cosine']:.3f}",
                        "own": caption["own"],
                    }
                    for caption in record["images"][i]["ranked"]
                ]
                evaluations.append({"step": record["step"], "ranked": ranked})
        # the first, the last, and some between them
        picked = {
            round(j * (len(evaluations) - 1) / max(1, EVALUATIONS_SHOWN - 1))
            for j in range(EVALUATIONS_SHOWN)
        }
        source = ""
        with contextlib.suppress(OSError):
            data = (folder / "examples" / f"{i}.jpg").read_bytes()
            source = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
        images.append(
            {
                "key": image["key"],
                "captions": image["captions"],
                "source": source,
                "evaluations": [evaluations[j] for j in sorted(picked, reverse=True)],
            }
        )
    return images


# -- how they are drawn


def drawn(run: Run, chart: Chart) -> dict[str, Any]:
    """A chart over the run's steps for the template. Each line shows the mean; a chart with one line
    also has the band between the extremes."""
    lines = chart.drawn_lines()
    last = max(run.step or 1, *(line.curve.steps[-1] for line in lines))  # step
    summaries = [summarize(line) for line in lines]
    least = min(summary[:, 2].min() for summary in summaries)
    most = max(summary[:, 3].max() for summary in summaries)
    pad = 0.05 * (most - least) or 0.05 * abs(most) or 1.0
    bottom, top = least - pad, most + pad  # of the vertical axis
    if chart.unit == "%" and bottom < 0 <= least:
        bottom = 0.0

    def points(steps: np.ndarray, values: np.ndarray) -> list[str]:
        heights = SIZE * (top - values) / (top - bottom)
        return [f"{x:.1f},{y:.1f}" for x, y in zip(SIZE * steps / last, heights, strict=True)]

    paths = []
    for line, summary in zip(lines, summaries, strict=True):
        steps, mean, low, high = summary.T
        band: list[str] = []
        if len(lines) == 1 and len(line.curve.values) > len(steps):
            band = [*points(steps, high), *reversed(points(steps, low))]
        path = points(steps, mean)
        dots = ""  # on each of a few evaluations
        if isinstance(line.curve, Score) and len(path) <= 30:
            dots = "".join(f"M{point}h0" for point in path)
        paths.append(
            {
                "title": line.title,
                "color": line.color % 6,
                "dashed": line.dashed,
                "points": " ".join(path),
                "band": " ".join(band),
                "dots": dots,
                "value": format_number(line.factor * line.curve.values[-1]) + chart.unit,
            }
        )
    starts = [start["step"] for start in run.starts[1:] if start["step"] <= last]
    heights = [(100 * (top - y) / (top - bottom), y) for y in ticks(bottom, top, 4)]
    return {
        "title": chart.title,
        "unit": chart.unit,
        "lines": paths,
        "starts": [f"{SIZE * step / last:.1f}" for step in starts],
        "x_ticks": [(f"{100 * x / last:.2f}", format_number(x)) for x in ticks(0, last, 4)],
        "y_ticks": [(f"{height:.2f}", format_number(y) + chart.unit) for height, y in heights],
        "bottom": bottom,
        "top": top,
        "last": last,
    }


def summarize(line: Line) -> np.ndarray:
    """[at most BUCKETS, 4]: the curve in parts of equal length; for each, the mean step, and the
    mean, least and greatest value."""
    values = line.factor * np.array(line.curve.values, dtype=np.float64)
    points = np.array([line.curve.steps, values], dtype=np.float64).T
    parts = np.array_split(points, min(len(points), BUCKETS))
    return np.array([(*part.mean(0), part[:, 1].min(), part[:, 1].max()) for part in parts])


def ticks(low: float, high: float, num: int) -> list[float]:
    """About `num` round numbers from low to high."""
    rough = (high - low) / num
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step)
    return [step * multiple for multiple in range(first, math.floor(high / step) + 1)]
