"""A file under another name until it is whole, and what is left of those whose process was killed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from pathlib import Path

from clip_train.checkpoint.files import sha256_of_next, write_at
from clip_train.storage import LocalStorage

_ABANDONED_SECONDS = 3600.0  # after the last write; one try of a block may take a sixth of that
_OF_PROCESS = re.compile(r"\.([0-9a-f]{12})-(\d+)-[0-9a-f]+\.part")


class Part:
    """What is to become `path`. Several ranks with one token write to the same, each its own blocks."""

    def __init__(self, path: Path, token: str) -> None:
        """OSError."""
        self._path, self._part = path, path.with_name(f".{path.name}.{token}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def put(self, start: int, data: bytes) -> None:
        write_at(self._fd, data, start)

    def sync(self) -> None:
        os.fsync(self._fd)

    def sha256(self, size: int) -> str:
        with self._part.open("rb") as f:
            return sha256_of_next(f, size)

    def finish(self) -> None:
        os.replace(self._part, self._path)

    def drop(self) -> None:
        """Also after `finish`, when there is nothing left to remove."""
        os.close(self._fd)
        self._part.unlink(missing_ok=True)


def new_token() -> str:
    """Another one each time; it tells which process has made it."""
    return f"{_here()}-{os.getpid()}-{uuid.uuid4().hex}"


def remove_abandoned(storage: LocalStorage) -> None:
    """Parts of this machine's dead processes, and of any that nobody has written to for an hour. What cannot be removed
    is left there."""
    older_than, here = storage.clock() - _ABANDONED_SECONDS, _here()
    for path in storage.path("ckpt").rglob(".*.part"):
        made = _OF_PROCESS.search(path.name)
        dead = made is not None and made[1] == here and not _lives(int(made[2]))
        with contextlib.suppress(OSError):
            if dead or path.stat().st_mtime < older_than:
                path.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def _here() -> str:
    """Equal for processes that know each other by their ids, until the machine is started anew."""
    try:
        space = f"{Path('/proc/sys/kernel/random/boot_id').read_text()}{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        space = uuid.uuid4().hex
    return hashlib.sha256(space.encode()).hexdigest()[:12]
