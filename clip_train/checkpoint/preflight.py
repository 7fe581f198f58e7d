"""What a remote store must be able to do, tried before the model is built; what is said says what to fix."""

from __future__ import annotations

import contextlib
import errno
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from clip_train.checkpoint.retention import SWEEP_REMEDY, SWEEP_RIGHT
from clip_train.errors import CheckpointError, ClipTrainError, UserError
from clip_train.storage import LocalStorage, Storage

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

    told: str
    remedy: str = ""
    error: ClipTrainError | None = None


@dataclass(frozen=True)
class Preflight:
    """What was found out about a store in which training can keep its checkpoints."""

    trials: list[Trial]

    def warnings(self, url: str) -> list[str]:
        return [f"{url} {each.told}. {each.remedy}" for each in self.trials if each.remedy]


def preflight(storage: Storage) -> Preflight:
    """List, write, read back, write if absent, delete, clock, list unfinished uploads.

    UserError (a right, a bucket, a clock) or CheckpointError (anything that may pass): what cannot be done, and why.
    """
    trials = list(try_all(storage))
    for each in trials:
        if each.error is not None:
            raise each.error
    return Preflight(trials)


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
            told, remedy, lasting = self.judged(e)
            kind = UserError if lasting else CheckpointError
            error = kind(f"checkpoint.remote ({self.storage.url}) {told}; {remedy}")
            error.__cause__ = e
            return Trial(told, remedy, error)

    def judged(self, e: OSError | ClipTrainError) -> tuple[str, str, bool]:
        """What to say, what to do, and whether the user has to: a server that is merely busy is no mistake of his."""
        if isinstance(e, CheckpointError):
            return str(e), "use another server, or tell those who run it", False
        if isinstance(e, ClipTrainError):
            return f"cannot {self.doing}: {e}", _WRITABLE, True
        told = f"cannot {self.doing}: {str(e.strerror or e).removeprefix(f'{self.storage.url}: ')}"
        if not isinstance(e, PermissionError) and e.errno not in _LASTING:
            return told, "try again; if it stays so, check the network, the URL and AWS_ENDPOINT_URL", False
        head, _, remedy = told.rpartition("; ")  # ObjectStorage ends its refusals with the remedy
        if not head:
            return told, "mend its permissions, or choose another place", True
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
            told, remedy, _ = self.judged(e)
            return Trial(told, f"{remedy}; {SWEEP_REMEDY}")
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
