"""The recipe's `checkpoint` section, and whether the remote store that it names can be used."""

from __future__ import annotations

import contextlib
import errno
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import Field, field_validator

from clip_train.checkpoint.commit import explain, list_commits, readable
from clip_train.checkpoint.lease import Lease
from clip_train.checkpoint.manifest import CommitRef, parse_prefix
from clip_train.checkpoint.retention import SWEEP_REMEDY, SWEEP_RIGHT, Policy
from clip_train.errors import CheckpointError, ClipTrainError, UserError
from clip_train.settings import Settings
from clip_train.storage.base import Storage
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import is_remote, local_path, open_storage

T = TypeVar("T")
Refs = Collection[CommitRef]
NO_LEASE = Lease(0, "")


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

    def policy(self, held: Lease = NO_LEASE, protect: Refs = frozenset(), damaged: Refs = frozenset()) -> Policy:
        """What retention keeps. protect, damaged: as there."""
        return Policy(
            self.keep_last, self.keep_every, self.keep_best, 60 * self.orphan_grace_minutes, *held, set(protect),
            set(damaged),
        )  # fmt: skip

    @field_validator("remote")
    @classmethod
    def _names_a_bucket(cls, value: str | None) -> str | None:
        if value is not None and value.lower().startswith(("s3://", "s3a://")):
            try:
                open_storage(value)
            except UserError as e:
                raise ValueError(f"checkpoint.remote: {e}") from e
        return value


# -- who sees the local folder


def ranks_of_folder(storage: LocalStorage) -> list[int]:
    """Collective: the ranks that see the same folder as this one. CheckpointError, on all ranks.

    One of them leaves a file with its number: first rank 0, and where that does not reach all, one for each folder.
    """
    from clip_train import dist  # torch, without which a recipe is read

    if dist.world_size() == 1:
        return [0]
    name = str(dist.broadcast_object(f".seen-{time.time_ns()}"))

    def claim() -> str:
        storage.put_bytes(name, str(dist.rank()).encode(), if_absent=True)
        return storage.read_bytes(name).decode()

    try:
        dist.on_main(lambda: writable(storage, claim))
        seen = dist.agreed(lambda: readable(storage, lambda disk: disk.exists(name)))
        if not dist.any_rank(not seen):
            return [*range(dist.world_size())]
        claims = dist.gather_objects(dist.agreed(lambda: writable(storage, claim)))
        return [rank for rank, claimed in enumerate(claims) if claimed == claims[dist.rank()]]
    finally:
        with contextlib.suppress(OSError):  # of this rank alone
            storage.delete(name)


def writable(storage: Storage, action: Callable[[], T]) -> T:
    """`action()`; CheckpointError where the store does not take it."""
    try:
        return action()
    except OSError as e:
        raise CheckpointError(f"checkpoints cannot be written to {storage.url}: {explain(e)}") from e


# -- what `checkpoint.resume` names


def locate(path: str) -> tuple[str, CommitRef | None]:
    """(the checkpoints' root, which one in it if `path` names one). UserError where there are none."""
    return _locate_remote(path) if is_remote(path) else _locate_local(path)


def _locate_remote(url: str) -> tuple[str, CommitRef | None]:
    scheme, _, rest = url.rstrip("/").partition("://")
    parts = rest.split("/")
    for cut in range(len(parts), max(0, len(parts) - 4), -1):
        inside = "/".join(parts[cut:])
        ref = CommitRef.parse(inside) or parse_prefix(inside)
        if inside and ref is None:
            continue
        root = f"{scheme}://{'/'.join(parts[:cut])}"
        for each in (root, f"{root}/checkpoints") if not inside else (root,):
            try:
                if list_commits(open_storage(each)):
                    return each, ref
            except OSError as e:
                raise CheckpointError(f"checkpoint.resume ({url}) cannot be read: {e}") from e
    raise UserError(
        f"checkpoint.resume ({url}): holds no checkpoints; give a run's checkpoint.remote, or one checkpoint's "
        "commit/*.json or ckpt/*/* in it"
    )


