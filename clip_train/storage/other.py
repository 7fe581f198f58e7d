"""Any other URL that fsspec knows, to read from: `https://`, `gs://`, `hf://`, `memory://`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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

    def _open(self, name: str) -> RangedFile:
        url, config = f"{self.url}/{checked(name)}", StorageConfig()
        return RangedFile(url, FsspecObject(url, config), config)

    def read_bytes(self, name: str) -> bytes:
        with self._open(name) as file:
            return file.read()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        with self._open(name) as file:
            file.seek(start)
            return whole(file.read(end - start), end - start)

    def size(self, name: str) -> int:
        with self._open(name) as file:
            return file.size

    def list(self, prefix: str = "") -> list[Entry]:
        fs, root = filesystem(self.url)
        cut = len(root.rstrip("/")) + 1
        with _as_os_errors(self.url):
            try:
                found = fs.find(
                    f"{root.rstrip('/')}/{checked(prefix)}" if prefix else root,
                    withdirs=False,
                    detail=True,
                )
            except FileNotFoundError:
                return []
        return sorted(
            Entry(name[cut:], int(info["size"])) for name, info in found.items() if len(name) >= cut
        )
