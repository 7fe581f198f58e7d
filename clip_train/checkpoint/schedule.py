"""When a save is due."""

from __future__ import annotations

import time

from clip_train import dist
from clip_train.checkpoint.config import CheckpointConfig


class Schedule:
    """The same answers on all ranks, which ask together after every step."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._every_steps = config.every_steps
        self._every_minutes = config.every_minutes
        self._since = time.monotonic()  # seconds; of the last save
        self._since_step: int | None = None  # step at which the clock started
        self._next_look = 0  # step at which the clock is looked at again

    def due(self, step: int) -> bool:
        """Whether to save after `step`, counted from 1."""
        by_steps = self._every_steps is not None and step > 0 and step % self._every_steps == 0
        return by_steps or self._due_by_time(step)

    def _due_by_time(self, step: int) -> bool:
        """Rank 0's clock decides. It also says when to ask again, so that most steps cost no message."""
        if self._every_minutes is None:
            return False
        if self._since_step is None:
            self._since_step = step - 1
        if step < self._next_look:
            return False
        passed = time.monotonic() - self._since
        left = 60 * self._every_minutes - passed  # seconds
        # half of the steps that fit into the time left at the present rate, lest steps become slower
        steps_left = left * (step - self._since_step) / max(passed, 1e-9)
        due, self._next_look = dist.broadcast_object((left <= 0, step + max(1, int(min(steps_left, 2e6) / 2))))
        return due

    def saved(self, step: int) -> None:
        """A save has been tried: the minutes begin anew."""
        self._since, self._since_step, self._next_look = time.monotonic(), step, 0
