"""Any other URL that fsspec knows, to read from: `https://`, `gs://`, `hf://`, `memory://`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from clip_train.errors import UserError
from clip_train.storage.base import Entry, Storage, checked
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import describe
from clip_train.storage.object_store import whole
from clip_train.storage.reader import FsspecObject, RangedFile, filesystem


def write_bytes(url: str, data: bytes) -> None:
    """One object, by a single put: whole or not at all. OSError."""
    with _as_os_errors(url):
        fs, path = filesystem(url)
        fs.pipe_file(path, data)


def glob(pattern: str) -> list[str]:
    """The URLs that match, sorted; empty where none does. OSError."""
    with _as_os_errors(pattern):
        fs, path = filesystem(pattern)
        return sorted(fs.unstrip_protocol(match) for match in fs.glob(path))


@contextlib.contextmanager
def _as_os_errors(url: str) -> Iterator[None]:
    """What a file system's own client raises is an OSError here, in words."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as e:
        raise OSError(f"{url}: {describe(e)}") from e


class ReadOnlyStorage(Storage):
    """`Storage` over such a URL: enough to look at a checkpoint."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def _at(self, name: str) -> tuple[Any, str]:
        fs, root = filesystem(self.url)
        return fs, f"{root.rstrip('/')}/{name}" if checked(name) else root

    def read_bytes(self, name: str) -> bytes:
        url, config = f"{self.url}/{checked(name)}", StorageConfig()
        with RangedFile(url, FsspecObject(url, config), config) as file:
            return file.read()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        fs, path = self._at(name)
        return whole(fs.cat_file(path, start=start, end=end), end - start)

    def list(self, prefix: str = "") -> list[Entry]:
        fs, path = self._at(prefix)
        cut = len(self._at("")[1].rstrip("/")) + 1
        try:
            found = fs.find(path, withdirs=False, detail=True)
        except FileNotFoundError:
            return []
        return sorted(Entry(name[cut:], int(info["size"])) for name, info in found.items() if len(name) >= cut)

    def size(self, name: str) -> int:
        fs, path = self._at(name)
        return int(fs.info(path)["size"])
