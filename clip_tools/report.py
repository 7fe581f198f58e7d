"""`clip-train report` and `clip-train watch`: how a run goes, as a page and in a terminal."""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from clip_train.errors import UserError
from clip_train.metrics.progress import format_seconds
from clip_train.metrics.report import CHARTS, number, write_report
from clip_train.metrics.run import Curve, Run
from launcher.config.recipe import load_config
from launcher.runtime.log import log

LOOK_SECONDS = 2.0
PIPED_WIDTH = 10_000  # characters: no line is cut for a program that reads it
BARS = "▁▂▃▄▅▆▇█"
SPARKS = ("loss", "grad_norm", "samples_per_second")
COLOURS = {
    "ok": "green", "warning": "yellow", "error": "red", "DONE": "green", "training": "green",
    "silent": "red", "PREEMPTED": "yellow", "FAILED": "red", "FATAL": "red",
}  # fmt: skip


def write(args: argparse.Namespace) -> int:
    """The page, anew, of one run or of several."""
    path = write_report([folder_of(place) for place in args.runs], args.output)
    log(f"written: {path}")
    return 0


def watch(args: argparse.Namespace) -> int:
    """Until the run is done, or Ctrl-C; once where nobody looks at a terminal."""
    folder, console = folder_of(args.run), Console()
    run, width = Run(folder), console.width
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    if args.once or not console.is_terminal:
        console.print(Group(*view(run, width)))
        return 0
    try:
        with Live(console=console, auto_refresh=False) as live:
            live.update(Group(*view(run, console.width)), refresh=True)
            while run.state != "DONE":
                time.sleep(LOOK_SECONDS)
                run = Run(folder)
                live.update(Group(*view(run, console.width)), refresh=True)
    except KeyboardInterrupt:
        pass
    return 0


def folder_of(place: str) -> Path:
    """A run's folder, or that of a recipe. UserError where there is none."""
    path = Path(place).expanduser()
    folder = load_config(place).run_dir if path.is_file() else path
    if not any((folder / name).exists() for name in ("recipe.yaml", "metrics.jsonl")):
        raise UserError(
            f"{folder} holds no run (no recipe.yaml, no metrics.jsonl): give a run's folder, or "
            "its recipe"
        )
    return folder


def view(run: Run, width: int) -> Iterator[RenderableType]:
    """All of it. width: characters of the terminal."""
    head = Text.assemble((run.name, "bold"), "  ", (run.state, COLOURS.get(run.state, "")))
    of = f" of {run.steps:,}" if run.steps else ""
    left = "" if run.eta_seconds is None else f"  {format_seconds(run.eta_seconds)} left"
    yield head.append(f"  step {run.step:,}{of}{left}")
    if run.steps:
        bar = ProgressBar(total=run.steps, completed=run.step, width=width)
        yield Columns([bar])  # ends its line whatever the console's width
    for level, text in run.notes():
        yield Text(f"{level}: {text}", style=COLOURS[level])
    table = Table(box=None, pad_edge=False)
    for name in ("", "last", "recent", "first"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, title in CHARTS.items():
        curve = run.curves.get(name)
        if curve is not None:
            values = map(number, (curve.values[-1], curve.recent, curve.values[0]))
            spark = sparkline(curve, max(10, width - 70)) if name in SPARKS else ""
            table.add_row(title, *values, spark)
    yield table
    for which, start in enumerate(run.starts, 1):
        how = f": {start['ended'][0]}, {start['ended'][1]}" if start["ended"] else ""
        began = f"attempt {which} from step {start['step']:,}, {start.get('time', '')}"
        yield Text(began + how, style="dim")
    if run.evaluations:
        found = "  ".join(f"{name} {number(value)}" for name, value in run.evaluations[-1].items())
        yield Text(f"evaluation: {found}")


def sparkline(curve: Curve, width: int) -> str:
    """At most `width` characters, from the least value to the greatest."""
    parts = np.array_split(np.array(curve.values), min(width, len(curve.values)))
    means = np.array([part.mean() for part in parts])
    heights = (len(BARS) - 1) * (means - means.min()) / (np.ptp(means) or 1)
    return "".join(BARS[int(height)] for height in heights)
