"""One attempt to get one range of a remote object, watched while it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from clip_train.storage.answers import Changed, Meaning, Transfer
from clip_train.storage.config import StorageConfig
from clip_train.storage.s3.session import Session

CHUNK_BYTES = 1 << 18


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

    def should_renew(self, kind: Meaning, renewed: bool) -> bool:
        """Whether the credential chain is to be asked anew after such an error; not where the file system cannot."""
        return False

    async def renew(self) -> None:
        raise AssertionError("not after such an answer")


class S3Source(Source):
    """S3 through s3fs, as a stream: its rate is watched, and its ETag and range are compared."""

    _generation = 0  # of the credentials with which the last request was signed

    async def stat(self) -> Stat:
        try:
            answer = await self._call("head_object")
        except PermissionError:
            await self._call("get_object", Range="bytes=0-0")  # a HEAD has no body to say why
            raise
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

    def should_renew(self, kind: Meaning, renewed: bool) -> bool:
        return Session.of(self.fs).should_renew(kind, renewed)

    async def renew(self) -> None:
        await asyncio.wait_for(Session.of(self.fs).renew(self.fs, self._generation), self.config.patience_seconds)

    async def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        bucket, key, version = self.fs.split_path(self.path)
        which = {"VersionId": version} if version else {}
        await self.fs.set_session()
        session = Session.of(self.fs)
        self._generation = session.generation
        call = self.fs._call_s3(method, Bucket=bucket, Key=key, **which, **arguments)
        try:
            answer = await asyncio.wait_for(call, self.config.patience_seconds)
        except asyncio.TimeoutError as e:
            raise Transfer(f"no answer within {self.config.patience_seconds:g} s (storage.patience_seconds)") from e
        session.worked = True
        return answer


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
