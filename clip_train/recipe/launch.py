"""The `launch` section."""

from __future__ import annotations

from clip_train.settings import Seconds, Settings


class LaunchConfig(Settings):
    """The `launch` section: time limits in seconds after which a phase counts as failed."""

    rendezvous_seconds: Seconds = 600.0
    """Time for all ranks to join, from the moment a rank starts waiting. Raise it if imports or the
    listing of shards take some ranks longer."""
    group_seconds: Seconds = 180.0
    """Time for the process group to form after all ranks have joined, including its first
    all-reduce."""
    hang_start_seconds: Seconds = 3600.0
    """A rank that has not finished its first step after this time counts as hanging."""
    hang_step_seconds: Seconds | None = None
    """The same for one step; null: 20 times the median of the steps so far, and 300 at least."""
    hang_save_seconds: Seconds = 3600.0
    """The same for a checkpoint."""
    hang_evaluate_seconds: Seconds = 7200.0
    """The same for an evaluation."""
    restart_wait_seconds: Seconds = 60.0
    """After a failure without a new checkpoint, a batch job waits this long before its next
    attempt. The wait doubles with each further failure."""

    @property
    def longest_limit(self) -> float:
        """The limit of each phase in seconds, after which it counts as a hang."""
        return max(
            self.hang_start_seconds,
            self.hang_save_seconds,
            self.hang_evaluate_seconds,
            self.hang_step_seconds or 0.0,
        )
