"""Any other URL that fsspec knows: `https://`, `hf://`, `memory://`; S3 by s3fs.

`fsspec+s3://` reads and writes S3 by s3fs instead of obstore.
"""

import asyncio
import contextlib
import datetime
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec

from clip_train.errors import UserError
from clip_train.storage.base import Entry
from clip_train.storage.errors import ChangedError
from clip_train.storage.redact import REMOVED, WAS_REDACTED
from clip_train.storage.remote import Pace, RemoteStorage, checked_length

LISTING_SECONDS = 60.0  # of everything below a folder: no file system reports its progress
_TAGS = ("ETag", "etag", "md5Hash", "blob_id", "Last-Modified")
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


class FsspecStorage(RemoteStorage):
    """`Storage` over a file system of fsspec; a write is as atomic as that file system's.

    fsspec has one instance of a file system per process, which must not be used after a fork.
    """

    def __init__(self, url: str, **limits: Any) -> None:
        """UserError for a protocol that is not known or not installed."""
        if WAS_REDACTED.search(url):
            raise UserError(f"{url}: {REMOVED}")
        try:
            # no cached listings: they would hide files that another writer has stored since
            self._fs, root = fsspec.core.url_to_fs(
                url.removeprefix("fsspec+"), use_listings_cache=False
            )
        except ImportError as e:
            advice = "install it"
            if url.startswith(("gs://", "az://")):
                advice = "install it, or use storage.client=obstore, which needs no other package"
            raise UserError(f"{url}: {e}; {advice}") from e
        except ValueError as e:
            raise UserError(
                f"{url}: not a URL that fsspec can open ({e}); give a store of your own by its "
                "dotted path, or correct it"
            ) from e
        if hasattr(self._fs, "client_kwargs"):  # HTTP: set before its first request
            from clip_train.storage.http import BoundedResponse

            self._fs.client_kwargs.setdefault("response_class", BoundedResponse)
        super().__init__(url, root, **limits)

    async def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        if self._fs.async_impl:
            return await getattr(self._fs, f"_{method}")(*arguments, **options)
        return await asyncio.to_thread(getattr(self._fs, method), *arguments, **options)

    async def head(self, key: str, pace: Pace) -> Entry:
        info = await pace.hold(self._call("info", key))
        if info.get("mimetype") == "text/html" and not key.endswith((".html", ".htm")):
            raise ChangedError(
                "the server returned an HTML page instead of the file: open the URL in a "
                "browser; it may need a login, or a proxy may intercept it"
            )
        if info.get("size") is None:
            raise ChangedError(
                f"{key}: the server does not report its length, so it cannot be read in ranges"
            )
        return Entry(key, int(info["size"]), tag=_tag(info))

    async def get(
        self, key: str, begin: int, end: int | None, tag: str | None, pace: Pace
    ) -> bytes:
        """File systems have no common way to stream, so the time limit is for the whole range."""
        if end is None:
            request = self._call("cat_file", key, **({"start": begin} if begin else {}))
            return await pace.hold(request, self.part_bytes)
        num_bytes = end - begin
        request = self._call("cat_file", key, start=begin, end=end)
        data = await pace.hold(request, num_bytes, f"not all of {num_bytes} bytes")
        return checked_length(data, num_bytes)

    async def listing(self, folder: str, pace: Pace) -> list[Entry]:
        try:
            request = self._call("find", folder.rstrip("/"), withdirs=False, detail=True)
            infos = await replace(pace, seconds=max(pace.seconds, LISTING_SECONDS)).hold(request)
        except FileNotFoundError:
            return []
        return [
            Entry(key, int(info["size"]), _modified(info))
            for key, info in infos.items()
            if key.startswith(folder)
        ]

    async def put(self, key: str, source: bytes | Path, if_absent: bool, pace: Pace) -> object:
        if not self._fs.async_impl:  # the file system may have real folders
            await self._call("makedirs", self._fs._parent(key), exist_ok=True)
        if isinstance(source, Path):
            write = self._call("put_file", str(source), key)
            return await pace.hold(write, source.stat().st_size)
        if self._fs.async_impl:
            write = self._fs._pipe_file(key, source, mode="create" if if_absent else "overwrite")
        else:
            write = asyncio.to_thread(self._write, key, source, "xb" if if_absent else "wb")
        return await pace.hold(write, len(source))

    def _write(self, key: str, data: bytes, mode: str) -> None:
        """mode "xb": creating the file is one system call; `pipe_file` would look first and then
        write."""
        with self._fs.open(key, mode) as file:
            file.write(data)

    async def remove(self, keys: Sequence[str], pace: Pace) -> object:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                await pace.hold(self._call("rm_file", key))
        return None

    def glob(self, pattern: str) -> list[str]:
        """Uses the file system's own search, because a listing of everything below a web page may
        never end."""
        keys = self.wait(f"listing {pattern}", lambda pace: self._call("glob", self.key(pattern)))
        return sorted(self.url + key.removeprefix(self.root) for key in keys)


def _tag(info: dict[str, Any]) -> str | None:
    """What the file system reports and what changes with the content, if there is such a thing."""
    values = [info.get(name) for name in (*_TAGS, *_TIMES)]
    return next((str(value) for value in values if value), None)


def _modified(info: dict[str, Any]) -> float:
    """Seconds since the epoch. If the file system does not report it, the current time, so that
    nobody removes the file."""
    for value in map(info.get, _TIMES):
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return time.time()
