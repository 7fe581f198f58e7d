"""What a saver is told: once, how to work (`Settings`), and for each save, what to bring where (`Order`)."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from clip_train.checkpoint.layout import CommitRef, FileEntry
from clip_train.checkpoint.retention import Policy
from clip_train.errors import CheckpointError


@dataclass(frozen=True)
class Settings:
    """What the saver is told once."""

    folder: str
    remote: str | None
    local_commits: bool  # all ranks see `folder`
    timeout_seconds: float
    policy: Policy

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "policy": self.policy.to_json()}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Settings:
        return cls(**{**body, "policy": Policy.from_json(body["policy"])})


@dataclass
class Order:
    """One rank's part of one save."""

    step: int
    prefix: str
    epoch: int
    rank: int
    world_size: int
    size: int  # bytes, at the beginning of the buffer: a safetensors file as it will be
    state: Any = None  # rank 0: the trainer's, encoded
    earlier: list[str] = field(default_factory=list)  # attempts at this step whose end nobody has heard of
    since: float = field(default_factory=time.monotonic)
    entry: FileEntry | None = None  # once written
    committed: str = ""  # rank 0: the attempt that is, this one or an earlier
    manifest: bytes = b""  # rank 0: made once, so that every try to commit means the same bytes

    @property
    def ref(self) -> CommitRef:
        return CommitRef(self.epoch, self.step)


class RefusedError(CheckpointError):
    """This save has failed for good."""


class OvertakenError(RefusedError):
    """This save was never tried: a newer one was there first."""


def explain(e: BaseException) -> str:
    return str(e) if isinstance(e, CheckpointError) else f"{type(e).__name__}: {e}"
