"""The line that a user watches: a bar, or a line of the log every so many seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from clip_train.callbacks import Callback

if TYPE_CHECKING:
    from clip_train.protocols import Batch

logger = logging.getLogger(__name__)

_SAVES = (
    "checkpoint_step",
    "checkpoint_failures",
)  # of the record: the last one committed, failed since
HEADLINE = (  # of an evaluation: name, how it is shown, the format of its value
    ("zero_shot_top1", "zero-shot top-1", "2%"),
    ("zero_shot_top5", "top-5", "2%"),
    ("linear_probe_top1", "linear probe top-1", "2%"),
    ("image_to_text_R@1", "image-to-text R@1", "2%"),
    ("text_to_image_R@1", "text-to-image R@1", "2%"),
    ("val_loss", "val_loss", "4g"),
)
_SMOOTHING = 0.9  # of the step's time: what the ETA is made from


class ProgressLine(Callback):
    """A progress bar in a terminal; elsewhere (a job's log) a plain line every so many seconds.

    enabled: pass False on all ranks but 0; then every call does nothing.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        enabled: bool = True,
        every_steps: int = 1,
        stream: TextIO | None = None,
        plain_every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._every = every_steps
        self._stream = stream or sys.stderr
        self._plain_every = plain_every_seconds
        self._clock = clock
        self._printed: float | None = None  # when the last plain line was, in seconds
        self._seconds: float | None = (
            None  # per step, smoothed; of the first one it would be the start's
        )
        self._started = False
        self._saves: dict[str, int] = {}  # what the last records reported of checkpoints
        self._enabled = enabled
        self._bar: Any = None
        if enabled and self._stream.isatty():
            self._start_bar(start_step)

    def _start_bar(self, start_step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            console=Console(file=self._stream),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("starting", total=self._total, completed=start_step)
        self._bar.start()

    def after_step(self, record: dict[str, Any], batch: Batch | None = None) -> None:
        if not self._enabled:
            return
        step, seconds = record["step"], record["step_seconds"]
        if self._started:
            before = seconds if self._seconds is None else self._seconds
            self._seconds = _SMOOTHING * before + (1 - _SMOOTHING) * seconds
        self._started = True
        self._saves |= {key: int(record[key]) for key in _SAVES if key in record}
        last = step >= self._total
        if step % self._every and not last:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=self._describe(record))
            return
        now = self._clock()
        if self._printed is None or now - self._printed >= self._plain_every or last:
            self._printed = now
            logger.info("step %d/%d  %s", step, self._total, self._describe(record))

    def _describe(self, record: dict[str, Any]) -> str:
        wait = 100 * record["data_wait_seconds"] / max(record["step_seconds"], 1e-9)
        left = (
            "..."
            if self._seconds is None
            else format_seconds(max(self._total - record["step"], 0) * self._seconds)
        )
        return (
            f"loss {record['loss']:.4f}  {record['samples_per_second']:,.0f} samples/s  "
            f"data wait {wait:.0f}%  ETA {left}{self._describe_saves()}"
        )

    def _describe_saves(self) -> str:
        saved, failed = (self._saves.get(key) for key in _SAVES)
        saves = f"  saved at {saved}" if saved else ""
        return saves + (f"  {failed} failed save{'s' if failed > 1 else ''}" if failed else "")

    def message(self, text: str) -> None:
        """A line of its own; above the bar, which takes what goes to stderr."""
        if self._enabled:
            logger.info("%s", text)

    def after_evaluate(self, record: dict[str, Any]) -> None:
        numbers = {name: value for name, value in record.items() if name != "step"}
        self.message(f"step {record['step']}: {headline(numbers)}")

    def phase(self, name: str) -> None:
        if name in ("end", "finish"):
            self.close()

    def close(self) -> None:
        """Stop the bar: what is printed from now on stays below it."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._enabled = False


def headline(evaluated: dict[str, float]) -> str:
    """The few numbers of an evaluation that most runs are compared by, in one line."""
    shown = [
        f"{prefix}{label} {evaluated[prefix + name]:.{digits}}"
        for prefix in ("", "ema_")
        for name, label, digits in HEADLINE
        if prefix + name in evaluated
    ]
    rest = len(evaluated) - len(shown)
    return "  ".join(shown) + (f"  (and {rest} more in eval.jsonl)" if rest else "")


def format_seconds(seconds: float) -> str:
    """`1:02:03`, or `2d 03:04:05`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days}d {h:02}:{m:02}:{s:02}" if days else f"{h}:{m:02}:{s:02}"
