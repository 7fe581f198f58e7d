"""What a remote store must be able to do, tried before the model is built; errors say what to fix."""

from __future__ import annotations

import errno
import time
import uuid
from dataclasses import dataclass

from clip_train.errors import CheckpointError, UserError
from clip_train.storage import Storage

_CLOCK_SECONDS = 300.0  # S3 refuses requests that are off by 15 minutes


@dataclass(frozen=True)
class Preflight:
    """What was found out."""

    fencing: bool  # put-if-absent works: of two writers only one can commit
    clock_off: float  # seconds, the store's clock minus this machine's

    def warnings(self, url: str) -> list[str]:
        out = []
        if not self.fencing:
            out.append(
                f"{url}: this server ignores If-None-Match, so two runs that write to the same place at once are not "
                "kept apart by it. What still holds: a checkpoint is whole or is not one, and of two runs the one that "
                "began first stops at its next save. Make sure that no two jobs use this checkpoint.remote"
            )
        if abs(self.clock_off) > _CLOCK_SECONDS:
            out.append(
                f"{url}: its clock and this machine's are {self.clock_off:+.0f} s apart; beyond 900 s S3 refuses all "
                "requests: set this machine's clock (NTP)"
            )
        return out


def preflight(storage: Storage) -> Preflight:
    """List, write, write if absent, read back, delete, clock.

    UserError (a right, a bucket, a clock) or CheckpointError (anything that may pass): what cannot be done, and why.
    """
    name = f"preflight/{uuid.uuid4().hex}"
    first, second = uuid.uuid4().hex.encode(), uuid.uuid4().hex.encode()
    doing = "be listed"
    try:
        storage.list("commit")
        doing = "be written to"
        storage.put_bytes(name, first, if_absent=True)
        doing = "be read"
        if storage.read_bytes(name) != first:
            raise CheckpointError(f"checkpoint.remote ({storage.url}): what was written reads back differently")
        doing = "be written to twice"
        fencing = not storage.put_bytes(name, second, if_absent=True)
        doing = "have files deleted (retention does)"
        storage.delete(name)
        if storage.exists(name):
            raise CheckpointError(f"checkpoint.remote ({storage.url}): a deleted file is still there")
        doing = "tell the time"
        return Preflight(fencing, storage.clock() - time.time())
    except OSError as e:
        message = f"checkpoint.remote ({storage.url}) cannot {doing}: {e.strerror or e}"
        # a server that is merely busy is no mistake of the user's
        lasting = isinstance(e, PermissionError) or e.errno in (errno.ENXIO, errno.EPERM)
        raise (UserError if lasting else CheckpointError)(message) from e
