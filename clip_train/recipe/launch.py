"""The `launch` section."""

from __future__ import annotations

from typing import ClassVar

from clip_train.settings import Removed, Seconds, Settings

_EXTEND = (
    "leave it out, or write launch.hang_seconds, which limits a step, and extends the limits of the "
    "start (3600), saves (3600) and evaluations (7200) if it is larger"
)


class LaunchConfig(Settings):
    """The `launch` section: time limits in seconds after which a phase counts as failed."""

    removed: ClassVar = {
        "hang_start_seconds": Removed(instead=_EXTEND, ignored=lambda value: value == 3600),
        "hang_step_seconds": Removed(
            instead="write launch.hang_seconds", ignored=lambda value: value is None
        ),
        "hang_save_seconds": Removed(instead=_EXTEND, ignored=lambda value: value == 3600),
        "hang_evaluate_seconds": Removed(instead=_EXTEND, ignored=lambda value: value == 7200),
    }

    rendezvous_seconds: Seconds = 600.0
    """Time for all ranks to join, from the moment a rank starts waiting. Raise it if imports or the
    listing of shards take some ranks longer."""
    group_seconds: Seconds = 180.0
    """Time for the process group to form after all ranks have joined, including its first
    all-reduce."""
    hang_seconds: Seconds | None = None
    """A rank whose step takes longer counts as hanging; null: 20 times the median of the steps so
    far, and at least 300. The start up to the end of the first step, a save and an evaluation have
    this time too, but at least 3600, 3600 and 7200."""
    restart_wait_seconds: Seconds = 60.0
    """After a failure without a new checkpoint, a batch job waits this long before its next
    attempt. The wait doubles with each further failure."""
