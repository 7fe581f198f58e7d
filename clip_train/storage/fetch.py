"""One attempt to get one range of a remote object, watched while it arrives; and what an error means."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from clip_train.storage.config import StorageConfig

CHUNK_BYTES = 1 << 18

Meaning = Literal["missing", "denied", "changed", "final", "again"]

# What S3 calls credentials that were right once. Some come as 400, not as 403.
_STALE_CREDENTIALS = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired"}


class Transfer(OSError):
    """An answer that is not what was asked for, or comes too slowly: worth another attempt."""


class Changed(OSError):
    """The object is another one than when it was opened."""


@dataclass(frozen=True)
class Stat:
    size: int  # bytes
    version: str | None  # changes with the content; None where the store has no such thing


class Source:
    """One remote object through its fsspec file system, all on fsspec's event loop."""

    def __init__(self, fs: Any, path: str, config: StorageConfig) -> None:
        self.fs, self.path, self.config = fs, path, config

    async def stat(self) -> Stat:
        call = self.fs._info(self.path) if self.fs.async_impl else asyncio.to_thread(self.fs.info, self.path)
        info = await asyncio.wait_for(call, self.config.patience_seconds)
        if info.get("size") is None:
            raise Changed(f"{self.path}: the server does not say how long it is, so it cannot be read in ranges")
        return Stat(int(info["size"]), info.get("ETag") or info.get("etag") or None)

    async def get(self, begin: int, end: int, stat: Stat) -> bytes:
        """Exactly the bytes [begin, end), or an error."""
        if self.fs.async_impl:
            call = self.fs._cat_file(self.path, start=begin, end=end)
        else:
            call = asyncio.to_thread(self.fs.cat_file, self.path, start=begin, end=end)
        # The file systems have no streams in common: all of it must have come at the least rate.
        rate = self.config.min_rate
        limit = self.config.patience_seconds + (end - begin) / rate if rate else None
        try:
            data = await asyncio.wait_for(call, limit)
        except asyncio.TimeoutError as e:
            raise Transfer(f"not all of it came within {limit:.3g} s (storage.min_rate, {rate} bytes/s)") from e
        return _whole(data, begin, end)

    async def renew(self) -> bool:
        """Ask the credential chain anew; False where the file system cannot."""
        return False


class S3Source(Source):
    """S3 through s3fs, as a stream: its rate is watched, and its ETag and range are compared."""

    _session: Any = None  # with which the last request was signed

    async def stat(self) -> Stat:
        answer = await self._call("head_object")
        return Stat(int(answer["ContentLength"]), answer.get("ETag"))

    async def get(self, begin: int, end: int, stat: Stat) -> bytes:
        answer = await self._call("get_object", Range=f"bytes={begin}-{end - 1}")
        body = answer["Body"]
        try:
            if stat.version is not None and answer.get("ETag") != stat.version:
                raise Changed(f"its ETag was {stat.version} when it was opened and is {answer.get('ETag')}")
            if answer.get("ContentRange", "").partition("/")[0] != f"bytes {begin}-{end - 1}":
                raise Transfer(f"the answer is of another range ({answer.get('ContentRange')})")
            data = await watched(lambda: body.read(CHUNK_BYTES), end - begin, self.config)
        finally:
            body.close()
        return _whole(data, begin, end)

    async def renew(self) -> bool:
        async with _renewing:
            if self.fs.session is self._session:  # not renewed meanwhile, by another file
                await self.fs.set_session(refresh=True)
        return True

    async def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        bucket, key, version = self.fs.split_path(self.path)
        which = {"VersionId": version} if version else {}
        await self.fs.set_session()
        self._session = self.fs.session
        call = self.fs._call_s3(method, Bucket=bucket, Key=key, **which, **arguments)
        try:
            return await asyncio.wait_for(call, self.config.patience_seconds)
        except asyncio.TimeoutError as e:
            raise Transfer(f"no answer within {self.config.patience_seconds:g} s (storage.patience_seconds)") from e


_renewing = asyncio.Lock()  # only ever held on fsspec's loop


async def watched(read: Callable[[], Awaitable[bytes]], expected: int, config: StorageConfig) -> bytes:
    """What `read` gives until it gives nothing, at most one chunk beyond `expected`.

    Transfer where less than `min_rate` arrived within `patience_seconds`: an idle timeout alone never fires
    on a server that drips.
    """
    loop = asyncio.get_running_loop()
    data = bytearray()
    window_end, before = loop.time() + config.patience_seconds, 0
    while len(data) <= expected:
        try:
            chunk = await asyncio.wait_for(read(), max(0.001, window_end - loop.time()))
        except asyncio.TimeoutError as e:
            if type(e) is not asyncio.TimeoutError:  # the client's own: this stream gives nothing more
                raise
            chunk = None
        if chunk == b"":
            break
        data += chunk or b""
        if loop.time() >= window_end:
            arrived = len(data) - before
            if len(data) < expected and arrived < max(1, config.min_rate * config.patience_seconds):
                raise Transfer(
                    f"{arrived} bytes in {config.patience_seconds:g} s, after {before}, are less than storage.min_rate "
                    f"({config.min_rate} bytes/s)"
                )
            window_end, before = loop.time() + config.patience_seconds, len(data)
    return bytes(data)


def _whole(data: bytes, begin: int, end: int) -> bytes:
    if len(data) != end - begin:
        raise Transfer(f"{len(data)} bytes came instead of {end - begin}")
    return data


def meaning(error: BaseException) -> Meaning:
    """What to do about an error of an attempt; `again` where nothing says that it would be in vain."""
    if isinstance(error, Changed):
        return "changed"
    status, code = _status(error)
    if code in _STALE_CREDENTIALS or status in (401, 403) or (status is None and isinstance(error, PermissionError)):
        return "denied"
    if type(error).__name__ == "NoCredentialsError" or (status, code) == (400, "400"):
        return "denied"  # a HEAD has no body to say ExpiredToken in
    if status == 404 or (status is None and isinstance(error, FileNotFoundError) and not _of_network(error.__cause__)):
        return "missing"
    if status is not None and 400 <= status < 500 and status not in (408, 409, 425, 429):
        return "changed" if status in (412, 416) else "final"
    return "again"


def _of_network(cause: BaseException | None) -> bool:
    """fsspec's HTTP calls every look-up that failed a FileNotFoundError: what caused it tells them apart."""
    if isinstance(cause, FileNotFoundError):
        return False
    return isinstance(cause, OSError | asyncio.TimeoutError) or type(cause).__module__.startswith("aiohttp")


def describe(error: BaseException) -> str:
    """One line; of an answer of the server its status and code, which OSError's text leaves out."""
    if isinstance(error, Transfer | Changed):
        return str(error)
    status, code = _status(error)
    answered = f"HTTP {status} {code if code != str(status) else ''}".strip() if status is not None else ""
    return f"{answered or type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"


def _status(error: BaseException | None) -> tuple[int | None, str]:
    """(HTTP status, S3's code) from botocore's, aiohttp's or gcsfs's error, or from one that it caused."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return response.get("ResponseMetadata", {}).get("HTTPStatusCode"), response.get("Error", {}).get("Code", "")
        module = type(error).__module__.partition(".")[0]
        number = str(getattr(error, {"aiohttp": "status", "gcsfs": "code"}.get(module, "-"), None))
        if number.isdigit():
            return int(number), ""
        error = error.__cause__
    return None, ""
