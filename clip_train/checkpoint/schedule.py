"""When a save is due."""

from __future__ import annotations

import time
from collections.abc import Callable

from clip_train import dist
from clip_train.checkpoint.config import CheckpointConfig


class Schedule:
    """The same answers on all ranks, which ask together after every step.

    A save that is due while a rank's last snapshot is still being written is put off, to the first step at which
    no rank's is: there is one buffer. clock: seconds, of which rank 0's count.
    """

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._every_steps = config.every_steps
        self._every_minutes = config.every_minutes
        self._since = self._clock()  # seconds; of the last save
        self._since_step: int | None = None  # step at which the clock started
        self._next_look = 0  # step at which the clock is looked at again
        self.put_off: int | None = None  # the step at which a save was due that is still to be taken
        self._put_off_since = 0.0  # seconds

    def due(self, step: int, *, busy: bool) -> bool:
        """Whether to save after `step`, counted from 1. busy: this rank's buffer is not free."""
        if self.put_off is None and not self._due_by_steps(step) and not self._due_by_time(step):
            return False
        if not dist.any_rank(busy):
            return True
        self.postpone(step)
        return False

    def postpone(self, step: int) -> None:
        """The save that is due at `step` cannot be taken yet."""
        if self.put_off is None:
            self.put_off, self._put_off_since = step, self._clock()

    def put_off_for(self) -> float:
        """Seconds since a save was put off, or since this was last asked to begin anew; 0 where none is."""
        return 0.0 if self.put_off is None else self._clock() - self._put_off_since

    def wait_anew(self) -> None:
        self._put_off_since = self._clock()

    def saved(self, step: int) -> None:
        """A save has been tried: the minutes begin anew, and nothing is put off any more."""
        self._since, self._since_step, self._next_look = self._clock(), step, 0
        self.put_off = None

    def _due_by_steps(self, step: int) -> bool:
        return self._every_steps is not None and step > 0 and step % self._every_steps == 0

    def _due_by_time(self, step: int) -> bool:
        """Rank 0's clock decides. It also says when to ask again, so that most steps cost no message."""
        if self._every_minutes is None:
            return False
        if self._since_step is None:
            self._since_step = step - 1
        if step < self._next_look:
            return False
        passed = self._clock() - self._since
        left = 60 * self._every_minutes - passed  # seconds
        # half of the steps that fit into the time left at the present rate, lest steps become slower
        steps_left = left * (step - self._since_step) / max(passed, 1e-9)
        due, self._next_look = dist.broadcast_object((left <= 0, step + max(1, int(min(steps_left, 2e6) / 2))))
        return due
