"""The recipe's `checkpoint` section."""

from __future__ import annotations

from pydantic import Field, field_validator

from clip_train.errors import UserError
from clip_train.settings import Settings
from clip_train.storage import open_storage


class CheckpointConfig(Settings):
    """When to save and where, how much to keep, what to resume from."""

    every_steps: int | None = Field(1000, ge=1)
    """Save after every so many optimizer steps; null: never by steps. Where the disk still takes the last snapshot
    then, as soon as it has it."""

    every_minutes: float | None = Field(None, gt=0, le=1e6)
    """Save when so many minutes have passed since the last save, by rank 0's clock; null: never by time."""

    remote: str | None = Field(None, min_length=1)
    """Where checkpoints are uploaded to: `s3://bucket/prefix`, or a folder on another disk. It belongs to this run
    alone. null: they stay under `<run.dir>/checkpoints`. Credentials come from the usual environment or profile."""

    keep_last: int = Field(3, ge=1)
    """How many of the newest complete checkpoints stay; the one resumed from stays too."""

    keep_every: int | None = Field(None, ge=1)
    """Checkpoints at multiples of so many steps stay for good."""

    keep_best: str | None = Field(None, min_length=1)
    """A number of the evaluation (`zero_shot_top1`): the checkpoint with the highest stays. With a minus in front
    (`-val_loss`) the one with the lowest. It is the evaluation at the step of the save that counts."""

    resume: str = Field("auto", min_length=1)
    """`auto` (the newest complete checkpoint, local or remote, else a fresh start), `must` (fail rather than start
    fresh), `never`, or a path or URL: a run's folder, its checkpoints, or one checkpoint in it.
    Another run's is where this run begins: once it has a checkpoint of its own, it goes on from that.
    An older one of this run is gone back to once: the same line again (a requeue) goes on from the newest."""

    takeover: bool = False
    """Begin although another process of this machine still writes this run's checkpoints; its next save ends it."""

    allow_changed_recipe: bool = False
    """Resume although the data, the model or the global batch has changed since: then the curve is another's."""

    max_failed_saves: int = Field(3, ge=1)
    """The run stops after so many failed saves in a row; until then it tries again at the next occasion."""

    save_timeout_minutes: float = Field(60.0, gt=0, le=1e6)
    """A save that is not committed after so long has failed."""

    grace_seconds: float = Field(240.0, ge=0, le=1e8)
    """At the end, or when asked to stop: how long to wait for the last save to be committed."""

    orphan_grace_minutes: float = Field(60.0, ge=0)
    """Data of saves that were never committed are removed when they are older than this."""

    @field_validator("remote")
    @classmethod
    def _names_a_bucket(cls, value: str | None) -> str | None:
        if value is not None and value.lower().startswith(("s3://", "s3a://")):
            try:
                open_storage(value)
            except UserError as e:
                raise ValueError(f"checkpoint.remote: {e}") from e
        return value
