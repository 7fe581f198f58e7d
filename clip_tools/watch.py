"""A run in a terminal: its progress, health, latest metrics, scores and attempts."""

from collections.abc import Iterator

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from clip_train.metrics.progress import format_number
from clip_train.metrics.run import DATA_WAIT, Run
from clip_train.metrics.scores import Score, Scores, score_text

# characters: no line is cut for a program that reads the output
PIPED_WIDTH = 10_000
BAR_WIDTH = 60  # characters
# characters: the column of data sets' names never becomes narrower
NAME_WIDTH = 16
TITLES = {
    "loss": "loss", "lr": "learning rate", "logit_scale": "logit scale",
    "grad_norm": "gradient norm", "samples_per_second": "samples per second",
    "mfu": "MFU as if padded, %", "mfu_computed": "MFU computed, %",
    DATA_WAIT: "data wait, % of the step",
}  # fmt: skip
# by the state of a run
STATE_COLORS = {
    "training": "green", "silent": "red", "ended": "red",
    "DONE": "green", "PREEMPTED": "yellow", "FAILED": "red", "FATAL": "red",
}  # fmt: skip
# by the level of a note about its health
LEVEL_COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


def view(run: Run, console: Console) -> Iterator[RenderableType]:
    """Show one run: progress, health, the latest numbers, scores, attempts, GPU-hours."""
    head = Text.assemble((run.name, "bold"), "  ", (run.state, STATE_COLORS.get(run.state, "")))
    yield head.append(f"  {run.progress()}")
    if run.steps:
        bar = ProgressBar(total=run.steps, completed=run.step, width=BAR_WIDTH)
        # the bar alone does not end its line
        yield Columns([bar])
    for level, text in run.notes():
        yield Text(f"{level}: {text}", style=LEVEL_COLORS[level])
    table = Table(box=None, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in ("last", "recent", "first"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, title in TITLES.items():
        curve = run.curves.get(name)
        if curve is not None:
            values = map(format_number, (curve.values[-1], curve.recent, curve.values[0]))
            table.add_row(title, *values)
    yield table
    if run.steps_computed_twice:
        yield Text(
            f"steps computed twice: {run.steps_computed_twice:,} of {run.steps_recorded:,}",
            style="dim",
        )
    if run.scores.rows:
        yield Text(f"scores at step {run.scores.step:,}", style="dim")
        yield scores_within(run.scores, console)
    for number, start in enumerate(run.starts, 1):
        line = f"attempt {number} from step {start['step']:,}, {start.get('time', '')}"
        if start["ended"]:
            verdict, reason = start["ended"][:2]
            line += f": {verdict}, {reason}"
        yield Text(line, style="dim")
    if run.gpu_hours:
        yield Text(f"GPU-hours: {run.gpu_hours:,.1f}, lost: {run.gpu_hours_lost:,.1f}", style="dim")


def scores_within(scores: Scores, console: Console) -> RenderableType:
    """Show the scores in the width of the console: as a table with the best value beside the last
    one, or below it if that is too wide. If both are too wide, as a list."""
    for stacked in (False, True):
        if needed_width(scores, console, stacked=stacked) <= console.width:
            return scores_table(scores, stacked=stacked)
    lines = []
    for row in scores.rows:
        lines.append(Text(row.label))
        for metric, title in scores.columns.items():
            if metric in row.scores:
                last, best = score_texts(row.scores[metric])
                lines.append(Text(f"  {title} {last}"))
                if best:
                    lines.append(Text(f"    best {best}"))
    return Group(*lines)


def needed_width(scores: Scores, console: Console, *, stacked: bool) -> int:
    """Measure the narrowest width of the table, in characters. Names may be folded, numbers may not,
    so only the numbers' width decides."""
    unlimited = console.options.update_width(PIPED_WIDTH)
    without_names = scores_table(scores, stacked=stacked, names=False)
    return Measurement.get(console, unlimited, without_names).maximum


def scores_table(scores: Scores, *, stacked: bool, names: bool = True) -> Table:
    """Make a table with a row for each data set and a column for each score.

    stacked: put the best value below the last one. Without it, they are side by side.
    names: whether the column of data sets' names is filled.
    """
    table = Table(box=None, pad_edge=False)
    # the empty corner holds the legend
    legend = "best below" if stacked else ""
    table.add_column(legend, overflow="fold", min_width=NAME_WIDTH)
    for title in scores.columns.values():
        heading = title
        if stacked:
            # a heading of two lines keeps the column narrow
            heading = "\n".join(title.rsplit(" ", 1))
        table.add_column(heading, no_wrap=True, justify="right")
    for row in scores.rows:
        cells = []
        for metric in scores.columns:
            score = row.scores.get(metric)
            if score is None:
                cells.append("-")
                continue
            last, best = score_texts(score)
            if not best:
                cells.append(last)
            elif stacked:
                cells.append(f"{last}\n{best}")
            else:
                cells.append(f"{last}  best {best}")
        table.add_row(Text(row.label if names else ""), *cells)
    return table


def score_texts(score: Score) -> tuple[str, str]:
    """Format the last value, and the best value with its step. The second text is empty if there is
    only one value, or no best one."""
    last = score_text(score, score.last)
    if score.best is None or len(score.values) == 1:
        return last, ""
    value, step = score.best
    return last, f"{score_text(score, value)} @{step:,}"
