"""Observers cannot end a run: an evaluation, a chart or a page that fails is skipped with a
warning.

The run continues. VERDICT and the last lines of the log list what was skipped.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from clip_train import dist
from clip_train.errors import ClipTrainError, EvaluationStopped

logger = logging.getLogger(__name__)
T = TypeVar("T")
STEPS_SHOWN = 3


class Skipped:
    """One per run and rank. Each rank logs its own warnings; rank 0 reports the list."""

    def __init__(self, warn: Callable[[str], None] = logger.warning, step: int = 0) -> None:
        self.step = step  # optimizer steps taken so far; the trainer keeps it up to date
        self._warn = warn
        self._steps: dict[str, list[int]] = {}  # by the skipped action
        self._reasons: dict[str, str] = {}  # by the skipped action: the last one
        self._of_others: list[str] = []  # on rank 0, after `gather`

    def attempt(
        self,
        what: str,
        action: Callable[[], T],
        *,
        remedy: str,
        together: bool = False,
    ) -> T | None:
        """The result of `action`; None if it failed. Each new reason is one warning.

        together: all ranks make this call, and `action` is collective. Rank 0 warns for all. An
            error that not all ranks have agreed on is raised: the others may still be waiting in
            a collective.
        """
        try:
            return action()
        except EvaluationStopped:  # a stop request is not a failure
            raise
        except Exception as e:
            if together and not dist.is_agreed(e):
                raise
            if dist.is_main() or not together:
                self.note(what, e, remedy)
            return None

    def note(self, what: str, error: Exception, remedy: str) -> None:
        reason = str(error)
        if not isinstance(error, ClipTrainError):
            reason = f"{type(error).__name__}: {error}"
        self._steps.setdefault(what, []).append(self.step)
        if self._reasons.get(what) != reason:
            self._warn(
                f"{what} failed after step {self.step}, and the run continues: {reason}\n{remedy}"
            )
        self._reasons[what] = reason

    def gather(self) -> None:
        """Collective: add to rank 0's list what only other ranks skipped."""
        lines_by_rank = dist.gather_objects(self.lines())
        known = set(lines_by_rank[0])
        for rank, lines in enumerate(lines_by_rank):
            self._of_others += [f"rank {rank}: {line}" for line in lines if line not in known]
            known.update(lines)

    def lines(self) -> list[str]:
        """One line for each skipped action: at which steps, and the last reason."""
        lines = []
        for what, steps in self._steps.items():
            at_steps = ", ".join(map(str, steps[:STEPS_SHOWN]))
            if len(steps) > STEPS_SHOWN:
                at_steps += f" and {len(steps) - STEPS_SHOWN} more"
            lines.append(f"{what} after step {at_steps}: {' '.join(self._reasons[what].split())}")
        return [*lines, *self._of_others]
