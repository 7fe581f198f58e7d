"""`clip-train report` and `clip-train watch`: how a run goes, as a page and in a terminal."""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clip_train.errors import UserError
from clip_train.metrics.progress import format_seconds
from clip_train.metrics.report import number, write_report
from clip_train.metrics.run import CHARTS, Run
from launcher.config.recipe import load_config
from launcher.runtime.log import log

LOOK_SECONDS = 2.0
PIPED_WIDTH = 10_000  # characters: no line is cut for a program that reads it
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
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    if args.once or not console.is_terminal:
        console.print(Group(*view(Run(folder))))
        return 0
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            run = Run(folder)
            live.update(Group(*view(run)), refresh=True)
            if run.state == "DONE":
                break
            time.sleep(LOOK_SECONDS)
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


def view(run: Run) -> Iterator[RenderableType]:
    head = Text.assemble((run.name, "bold"), "  ", (run.state, COLOURS.get(run.state, "")))
    of = f" of {run.steps:,}" if run.steps else ""
    left = "" if run.eta_seconds is None else f"  {format_seconds(run.eta_seconds)} left"
    yield head.append(f"  step {run.step:,}{of}{left}")
    for level, text in run.notes():
        yield Text(f"{level}: {text}", style=COLOURS[level])
    table = Table(box=None, pad_edge=False)
    for name in ("", "last", "recent", "first"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, curve in run.curves.items():
        values = map(number, (curve.values[-1], curve.recent, curve.values[0]))
        table.add_row(CHARTS.get(name, name), *values)
    yield table
    for which, start in enumerate(run.starts, 1):
        how = f": {start['ended'][0]}, {start['ended'][1]}" if start["ended"] else ""
        began = f"attempt {which} from step {start['step']:,}, {start.get('time', '')}"
        yield Text(began + how, style="dim")
    if run.evaluations:
        found = "  ".join(f"{name} {number(value)}" for name, value in run.evaluations[-1].items())
        yield Text(f"evaluation: {found}")
