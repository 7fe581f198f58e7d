"""Progress for the user: a progress bar, or a line of the log every few seconds."""

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clip_train.callbacks import Callback
from clip_train.settings import MEAN

logger = logging.getLogger(__name__)

# of an evaluation: name, label, format of the value
HEADLINE = (
    ("zero_shot_top1", "zero-shot top-1", "2%"),
    ("zero_shot_top5", "top-5", "2%"),
    ("image_to_text_R@1", "image-to-text R@1", "2%"),
    ("text_to_image_R@1", "text-to-image R@1", "2%"),
    ("val_loss", "val_loss", "4g"),
)
MEANS = (f"{MEAN}/", f"ema_{MEAN}/")
SAVES = ("checkpoint_step", "checkpoint_failures")  # keys of a record
_SMOOTHING = 0.9  # of the seconds per step from which the ETA is computed


class ProgressLine(Callback):
    """If stderr is a terminal, a progress bar; otherwise (a job's log) a line every few seconds and
    at the last step. For rank 0 only.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._every_seconds = every_seconds
        self._clock = clock
        self._last_line_time: float | None = None  # seconds, by `clock`
        self._is_first_step = True  # it includes the start of workers and kernels
        self._step_seconds: float | None = None  # smoothed, without the first step
        self._saves: dict[str, int] = {}  # by SAVES: the last committed step, failures since then
        self._bar: Any = None
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            console=Console(file=sys.stderr),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("starting", total=total_steps, completed=start_step)
        self._bar.start()

    def after_step(
        self,
        record: dict[str, Any],
        keys: Sequence[str] = (),
        invalid: Mapping[str, int] | None = None,
    ) -> None:
        step, seconds = record["step"], record["step_seconds"]
        if self._is_first_step:
            self._is_first_step = False
        elif self._step_seconds is None:
            self._step_seconds = seconds
        else:
            self._step_seconds = _SMOOTHING * self._step_seconds + (1 - _SMOOTHING) * seconds
        self._saves |= {name: record[name] for name in SAVES if name in record}
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=self._describe(record))
            return
        now = self._clock()
        is_due = self._last_line_time is None or now - self._last_line_time >= self._every_seconds
        if is_due or step >= self._total:
            self._last_line_time = now
            logger.info("step %d/%d  %s", step, self._total, self._describe(record))

    def _describe(self, record: dict[str, Any]) -> str:
        wait = 100 * record["data_wait_seconds"] / max(record["step_seconds"], 1e-9)
        left = "..."
        if self._step_seconds is not None:
            left = format_seconds(max(self._total - record["step"], 0) * self._step_seconds)
        parts = [
            f"loss {record['loss']:.4f}",
            f"{record['samples_per_second']:,.0f} samples/s",
            f"data wait {wait:.0f}%",
            f"ETA {left}",
        ]
        saved_step, failed = (self._saves.get(name, 0) for name in SAVES)
        if saved_step:
            parts.append(f"saved at {saved_step}")
        if failed:
            parts.append(f"{failed} failed save{'s' if failed > 1 else ''}")
        return "  ".join(parts)

    def after_evaluate(self, record: dict[str, Any]) -> None:
        """Log the main numbers; if there are means over sets, these alone. They appear above the
        bar: rich redirects stderr while it is shown."""
        prefixes = ["", "ema_"]
        of_sets = [f"{name.rpartition('/')[0]}/" for name in record if "/" in name]
        prefixes += [x for x in of_sets if x.startswith(MEANS)] or of_sets
        numbers = [
            f"{prefix}{label} {record[prefix + name]:.{digits}}"
            for prefix in dict.fromkeys(prefixes)
            for name, label, digits in HEADLINE
            if prefix + name in record
        ]
        num_others = len(record) - len(numbers) - 1  # without the step
        rest = f"  (and {num_others} more in eval.jsonl)" if num_others else ""
        logger.info("step %d: %s%s", record["step"], "  ".join(numbers), rest)

    def phase(self, name: str) -> None:
        """Stop the bar when the loop has ended: later lines appear below it."""
        if name in ("end", "finish") and self._bar is not None:
            self._bar.stop()
            self._bar = None


def format_seconds(seconds: float) -> str:
    """`1:02:03`, or `2d 03:04:05`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days}d {h:02}:{m:02}:{s:02}" if days else f"{h}:{m:02}:{s:02}"


def format_number(value: Any) -> str:
    """A short number: 4 digits, 12.3k, 4.56M. Other values stay as they are."""
    if value is None:
        return "-"
    if isinstance(value, (bool, str)):
        return str(value)
    # from 10,000 on with a unit
    for unit, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if abs(value) >= least:
            return f"{value / size:.4g}{unit}"
    if math.isnan(value) or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"