def _locate_local(path: str) -> tuple[str, CommitRef | None]:
    here = local_path(path).absolute()
    if not here.exists():
        raise UserError(f"checkpoint.resume ({path}): no such path; use auto, must, never, or a path that exists")
    for folder in (here, here / "checkpoints"):
        if (folder / "commit").is_dir():
            return folder.resolve().as_posix(), None
    for folder in list(here.parents)[:3]:
        inside = here.relative_to(folder).as_posix()
        ref = CommitRef.parse(inside) or parse_prefix(inside)
        if ref is not None and (folder / "commit").is_dir():
            return folder.resolve().as_posix(), ref
    raise UserError(
        f"checkpoint.resume ({path}): holds no checkpoints; give a run's folder, its checkpoints folder, "
        "or one checkpoint's commit/*.json or ckpt/*/* in it"
    )


# -- what the store must be able to do, tried before the model is built

_CLOCK_SECONDS = 300.0  # S3 refuses requests that are off by 15 minutes

_LASTING = (errno.ENXIO, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EROFS, errno.ENAMETOOLONG)
_WRITABLE = "give s3://bucket/prefix, or a folder"

# What is done, and the right it needs on S3.
_RIGHTS = {
    "be listed": "s3:ListBucket",
    "be written to": "s3:PutObject",
    "be read": "s3:GetObject",
    "be written to conditionally (If-None-Match)": "s3:PutObject",
    "have files deleted (retention does)": "s3:DeleteObject",
    "tell the time": "s3:ListBucket",
    "have its unfinished uploads listed": SWEEP_RIGHT,
}


@dataclass(frozen=True)
class Trial:
    """One thing that was tried. Without `remedy` it went well; without `error` training can start all the same."""

    result: str  # what the store does, or cannot do
    remedy: str = ""
    error: ClipTrainError | None = None


def preflight(storage: Storage) -> list[str]:
    """List, write, read back, write if absent, delete, clock, list unfinished uploads: returns warnings.

    UserError (a right, a bucket, a clock) or CheckpointError (anything that may pass): what cannot be done, and why.
    """
    trials = list(try_all(storage))
    for each in trials:
        if each.error is not None:
            raise each.error
    return [f"{storage.url} {each.result}. {each.remedy}" for each in trials if each.remedy]


def try_all(storage: Storage) -> Iterator[Trial]:
    """One trial after the other, as far as those before make sense of it. Whatever was written is removed."""
    attempt = _Attempt(storage)
    try:
        for trial in (attempt.listing, attempt.writing, attempt.reading, attempt.writing_once, attempt.deleting):
            done = attempt.guarded(trial)
            yield done
            denied = isinstance(done.error, UserError) and isinstance(done.error.__cause__, PermissionError)
            if done.error is not None and (trial == attempt.writing or (trial == attempt.listing and not denied)):
                return
        yield attempt.guarded(attempt.clock)
        yield attempt.sweeping()
    finally:
        attempt.tidy()


