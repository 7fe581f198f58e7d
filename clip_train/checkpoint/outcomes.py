"""What became of saves, as far as this rank has heard: what is under way, what failed, what the last good one is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from clip_train import dist

logger = logging.getLogger(__name__)


class LastGood(NamedTuple):
    """The checkpoint that a failing run can go back to."""

    step: int
    path: str


class Outcomes:
    """Fed with the saver's messages. Rank 0's counts and names are the run's; `agree` gives them to all.

    log: what a user should read, on rank 0.
    """

    def __init__(self, max_failed_saves: int, log: Callable[[str], None]) -> None:
        self._max_failed = max_failed_saves
        self._log = log
        self.last_good: LastGood | None = None
        self.saved: int | None = None  # rank 0: the step last committed in the main store, or resumed from there
        self.failures = 0  # saves in a row
        self.fatal: str | None = None  # why the run must stop
        self.writing: int | None = None  # the step that is being written from the buffer
        self.pending: dict[int, str] = {}  # step -> where its attempt lies; handed over, not yet decided
        self.tidying: set[int] = set()  # steps after whose commit old checkpoints are being removed
        self.lost: dict[int, str] = {}  # steps that this rank's saver has failed at, not yet told to the others
        self._numbers: dict[str, float] = {}

    def handed_over(self, step: int, prefix: str) -> None:
        self.pending[step], self.writing = prefix, step
        self.tidying.add(step)

    def hear(self, told: dict[str, Any]) -> None:
        """One message of the saver's."""
        match told["told"]:
            case "written":
                self.writing = None
            case "rest":
                self.tidying.discard(told["step"])
            case "kept":
                self.last_good = LastGood(told["step"], told["where"])
            case "done":
                self._done(told)
            case "failed":
                self.failed(told["step"], told["why"])
            case "fenced":
                self.pending.pop(told["step"], None)
                self.fatal = told["why"]
            case "retry":
                pause = told["seconds"]
                self.say(f"checkpoint of step {told['step']}: {told['why']}; trying again in {pause:.0f} s")
            case "note":
                self.say(told["text"])
            case "gone":
                self.writing = None
                self.tidying.clear()
                for step in list(self.pending):
                    self.failed(step, "the process that writes checkpoints has ended")

    def _done(self, told: dict[str, Any]) -> None:
        """On rank 0 it is committed; elsewhere this rank's part is where it belongs."""
        self.pending.pop(told["step"], None)
        if not dist.is_main():
            return
        self.failures, self.saved = 0, told["step"]
        self.last_good = LastGood(told["step"], told["where"])
        seconds, size = told["seconds"], told["bytes"]
        self._numbers = {"checkpoint_step": told["step"], "checkpoint_seconds": seconds, "checkpoint_failures": 0}
        logger.info("checkpoint of step %d committed after %.1f s (%d bytes on rank 0)", told["step"], seconds, size)

    def failed(self, step: int, why: str) -> None:
        """A save that was handed over."""
        self.pending.pop(step, None)
        if dist.is_main():
            self._numbers = {"checkpoint_failures": self.failures + 1}
            self.count_failure(step, why)
        else:
            self.lost[step] = why

    def count_failure(self, step: int, why: str) -> None:
        """Too many in a row are fatal."""
        if self.fatal is not None:
            return
        self.failures += 1
        message = f"checkpoint of step {step} failed ({self.failures} in a row): {why}"
        if self.failures >= self._max_failed:
            self.fatal = f"{message}; {self.fallback()}"
        else:
            self.say(f"{message}; training goes on, {self.fallback()}")

    def fallback(self) -> str:
        return f"the last good one is {self.last_good.path}" if self.last_good else "there is no good one yet"

    def say(self, text: str) -> None:
        if dist.is_main():
            self._log(text)

    def take_numbers(self) -> dict[str, float]:
        """For the step's record: what was heard since the last time."""
        numbers, self._numbers = self._numbers, {}
        return numbers

    def agree(self) -> None:
        """Collective: rank 0's word on what is saved and what failed."""
        told = dist.broadcast_object((self.saved, self.last_good, self.failures, self.fatal))
        self.saved, self.last_good, self.failures, self.fatal = told
