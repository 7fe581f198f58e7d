"""`clip-train report` and `clip-train watch`: show a run as a page, or in a terminal."""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from clip_train.errors import UserError
from clip_train.metrics.progress import format_seconds
from clip_train.metrics.report import CHARTS, Run, number, write_report
from launcher.config.recipe import load_config
from launcher.runtime.log import log

LOOK_SECONDS = 2.0  # between two refreshes, or four times the duration of one
PIPED_WIDTH = 10_000  # characters: no line is cut for a program that reads it
BAR_WIDTH = 60  # characters
COLORS = {
    "ok": "green", "warning": "yellow", "error": "red", "DONE": "green", "training": "green",
    "silent": "red", "PREEMPTED": "yellow", "FAILED": "red", "FATAL": "red",
}  # fmt: skip


def write(args: argparse.Namespace) -> int:
    """Write the page anew."""
    log(f"written: {write_report(folder_of(args.run))}")
    return 0


def watch(args: argparse.Namespace) -> int:
    """Show the runs until all are done, or Ctrl-C; once if the output is not a terminal."""
    folders = [folder_of(place) for place in args.runs]
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    if args.once or not console.is_terminal:
        for folder in folders:
            console.print(Group(*view(Run(folder))))
        return 0
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            started = time.monotonic()
            runs = [Run(folder) for folder in folders]
            live.update(Group(*(part for run in runs for part in view(run))), refresh=True)
            if all(run.state == "DONE" for run in runs):
                break
            time.sleep(max(LOOK_SECONDS, 4 * (time.monotonic() - started)))
    return 0


def folder_of(place: str) -> Path:
    """The folder of a run, or of a recipe's run. UserError if it contains no run."""
    path = Path(place).expanduser()
    folder = load_config(place).run_dir if path.is_file() else path
    if not any((folder / name).exists() for name in ("recipe.yaml", "metrics.jsonl")):
        raise UserError(
            f"{place} has no run (no recipe.yaml, no metrics.jsonl): give a run's folder, or "
            "its recipe"
        )
    return folder


def view(run: Run) -> Iterator[RenderableType]:
    """One run: progress, health, the latest numbers, attempts, GPU-hours, the last evaluation."""
    head = Text.assemble((run.name, "bold"), "  ", (run.state, COLORS.get(run.state, "")))
    total = f" of {run.steps:,}" if run.steps else ""
    left = "" if run.eta_seconds is None else f"  {format_seconds(run.eta_seconds)} left"
    yield head.append(f"  step {run.step:,}{total}{left}")
    if run.steps:
        bar = ProgressBar(total=run.steps, completed=run.step, width=BAR_WIDTH)
        yield Columns([bar])  # the bar does not end its line
    for level, text in run.notes():
        yield Text(f"{level}: {text}", style=COLORS[level])
    table = Table(box=None, pad_edge=False)
    for name in ("", "last", "recent", "first"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, curve in run.curves.items():
        values = map(number, (curve.values[-1], curve.recent, curve.values[0]))
        table.add_row(CHARTS.get(name, name), *values)
    yield table
    for i, start in enumerate(run.starts, 1):
        ended = f": {start['ended'][0]}, {start['ended'][1]}" if start["ended"] else ""
        heading = f"attempt {i} from step {start['step']:,}, {start.get('time', '')}"
        yield Text(heading + ended, style="dim")
    if run.gpu_hours:
        yield Text(f"GPU-hours: {run.gpu_hours:,.1f}, lost: {run.gpu_hours_lost:,.1f}", style="dim")
    if run.evaluations:
        scores = (f"{name} {number(value)}" for name, value in run.evaluations[-1].items())
        yield Text(f"evaluation: {'  '.join(scores)}")
