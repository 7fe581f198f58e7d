"""The recipe's `checkpoint` section."""

from __future__ import annotations

from pydantic import Field

from clip_train.settings import Settings


class CheckpointConfig(Settings):
    """When to save, how much to keep, what to resume from."""

    every_steps: int | None = Field(1000, ge=1)
    """Save after every so many optimizer steps; null: never by steps."""

    every_minutes: float | None = Field(None, gt=0)
    """Save when so many minutes have passed since the last save, by rank 0's clock; null: never by time."""

    keep_last: int = Field(3, ge=1)
    """How many of the newest complete checkpoints stay; the one resumed from stays too."""

    resume: str = Field("auto", min_length=1)
    """`auto` (the newest complete checkpoint, else a fresh start), `must` (fail rather than start fresh),
    `never`, or a path: a run's folder, its `checkpoints` folder, or one checkpoint in it."""

    max_failed_saves: int = Field(3, ge=1)
    """The run stops after so many failed saves in a row; until then it tries again at the next occasion."""