@dataclass
class _Attempt:
    """The names in use, and what is being done with them."""

    storage: Storage
    doing: str = ""
    folder: str = field(default_factory=lambda: f"preflight/{uuid.uuid4().hex}")
    written: bytes = b""
    left: list[str] = field(default_factory=list)  # what may be there by now

    def guarded(self, trial: Callable[[], Trial]) -> Trial:
        try:
            return trial()
        except (OSError, ClipTrainError) as e:
            result, remedy, lasting = self.judged(e)
            kind = UserError if lasting else CheckpointError
            error = kind(f"checkpoint.remote ({self.storage.url}) {result}; {remedy}")
            error.__cause__ = e
            return Trial(result, remedy, error)

    def judged(self, e: OSError | ClipTrainError) -> tuple[str, str, bool]:
        """What went wrong, what to do, and whether the user has to: a server that is merely busy is no mistake."""
        if isinstance(e, CheckpointError):
            return str(e), "use another server, or ask those who run it", False
        if isinstance(e, ClipTrainError):
            return f"cannot {self.doing}: {e}", _WRITABLE, True
        result = f"cannot {self.doing}: {str(e.strerror or e).removeprefix(f'{self.storage.url}: ')}"
        if not isinstance(e, PermissionError) and e.errno not in _LASTING:
            return result, "try again; if it stays so, check the network, the URL and AWS_ENDPOINT_URL", False
        head, _, remedy = result.rpartition("; ")  # ObjectStorage ends its refusals with the remedy
        if not head:
            return result, "mend its permissions, or choose another place", True
        return head, f"{remedy} ({_RIGHTS[self.doing]})" if "the right" in remedy else remedy, True

    def put(self, name: str, *, if_absent: bool) -> tuple[bool, bytes]:
        """Whether it was taken, and what was written."""
        self.left.append(f"{self.folder}/{name}")
        data = uuid.uuid4().hex.encode()
        return self.storage.put_bytes(self.left[-1], data, if_absent=if_absent), data

    def listing(self) -> Trial:
        self.doing = "be listed"
        self.storage.list("commit")
        return Trial("is there and can be listed")

    def writing(self) -> Trial:
        self.doing = "be written to"
        _, self.written = self.put("file", if_absent=False)
        return Trial("can be written to")

    def reading(self) -> Trial:
        self.doing = "be read"
        if self.storage.read_bytes(f"{self.folder}/file") != self.written:
            raise CheckpointError("gives back other bytes than were written")
        return Trial("reads back what was written")

    def writing_once(self) -> Trial:
        """Two writers, of whom one may win: so leases and commits are taken."""
        self.doing = "be written to conditionally (If-None-Match)"
        first, _ = self.put("once", if_absent=True)
        second, _ = self.put("once", if_absent=True)
        if not first:
            raise CheckpointError("refuses a conditional write (If-None-Match) to a name that is new")
        if second:
            return Trial(
                "ignores If-None-Match (conditional writes), so two runs that start at the same moment may both take "
                "it for theirs",
                "What still holds: a checkpoint is whole or is not one, and a run that was started earlier stops at "
                "its next save. Make sure that no two jobs use this checkpoint.remote at once",
            )
        return Trial("honours conditional writes: of two runs only one can commit")

    def deleting(self) -> Trial:
        self.doing = "have files deleted (retention does)"
        for name in dict.fromkeys(self.left):
            self.storage.delete(name)
            if self.storage.exists(name):
                raise CheckpointError(f"still has {name}, which was deleted")
        self.left.clear()
        return Trial("can have files deleted; nothing of this check is left")

    def clock(self) -> Trial:
        self.doing = "tell the time"
        off = self.storage.clock() - time.time()
        if abs(off) > _CLOCK_SECONDS:
            return Trial(
                f"has a clock {off:+.0f} s from this machine's; beyond 900 s S3 refuses all requests",
                "set this machine's clock (NTP)",
            )
        return Trial(f"has this machine's time (to {max(1, round(abs(off)))} s)")

    def sweeping(self) -> Trial:
        """As of the epoch's first second, so that none goes. Training can do without."""
        self.doing = "have its unfinished uploads listed"
        try:
            self.storage.sweep(0.0, prefix="ckpt")
        except OSError as e:
            result, remedy, _ = self.judged(e)
            return Trial(result, f"{remedy}; {SWEEP_REMEDY}")
        return Trial("can have its unfinished uploads listed")

    def tidy(self) -> None:
        for name in dict.fromkeys(self.left):
            with contextlib.suppress(OSError, ClipTrainError):
                self.storage.delete(name)
        with contextlib.suppress(OSError, ClipTrainError):
            self.storage.delete_tree(self.folder)  # on a disk an empty folder is left, otherwise
        if isinstance(self.storage, LocalStorage):
            with contextlib.suppress(OSError):  # another one is at it
                self.storage.path(self.folder).parent.rmdir()
