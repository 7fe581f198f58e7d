"""The interface of all stores: each call's effect and errors."""

import builtins
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Entry:
    """One stored file."""

    name: str  # relative to the storage's root, with "/"
    size: int  # bytes
    modified: float = field(default=0.0, compare=False)  # seconds since the epoch, store's clock
    tag: str | None = field(default=None, compare=False)  # changes with its content, if known


class Storage(ABC):
    """Files by name under one root, local or remote. `urls.open_storage` finds its subclass.

    Names are relative, with "/" and without ".."; "" is the root itself, if it is a file.
    A file that is missing (`FileNotFoundError`, `False`, an empty list) is never confused with a
    file that cannot be looked up (permission, network, broken disk: another `OSError`). So an
    unreachable store never looks empty. All calls are safe from several threads.
    """

    url: str  # of the root, for messages; without secrets

    @abstractmethod
    def read_bytes(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return exactly the bytes `[start, end)`, by default a whole small file.

        FileNotFoundError; OSError, also if the file ends before `end`.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> list[Entry]:
        """List all files at any depth below the folder `prefix`, sorted by name. Never cached.

        Empty if the folder does not exist. Unfinished writes are not listed. OSError.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size in bytes. FileNotFoundError; OSError."""

    @abstractmethod
    def put_file(self, local_path: str | os.PathLike, name: str) -> None:
        """Store a local file under `name`, completely or not at all, replacing an existing file.

        FileNotFoundError (the local file); OSError: then nothing was published.
        """

    @abstractmethod
    def put_bytes(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store a small file, completely or not at all. Return True if it was stored.

        if_absent: only if the file does not exist. Exactly one of several racing writers gets True.
        Their `data` must differ: if the store holds these very bytes, an earlier try of this call
        went through. OSError: then nothing was published.
        """

    @abstractmethod
    def delete(self, *names: str) -> None:
        """Remove files. A file that does not exist is not an error. OSError."""

    def list_all(self, prefix: str = "") -> builtins.list[Entry]:
        """Like `list`, with the files of unfinished writes, if the store shows them as files."""
        return self.list(prefix)

    def delete_tree(self, prefix: str) -> None:
        """Remove the folder `prefix` and everything in it; it need not exist. OSError."""
        if not prefix.strip("/"):
            raise ValueError("delete_tree needs a folder below the root")
        self.delete(*(entry.name for entry in self.list_all(prefix)))

    def exists(self, name: str) -> bool:
        """Return False only if the file is certainly missing. OSError if that is unknown."""
        try:
            self.size(name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def checked_name(name: str) -> str:
    """Return `name`. ValueError if it leaves the root."""
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"storage name must be relative and without '..': {name!r}")
    return name
