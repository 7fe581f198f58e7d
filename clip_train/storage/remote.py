"""Any fsspec URL, to read from: `s3://`, `https://`, `memory://`. fsspec's file systems are made here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from clip_train.errors import UserError
from clip_train.storage.answers import describe
from clip_train.storage.base import Entry
from clip_train.storage.blocks import Checksums
from clip_train.storage.config import StorageConfig
from clip_train.storage.fetch import S3Source, Source
from clip_train.storage.listing import matching_keys
from clip_train.storage.ranged import RangedFile

S3_PROTOCOLS = ("s3", "s3a")


def filesystem(url: str, **options: Any) -> tuple[Any, str]:
    """The file system of `url` and the path in it. UserError for a protocol that is not known or installed.

    fsspec keeps one instance per process; one made before a fork must not be used after it, so a loader's
    worker calls this itself.
    """
    import fsspec

    try:
        # a cached listing would hide what another writer has put there since
        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as e:
        raise UserError(f"{url}: {e}") from e
    except ValueError as e:
        raise UserError(f"{url}: not a URL that fsspec can open ({e})") from e
    return fs, path


def _is_s3(url: str) -> bool:
    return url.split("://", 1)[0].lower() in S3_PROTOCOLS


def open_read(url: str, config: StorageConfig, checksums: Checksums | None = None) -> BinaryIO:
    if not _is_s3(url):
        fs, path = filesystem(url)
        return cast(BinaryIO, RangedFile(url, Source(fs, path, config), config, checksums))
    # One try for each of ours, within our patience; and connections for several shards at once.
    patience = config.patience_seconds
    own = {"retries": {"total_max_attempts": 1}, "max_pool_connections": 32}
    fs, path = filesystem(url, config_kwargs={**own, "connect_timeout": patience, "read_timeout": 3 * patience})
    fs.retries = 1
    return cast(BinaryIO, RangedFile(url, S3Source(fs, path, config), config, checksums))


def write_bytes(url: str, data: bytes) -> None:
    """One object, by a single put: whole or not at all. OSError."""
    with _as_os_errors(url):
        fs, path = filesystem(url)
        fs.pipe_file(path, data)


def glob(pattern: str) -> list[str]:
    """The URLs that match, sorted; empty where none does. OSError; UserError for `s3://*`."""
    with _as_os_errors(pattern):
        fs, path = filesystem(pattern)
        found = matching_keys(fs, path) if _is_s3(pattern) else fs.glob(path)
        return sorted(fs.unstrip_protocol(match) for match in found)


@contextlib.contextmanager
def _as_os_errors(url: str) -> Iterator[None]:
    """What a file system's own client raises (no credentials, no way to the endpoint) is an OSError here, in words."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as e:
        raise OSError(f"{url}: {describe(e)}") from e


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
        self._at(name)
        return open_read(f"{self.url}/{name}", StorageConfig())

    def read_bytes(self, name: str) -> bytes:
        with self.open_read(name) as file:
            return file.read()

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

    def sweep(self, older_than: float, spare: Callable[[str], bool] = lambda name: False, prefix: str = "") -> int:
        raise self._read_only()

    def _read_only(self) -> UserError:
        return UserError(f"{self.url}: it is read-only here; only s3:// and local folders can be written to")
