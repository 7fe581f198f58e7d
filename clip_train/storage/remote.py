"""Any fsspec URL, to read from: `s3://`, `https://`, `memory://`. The only module that imports fsspec."""

from __future__ import annotations

import os
from typing import Any, BinaryIO

from clip_train.errors import UserError
from clip_train.storage.base import Entry

# The read-ahead of one open file. s3fs takes 50 MiB by default, once per open shard of every worker.
BLOCK_BYTES = 8 << 20


def filesystem(url: str) -> tuple[Any, str]:
    """The file system of `url` and the path in it. UserError for a protocol that is not known or installed.

    fsspec keeps one instance per process; one made before a fork must not be used after it, so a loader's
    worker calls this itself.
    """
    import fsspec

    try:
        # a cached listing would hide what another writer has put there since
        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as e:
        raise UserError(f"{url}: {e}") from e
    except ValueError as e:
        raise UserError(f"{url}: not a URL that fsspec can open ({e})") from e
    return fs, path


def open_read(url: str) -> BinaryIO:
    fs, path = filesystem(url)
    return fs.open(path, "rb", block_size=BLOCK_BYTES)


def glob(pattern: str) -> list[str]:
    """The URLs that match, sorted; empty where none does."""
    fs, path = filesystem(pattern)
    return sorted(fs.unstrip_protocol(match) for match in fs.glob(path))


class RemoteStorage:
    """`Storage` over any other remote folder, read-only: enough to look at a checkpoint."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __repr__(self) -> str:
        return f"RemoteStorage({self.url!r})"

    def _at(self, name: str) -> tuple[Any, str]:
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"storage name must be relative and without '..': {name!r}")
        fs, root = filesystem(self.url)
        return fs, f"{root.rstrip('/')}/{name}" if name else root

    def open_read(self, name: str) -> BinaryIO:
        fs, path = self._at(name)
        return fs.open(path, "rb", block_size=BLOCK_BYTES)

    def read_bytes(self, name: str) -> bytes:
        fs, path = self._at(name)
        return fs.cat_file(path)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        fs, path = self._at(name)
        data = fs.cat_file(path, start=start, end=end)
        if len(data) != end - start:
            raise OSError(f"{self.url}/{name}: {len(data)} bytes came instead of {end - start}")
        return data

    def list(self, prefix: str = "") -> list[Entry]:
        fs, path = self._at(prefix)
        _, root = self._at("")
        try:
            found = fs.find(path, withdirs=False, detail=True)
        except FileNotFoundError:
            return []
        cut = len(root.rstrip("/")) + 1
        return sorted(Entry(name[cut:], int(info["size"])) for name, info in found.items() if len(name) >= cut)

    def size(self, name: str) -> int:
        fs, path = self._at(name)
        return int(fs.info(path)["size"])

    def exists(self, name: str) -> bool:
        try:  # not fs.exists: it answers False to every error
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def put_file(self, local_path: str | os.PathLike[str], name: str, *, move: bool = False) -> None:
        raise self._read_only()

    def put_bytes(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        raise self._read_only()

    def delete(self, name: str) -> None:
        raise self._read_only()

    def delete_tree(self, prefix: str) -> None:
        raise self._read_only()

    def clock(self) -> float:
        raise self._read_only()

    def sweep(self, older_than: float) -> int:
        raise self._read_only()

    def _read_only(self) -> UserError:
        return UserError(f"{self.url}: only s3:// and local folders can be written to")
