"""The interface: what every store can do, and what each call raises."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from clip_train.errors import UserError


@dataclass(frozen=True, order=True)
class Entry:
    """One stored file."""

    name: str  # relative to the storage's root, with "/"
    size: int  # bytes
    modified: float = field(
        default=0.0, compare=False
    )  # seconds since the epoch, by the store's clock


class Storage(ABC):
    """Files by name under one root. Names are relative, with "/", without "..".

    Two answers are kept apart everywhere: *it is not there* (`FileNotFoundError`, `False`, an empty list)
    and *it cannot be known* (permission, network, a broken disk), which always raises another `OSError`.
    So a store that cannot be read is never taken for an empty one. A name that leaves the root is a
    programmer's mistake: `ValueError`. Writing to a store that can only be read, as this one, is a `UserError`.
    All calls may be made from several threads.
    """

    url: str  # where the root is, for messages

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @abstractmethod
    def read_bytes(self, name: str) -> bytes:
        """The whole of a small file. FileNotFoundError; OSError."""

    @abstractmethod
    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes `[start, end)`, all of them. FileNotFoundError; OSError, also for a file that is shorter."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[Entry]:
        """All files at any depth below the folder `prefix`, sorted by name, as of now (never cached).

        Empty when there is no such folder. Unfinished writes are not listed. OSError.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes. FileNotFoundError; OSError."""

    def exists(self, name: str) -> bool:
        """False only if it is certainly not there; OSError where that cannot be known."""
        try:
            self.size(name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def put_file(
        self, local_path: str | os.PathLike[str], name: str, *, move: bool = False
    ) -> None:
        """Store a local file: it appears under `name` whole or not at all, replacing what was there.

        move: the caller has no more use for the local file; a local store renames it rather than copy it.
        FileNotFoundError (the local file); OSError (no space, no permission): then nothing was published.
        """
        self._refuse()

    def put_bytes(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store a small file, whole or not at all; True when it was stored.

        if_absent: only if there is none by that name; of several racing writers exactly one gets True. Their
        `data` must differ: a remote store takes its own bytes, found there, for an earlier try that went through.
        OSError: then nothing was published.
        """
        self._refuse()

    def delete(self, name: str) -> None:
        """Remove one file; it is no error if there is none. OSError."""
        self._refuse()

    def delete_tree(self, prefix: str) -> None:
        """Remove the folder `prefix` with all in it; it is no error if there is none. OSError."""
        self._refuse()

    def clock(self) -> float:
        """The store's time, in seconds since the epoch: the clock of `Entry.modified`. OSError."""
        self._refuse()

    def sweep(
        self, older_than: float, spare: Callable[[str], bool] = lambda name: False, prefix: str = ""
    ) -> int:
        """Remove unfinished writes below the folder `prefix` that were started before `older_than` (the store's clock);
        how many. OSError.

        spare: those that write to these names are left alone.
        """
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UserError(
            f"{self.url}: it is read-only here; only s3:// and local folders can be written to"
        )


def checked(name: str) -> str:
    """ValueError for a name that leaves the root."""
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"storage name must be relative and without '..': {name!r}")
    return name
