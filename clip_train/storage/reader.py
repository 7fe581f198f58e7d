"""A remote file that is read as if it were local: ranges fetched ahead in parallel, retried, and verified."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import obstore

from clip_train.storage.blocks import BlockFile, Checksums, block_sum
from clip_train.storage.bucket import Bucket
from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import ChangedError, TransferError, read_error
from clip_train.storage.object_store import head_object, whole
from clip_train.storage.retry import Retry, event_loop, within

_CHUNK_BYTES = 1 << 18
T = TypeVar("T")


@dataclass(frozen=True)
class Stat:
    size: int  # bytes
    version: str | None  # changes with the content; None where the store has no such thing


class RemoteObject(Protocol):
    """One object, asked for once at a time: `RangedFile` tries again."""

    @property
    def bucket(self) -> Bucket | None:
        """Where it is one of S3."""
        ...

    async def stat(self) -> Stat:
        """As it is now. Whatever the store's client raises; TransferError where no answer comes in time."""
        ...

    async def get(self, begin: int, end: int, stat: Stat) -> bytes:
        """Exactly the bytes [begin, end) of the object that `stat` is of. As `stat`; ChangedError."""
        ...


class S3Object:
    """One of a bucket, as a stream: its rate and its ETag are watched."""

    def __init__(self, bucket: Bucket, key: str, config: StorageConfig) -> None:
        self.bucket, self._key, self._config = bucket, key, config
        self._late = f"no answer within {config.patience_seconds:g} s (storage.patience_seconds)"

    async def stat(self) -> Stat:
        store = (await self.bucket.stores()).single
        found = await within(self._config.patience_seconds, head_object(store, self._key), self._late)
        return Stat(found["size"], found["e_tag"])

    async def get(self, begin: int, end: int, stat: Stat) -> bytes:
        store = (await self.bucket.stores()).single
        asked = obstore.get_async(store, self._key, options={"range": (begin, end)})
        answer = await within(self._config.patience_seconds, asked, self._late)
        if stat.version is not None and answer.meta["e_tag"] != stat.version:
            raise ChangedError(f"its ETag was {stat.version} when it was opened and is {answer.meta['e_tag']}")
        return whole(await self._watched(aiter(answer.stream(_CHUNK_BYTES))), end - begin)

    async def _watched(self, chunks: AsyncIterator[Any]) -> bytes:
        """All of it; TransferError once less than `min_rate` has come: an idle timeout would not see a drip."""
        data, began = bytearray(), time.monotonic()
        while True:
            rate = self._config.min_rate
            seconds = self._config.patience_seconds + (len(data) / rate if rate else time.monotonic() - began)
            late = f"{len(data)} bytes in {seconds:.3g} s are less than storage.min_rate ({rate} bytes/s)"
            try:
                data += await within(began + seconds - time.monotonic(), anext(chunks), late)
            except StopAsyncIteration:
                return bytes(data)


class Budget:
    """Memory of this process for ranges fetched ahead, over all open files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0

    def take(self, count: int, limit: int) -> bool:
        with self._lock:
            if self._taken + count > limit:
                return False
            self._taken += count
            return True

    def give_back(self, count: int) -> None:
        with self._lock:
            self._taken -= count


_budget = Budget()


class RangedFile(BlockFile):
    """A seekable stream over a remote object.

    Blocks are fetched in order of need; once the reader moves from one to the next, up to `config.read_ahead`
    more are under way, as far as the process's budget goes. With checksums no byte of a block is given out
    before the whole block has been verified.

    Raises (all of them `ReadError`, final, with the file, the bytes and the attempt in the message):
        MissingError: there is no such object.
        DeniedError: refused twice, the second time with credentials fetched anew.
        ReadError: another object than at opening, or every attempt failed.
    """

    def __init__(
        self, url: str, remote: RemoteObject, config: StorageConfig, checksums: Checksums | None = None
    ) -> None:
        self.url, self._object, self._config, self._checksums = url, remote, config, checksums
        self._ahead: dict[int, Future[bytes]] = {}
        self._depth = 0
        self._previous = -2
        self._retry = Retry(url, read_error, config.attempts, backoff_seconds=config.backoff_seconds)
        self._stat = self._run("its size", remote.stat).result()
        if checksums is not None:
            checksums.check_size(url, self._stat.size)
        super().__init__(url, self._stat.size, checksums.block_bytes if checksums else config.range_bytes)

    def _load(self, block: int) -> bytes:
        in_order, self._previous = block == self._previous + 1, block
        self._depth = min(max(2, 2 * self._depth), self._config.read_ahead) if in_order else 0
        for number in [n for n in self._ahead if not block <= n <= block + self._depth]:
            self._drop(number)
        future = self._ahead.pop(block, None)
        if future is None:
            future = self._start(block)
        else:
            _budget.give_back(self.block_bytes)
        for number in range(block + 1, min(block + 1 + self._depth, -(-self.size // self.block_bytes))):
            if number not in self._ahead:
                if not _budget.take(self.block_bytes, self._config.read_ahead_bytes):
                    break
                self._ahead[number] = self._start(number)
        return future.result()

    def close(self) -> None:
        for number in list(self._ahead):
            self._drop(number)
        super().close()

    def _drop(self, number: int) -> None:
        self._ahead.pop(number).cancel()
        _budget.give_back(self.block_bytes)

    def _start(self, block: int) -> Future[bytes]:
        begin, end = self.bounds(block)
        wrong: set[str] = set()

        async def attempt() -> bytes:
            data = await self._object.get(begin, end, self._stat)
            if self._checksums is not None and (found := block_sum(data)) != self._checksums.of(block):
                wrong.add(found)
                raise TransferError(
                    "the bytes are not those that the index was made from"
                    + (", each time others" if len(wrong) > 1 else "")
                    + "; if it is stored like this, restore it, or run `clip-train index` again for the new content"
                )
            return data

        return self._run(f"bytes {begin}-{end - 1}", attempt)

    def _run(self, what: str, action: Callable[[], Awaitable[T]]) -> Future[T]:
        async def work() -> T:
            task = asyncio.current_task()
            assert task is not None
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # dropped: nobody will ask
            return await self._retry(what, action, self._object.bucket)

        return asyncio.run_coroutine_threadsafe(work(), event_loop())
