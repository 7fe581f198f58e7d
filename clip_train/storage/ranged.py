"""A remote file that is read as if it were local: ranges fetched ahead in parallel, retried, and verified."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from clip_train.storage.answers import Meaning, Transfer, describe, meaning
from clip_train.storage.blocks import BlockFile, Checksums, DeniedError, MissingError, ReadError, block_sum
from clip_train.storage.config import StorageConfig
from clip_train.storage.fetch import Source, Stat

LONGEST_BACKOFF_SECONDS = 20.0
LOUD_ATTEMPT = 3  # failures up to here are everyday life on S3

T = TypeVar("T")
_log = logging.getLogger("clip_train.storage")
_random = random.Random()  # of its own: jitter must not shift anybody else's draws


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

    def __init__(self, url: str, source: Source, config: StorageConfig, checksums: Checksums | None = None) -> None:
        self.url, self._source, self._config, self._checksums = url, source, config, checksums
        self._ahead: dict[int, Future[bytes]] = {}
        self._depth = 0
        self._previous = -2
        self._stat = self._run(self._persist("its size", source.stat)).result()
        if checksums is not None:
            checksums.check_size(url, self._stat.size)
        super().__init__(url, self._stat.size, checksums.block_bytes if checksums else config.range_bytes)

    @property
    def stat(self) -> Stat:
        """As it was when the file was opened."""
        return self._stat

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
            data = await self._source.get(begin, end, self._stat)
            if self._checksums is not None and (found := block_sum(data)) != self._checksums.of(block):
                wrong.add(found)
                raise Transfer(
                    "the bytes are not those that the index was made from"
                    + (", each time others" if len(wrong) > 1 else "")
                    + "; if it is stored like this, restore it, or run `clip-train index` again for the new content"
                )
            return data

        return self._run(self._persist(f"bytes {begin}-{end - 1}", attempt))

    def _run(self, coroutine: Any) -> Future:
        from fsspec.asyn import get_loop

        async def seen() -> Any:
            task = asyncio.current_task()
            assert task is not None
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask: it was dropped
            return await coroutine

        loop = self._source.fs.loop if self._source.fs.async_impl else get_loop()
        return asyncio.run_coroutine_threadsafe(seen(), loop)

    async def _persist(self, what: str, action: Callable[[], Awaitable[T]]) -> T:
        """`action`, until it succeeds or is hopeless."""
        attempts, renew, renewed = self._config.attempts, False, False
        for attempt in range(1, attempts + 1):
            try:
                if renew:
                    await self._source.renew()
                    renew, renewed = False, True
                return await action()
            except Exception as e:
                kind = meaning(e)
                told = f"{self.url}: {what}, attempt {attempt} of {attempts}: {describe(e)}"
                renew = renew or self._source.should_renew(kind, renewed)
                if attempt == attempts or not (renew or kind == "again"):
                    raise _final(kind, told, renewed) from e
                _log.log(logging.WARNING if attempt >= LOUD_ATTEMPT else logging.INFO, "%s; trying again", told)
                await asyncio.sleep(backoff(attempt, self._config))
        raise AssertionError("unreachable")


def backoff(attempt: int, config: StorageConfig) -> float:
    """Seconds to wait after a failed attempt (from 1): doubling, half of it random, so that workers do not march."""
    longest = min(LONGEST_BACKOFF_SECONDS, config.backoff_seconds * 2 ** (attempt - 1))
    return _random.uniform(longest / 2, longest)


def _final(kind: Meaning, told: str, renewed: bool) -> ReadError:
    if kind in ("missing", "no bucket"):
        return MissingError(told)
    if kind in ("denied", "expired"):
        return DeniedError(told + (" (they were fetched anew in between)" if renewed else ""))
    return ReadError(told)
