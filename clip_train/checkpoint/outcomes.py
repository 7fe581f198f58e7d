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


class Losses(NamedTuple):
    """What a rank has to tell the others before the next save."""

    attempts: dict[str, str]  # folder of an attempt that this rank's saver has failed at -> why
    notes: list[str]
    saver_died: bool = False


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
        self.writing: str | None = None  # the attempt that is being written from the buffer
        self.pending: dict[int, str] = {}  # step -> its attempt; handed over, not yet decided
        self.tidying: set[str] = set()  # attempts after whose commit old checkpoints are being removed
        self.saver_died = False  # this rank's or, on rank 0, another's, since this was last set to False
        self._losses = Losses({}, [])
        self._numbers: dict[str, float] = {}

    def handed_over(self, step: int, prefix: str) -> None:
        self.pending[step], self.writing = prefix, prefix
        self.tidying.add(prefix)

    def hear(self, told: dict[str, Any]) -> None:
        """One message of the saver's."""
        match told["told"]:
            case "written":
                if self.writing == told["prefix"]:
                    self.writing = None
            case "rest":
                self.tidying.discard(told["prefix"])
            case "kept":
                self._good(told)
            case "done":
                self._done(told)
            case "failed":
                self._failed(told)
            case "overtaken":
                self._decided(told)
                self.say(f"checkpoint of step {told['step']} is not uploaded: {told['why']}")
            case "fenced":
                self._decided(told)
                self.fatal = told["why"]
            case "retry":
                pause = told["seconds"]
                self.say(f"checkpoint of step {told['step']}: {told['why']}; trying again in {pause:.0f} s")
            case "note":
                self.say(told["text"])
            case "gone":
                self._gone(told)

    def _decided(self, told: dict[str, Any]) -> bool:
        """Whether the attempt has been waited for until now."""
        if self.pending.get(told["step"]) != told["prefix"]:
            return False
        del self.pending[told["step"]]
        return True

    def _good(self, told: dict[str, Any]) -> None:
        if self.last_good is None or told["step"] >= self.last_good.step:
            self.last_good = LastGood(told["step"], told["where"])

    def _done(self, told: dict[str, Any]) -> None:
        """On rank 0 it is committed; elsewhere this rank's part is where it belongs."""
        self._decided(told)
        if not dist.is_main():
            return
        self.failures, self.saved = 0, told["step"]
        self._good(told)
        seconds, size = told["seconds"], told["bytes"]
        self._numbers |= {"checkpoint_step": told["step"], "checkpoint_seconds": seconds, "checkpoint_failures": 0}
        logger.info("checkpoint of step %d committed after %.1f s (%d bytes on rank 0)", told["step"], seconds, size)

    def _failed(self, told: dict[str, Any]) -> None:
        if not self._decided(told):
            return  # another rank was first to say so
        if dist.is_main():
            self.count_failure([told["step"]], told["why"])
        else:
            self._losses.attempts[told["prefix"]] = told["why"]

    def _gone(self, told: dict[str, Any]) -> None:
        """The saver has died, and with it all that was under way: one failure, however many saves that were."""
        self.writing, self.saver_died = None, True
        self._losses = self._losses._replace(saver_died=True)
        self.tidying.clear()
        steps, attempts = sorted(self.pending), list(self.pending.values())
        self.pending.clear()
        if dist.is_main() and steps:
            self.count_failure(steps, told["why"])
        elif dist.is_main():
            self.say(f"{told['why']}; the next save starts another")
        elif steps:
            self._losses.attempts.update(dict.fromkeys(attempts, told["why"]))
        elif told["leads"]:  # of its node: one voice is enough
            self._losses.notes.append(f"{told['why']}; the next save starts another")

    def take_losses(self) -> Losses:
        """For the other ranks: what this one has not told them yet."""
        losses, self._losses = self._losses, Losses({}, [])
        return losses

    def learn_losses(self, everyone: list[Losses]) -> dict[str, str]:
        """On rank 0: what other ranks have lost is lost. Returns attempt -> why: nobody should wait for them.

        One failure, however many ranks and saves were hit.
        """
        if not dist.is_main():
            return {}
        lost: dict[str, str] = {}
        for rank, losses in enumerate(everyone):
            for prefix, why in losses.attempts.items():
                lost.setdefault(prefix, f"rank {rank}: {why}")
            self.saver_died |= losses.saver_died
            for note in losses.notes:
                self.say(f"rank {rank}: {note}")
        steps = sorted(step for step, prefix in self.pending.items() if prefix in lost)
        if steps:
            why = lost[self.pending[steps[-1]]]
            lost = {self.pending.pop(step): why for step in steps}
            self.count_failure(steps, why)
            return lost
        return {}

    def count_failure(self, steps: list[int], why: str) -> None:
        """Too many in a row are fatal."""
        if self.fatal is not None:
            return
        self.failures += 1
        self._numbers |= {"checkpoint_failures": self.failures}
        what = f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(map(str, steps))}"
        message = f"checkpoint of {what} failed ({self.failures} in a row): {why}"
        if self.failures >= self._max_failed:
            self.fatal = f"{message}; {self.fallback()}"
        else:
            self.say(f"{message}; training goes on, {self.fallback()}")

    def fallback(self) -> str:
        return f"the last good one is {self.last_good.path}" if self.last_good else "there is no good one yet"

    def say(self, text: str) -> None:
        if dist.is_main():
            self._log(text)

    def number(self, name: str, value: float) -> None:
        """For the next step's record."""
        self._numbers[name] = value

    def take_numbers(self) -> dict[str, float]:
        numbers, self._numbers = self._numbers, {}
        return numbers

    def agree(self) -> None:
        """Collective: rank 0's word on what is saved and what failed."""
        told = dist.broadcast_object((self.saved, self.last_good, self.failures, self.fatal, self.saver_died))
        self.saved, self.last_good, self.failures, self.fatal, self.saver_died = told
