"""Any other URL that fsspec knows, to read from: `https://`, `gs://`, `hf://`, `memory://`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn, cast

from clip_train.errors import UserError
from clip_train.storage.base import Entry
from clip_train.storage.blocks import Checksums
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import ChangedError, describe
from clip_train.storage.object_store import whole
from clip_train.storage.reader import RangedFile, Stat
from clip_train.storage.retry import within


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system of `url`, and the path in it. UserError for a protocol that is not known or installed.

    fsspec keeps one instance per process, which must not be used after a fork: a loader's worker calls this itself.
    """
    import fsspec

    try:
        # a cached listing would hide what another writer has put there since
        return fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as e:
        raise UserError(f"{url}: {e}") from e
    except ValueError as e:
        raise UserError(f"{url}: not a URL that fsspec can open ({e})") from e


class FsspecObject:
    """File systems have no streams in common: all of a range must have come at the least rate."""

    bucket = None

    def __init__(self, url: str, config: StorageConfig) -> None:
        self._fs, self._path = filesystem(url)
        self._config = config

    async def stat(self) -> Stat:
        seconds = self._config.patience_seconds
        info = await within(seconds, self._call("info"), f"no answer within {seconds:g} s (storage.patience_seconds)")
        if info.get("size") is None:
            raise ChangedError(f"{self._path}: the server does not say how long it is, so it cannot be read in ranges")
        return Stat(int(info["size"]), None)

    async def get(self, begin: int, end: int, stat: Stat) -> bytes:
        rate = self._config.min_rate
        limit = self._config.patience_seconds + (end - begin) / rate if rate else None
        late = f"not all of it came within {limit or 0:.3g} s (storage.min_rate, {rate} bytes/s)"
        return whole(await within(limit, self._call("cat_file", start=begin, end=end), late), end - begin)

    async def _call(self, method: str, **arguments: Any) -> Any:
        if self._fs.async_impl:
            return await getattr(self._fs, f"_{method}")(self._path, **arguments)
        return await asyncio.to_thread(getattr(self._fs, method), self._path, **arguments)


def open_read(url: str, config: StorageConfig, checksums: Checksums | None) -> BinaryIO:
    return cast(BinaryIO, RangedFile(url, FsspecObject(url, config), config, checksums))


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


class ReadOnlyStorage:
    """`Storage` over such a URL: enough to look at a checkpoint."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def _at(self, name: str) -> tuple[Any, str]:
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"storage name must be relative and without '..': {name!r}")
        fs, root = filesystem(self.url)
        return fs, f"{root.rstrip('/')}/{name}" if name else root

    def read_bytes(self, name: str) -> bytes:
        self._at(name)
        with open_read(f"{self.url}/{name}", StorageConfig(), None) as file:
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

    def exists(self, name: str) -> bool:
        try:  # not fs.exists: it answers False to every error
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(f"{self.url}: it is read-only here; only s3:// and local folders can be written to")

    put_file = put_bytes = delete = delete_tree = clock = sweep = _refuse
