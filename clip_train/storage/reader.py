"""A remote file that is read as if it were local: ranges fetched ahead in parallel, retried, and verified."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import fsspec
import obstore

from clip_train.errors import UserError
from clip_train.storage.blocks import DAMAGED, BlockFile, Checksums, block_sum
from clip_train.storage.bucket import Bucket
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import ChangedError, TransferError
from clip_train.storage.object_store import head_object, whole
from clip_train.storage.redact import REMOVED, is_redacted
from clip_train.storage.retry import Retry, run, submit, within

_CHUNK_BYTES = 1 << 18


class S3Object:
    """One of a bucket, as a stream: its rate and its ETag are watched. Asked for once: `RangedFile` tries again."""

    def __init__(self, bucket: Bucket, key: str, config: StorageConfig) -> None:
        self.bucket, self._key, self._config = bucket, key, config
        self._late = f"no answer within {config.patience_seconds:g} s (storage.patience_seconds)"

    async def open(self) -> int:
        """Its size in bytes, as it is now. Whatever obstore and botocore raise; TransferError for no answer in time."""
        store = (await self.bucket.stores()).single
        found = await within(
            self._config.patience_seconds, head_object(store, self._key), self._late
        )
        self._e_tag = found["e_tag"]
        return found["size"]

    async def get(self, begin: int, end: int) -> bytes:
        """Exactly the bytes [begin, end) of the object that was opened. As `open`; ChangedError."""
        store = (await self.bucket.stores()).single
        asked = obstore.get_async(store, self._key, options={"range": (begin, end)})
        answer = await within(self._config.patience_seconds, asked, self._late)
        if answer.meta["e_tag"] != self._e_tag:
            raise ChangedError(
                f"its ETag was {self._e_tag} when it was opened and is {answer.meta['e_tag']}"
            )
        return whole(await self._watched(aiter(answer.stream(_CHUNK_BYTES))), end - begin)

    async def _watched(self, chunks: AsyncIterator[Any]) -> bytes:
        """All of it; TransferError once less than `min_rate` has come: an idle timeout would not see a drip."""
        data, began = bytearray(), time.monotonic()
        while True:
            rate = self._config.min_rate
            seconds = self._config.patience_seconds + (
                len(data) / rate if rate else time.monotonic() - began
            )
            late = f"{len(data)} bytes in {seconds:.3g} s are less than storage.min_rate ({rate} bytes/s)"
            try:
                data += await within(began + seconds - time.monotonic(), anext(chunks), late)
            except StopAsyncIteration:
                return bytes(data)


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system of `url`, and the path in it. UserError for a protocol that is not known or installed.

    fsspec keeps one instance per process, which must not be used after a fork: a loader's worker calls this itself.
    """
    if is_redacted(url):
        raise UserError(f"{url}: {REMOVED}")
    try:
        # a cached listing would hide what another writer has put there since
        return fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as e:
        raise UserError(f"{url}: not a URL that fsspec can open ({e})") from e


class FsspecObject:
    """The same at any other URL. File systems have no streams in common: a whole range must come at the least rate."""

    bucket = None

    def __init__(self, url: str, config: StorageConfig) -> None:
        self._fs, self._path = filesystem(url)
        self._config = config

    async def open(self) -> int:
        seconds = self._config.patience_seconds
        info = await within(
            seconds,
            self._call("info"),
            f"no answer within {seconds:g} s (storage.patience_seconds)",
        )
        if info.get("mimetype") == "text/html" and not self._path.endswith((".html", ".htm")):
            raise ChangedError(
                "the server answers with an HTML page, not with the file: check the URL in a browser; it may want a "
                "login, or a proxy may be in between"
            )
        if info.get("size") is None:
            raise ChangedError(
                f"{self._path}: the server does not say how long it is, so it cannot be read in ranges"
            )
        return int(info["size"])

    async def get(self, begin: int, end: int) -> bytes:
        rate = self._config.min_rate
        limit = self._config.patience_seconds + (end - begin) / rate if rate else None
        late = f"not all of it came within {limit or 0:.3g} s (storage.min_rate, {rate} bytes/s)"
        return whole(
            await within(limit, self._call("cat_file", start=begin, end=end), late), end - begin
        )

    async def _call(self, method: str, **arguments: Any) -> Any:
        if self._fs.async_impl:
            return await getattr(self._fs, f"_{method}")(self._path, **arguments)
        return await asyncio.to_thread(getattr(self._fs, method), self._path, **arguments)


class _Budget:
    """Memory of this process for ranges fetched ahead, over all open files."""

    def __init__(self) -> None:
        self._lock, self._reserved = threading.Lock(), 0

    def reserve(self, count: int, limit: float = math.inf) -> bool:
        """Unless that would be more than `limit`; a negative `count` gives it back."""
        with self._lock:
            fits = self._reserved + count <= limit
            self._reserved += count * fits
            return fits


_budget = _Budget()


class RangedFile(BlockFile):
    """A seekable stream over a remote object.

    Blocks are fetched in order of need; once the reader moves from one to the next, up to `config.read_ahead`
    more are under way, as far as the process's budget goes. With checksums no byte of a block is given out
    before the whole block has been verified.

    Raises (all of them `StorageError`, final, with the file, the bytes and the attempt in the message):
        MissingError: there is no such object.
        DeniedError: refused twice, the second time with credentials fetched anew.
        StorageError: another object than at opening, or every attempt failed.
    """

    def __init__(
        self,
        url: str,
        remote: S3Object | FsspecObject,
        config: StorageConfig,
        checksums: Checksums | None = None,
    ) -> None:
        self.url, self._object, self._config, self._checksums = url, remote, config, checksums
        self._ahead: dict[int, Future[bytes]] = {}
        self._depth = 0
        self._previous = -2
        self._retry = Retry(url, config.attempts, backoff_seconds=config.backoff_seconds)
        size = run(self._retry("its size", remote.open, remote.bucket))
        if checksums is not None:
            checksums.check_size(url, size)
        super().__init__(url, size, checksums.block_bytes if checksums else config.range_bytes)

    def _load(self, block: int) -> bytes:
        in_order, self._previous = block == self._previous + 1, block
        self._depth = min(max(2, 2 * self._depth), self._config.read_ahead) if in_order else 0
        for number in [n for n in self._ahead if not block <= n <= block + self._depth]:
            self._drop(number)
        future = self._ahead.pop(block, None)
        if future is None:
            future = self._start(block)
        else:
            _budget.reserve(-self.block_bytes)
        for number in range(
            block + 1, min(block + 1 + self._depth, -(-self.size // self.block_bytes))
        ):
            if number not in self._ahead:
                if not _budget.reserve(self.block_bytes, self._config.read_ahead_bytes):
                    break
                self._ahead[number] = self._start(number)
        return future.result()

    def close(self) -> None:
        for number in list(self._ahead):
            self._drop(number)
        super().close()

    def _drop(self, number: int) -> None:
        self._ahead.pop(number).cancel()
        _budget.reserve(-self.block_bytes)

    def _start(self, block: int) -> Future[bytes]:
        begin, end = self.bounds(block)

        async def attempt() -> bytes:
            data = await self._object.get(begin, end)
            if self._checksums is not None and block_sum(data) != self._checksums.of(block):
                raise TransferError(DAMAGED)
            return data

        return submit(self._retry(f"bytes {begin}-{end - 1}", attempt, self._object.bucket))
