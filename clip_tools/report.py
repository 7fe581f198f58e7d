"""`clip-train report` and `clip-train watch`: how a run goes, as a page and in a terminal."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from clip_train.errors import UserError
from clip_train.metrics.progress import format_seconds
from clip_train.metrics.report import CHARTS, number, write_report
from clip_train.metrics.run import Run
from launcher.config.recipe import load_config
from launcher.runtime.log import log

LOOK_SECONDS = 2.0
PIPED_WIDTH = 10_000  # characters: no line is cut for a program that reads it
BARS = "▁▂▃▄▅▆▇█"
SPARKS = ("loss", "grad_norm", "samples_per_second")
COLOURS = {
    "ok": "green",
    "warning": "yellow",
    "error": "red",
    "DONE": "green",
    "training": "green",
    "silent": "red",
}
COLOURS |= {"PREEMPTED": "yellow", "FAILED": "red", "FATAL": "red"}


def write(args: argparse.Namespace) -> int:
    """The page, anew, of one run or of several."""
    path = write_report([folder_of(place) for place in args.runs], args.output)
    log(f"written: {path}")
    return 0


def watch(args: argparse.Namespace) -> int:
    """Until the run is done, or Ctrl-C; once where nobody looks at a terminal."""
    run, console = Run(folder_of(args.run)), Console()
    width = console.width
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    if args.once or not console.is_terminal:
        console.print(view(run, width))
        return 0
    try:
        with Live(view(run, console.width), console=console, auto_refresh=False) as live:
            while run.state != "DONE":
                time.sleep(LOOK_SECONDS)
                run.refresh()
                live.update(view(run, console.width), refresh=True)
    except KeyboardInterrupt:
        pass
    return 0


def folder_of(place: str) -> Path:
    """A run's folder, or that of a recipe. UserError where there is none."""
    path = Path(place).expanduser()
    folder = load_config(place).run_dir if path.is_file() else path
    if not any((folder / name).exists() for name in ("recipe.yaml", "metrics.jsonl")):
        raise UserError(
            f"{folder} holds no run (no recipe.yaml, no metrics.jsonl): give a run's folder, or its recipe"
        )
    return folder


def view(run: Run, width: int) -> RenderableType:
    """All of it. width: characters of the terminal."""
    return Group(*_lines(run, width))


def _lines(run: Run, width: int) -> Iterator[RenderableType]:
    left = "" if run.eta_seconds is None else f"  {format_seconds(run.eta_seconds)} left"
    head = Text.assemble((run.name, "bold"), "  ", (run.state, COLOURS.get(run.state, "")))
    yield head.append(f"  step {run.step:,}" + (f" of {run.steps:,}" if run.steps else "") + left)
    if run.steps:
        bar = ProgressBar(total=run.steps, completed=run.step, width=width)
        yield Columns([bar])  # ends its line whatever the console's width
    for level, text in run.notes():
        yield Text(f"{level}: {text}", style=COLOURS[level])
    table = Table(box=None, pad_edge=False)
    for name in ("", "last", "recent", "first"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, title in CHARTS.items():
        if curve := run.curves.get(name):
            values = [number(value) for value in (curve.last, curve.recent, curve.first)]
            spark = (
                sparkline([each.mean for each in curve.buckets], max(10, width - 70))
                if name in SPARKS
                else ""
            )
            table.add_row(title, *values, spark)
    yield table
    for which, each in enumerate(run.starts, 1):
        how = f": {each['ended'][0]}, {each['ended'][1]}" if each["ended"] else ""
        yield Text(
            f"attempt {which} from step {each['step']:,}, {each.get('time', '')}{how}", style="dim"
        )
    if run.gpu_hours:
        yield Text(f"GPU-hours: {run.gpu_hours:,.1f}, lost: {run.gpu_hours_lost:,.1f}", style="dim")
    if run.evaluations:
        found = "  ".join(f"{name} {number(value)}" for name, value in run.evaluations[-1].items())
        yield Text(f"evaluation: {found}")


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` characters, from the least value to the greatest."""
    size = -(-len(values) // width)
    means = [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    return "".join(
        BARS[int((len(BARS) - 1) * (each - low) / ((high - low) or 1))] for each in means
    )
