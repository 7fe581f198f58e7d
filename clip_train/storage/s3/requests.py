"""One request to S3 until it succeeds, is refused for good, or patience is over."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from clip_train.storage.answers import Meaning, describe, meaning
from clip_train.storage.s3.body import sign_by_known_sums
from clip_train.storage.s3.session import Session

T = TypeVar("T")

MIN_TRIES = 3  # even where each took long
_LONGEST_SECONDS = 600.0  # of one try
_SLOWER = 4  # times: what a link may be after a timeout; many requests may share it
_LARGE = 1 << 20  # bytes; from there on the time that a request takes tells of the link


class S3Error(OSError):
    """The store's refusal, or none of its answers, in words."""


class TakenError(Exception):
    """412: there is something by that name."""


@dataclass(frozen=True)
class Limits:
    parallel: int  # requests at a time
    min_rate: int  # bytes per second; a slower request is given up, and tried again with more time
    request_seconds: float  # what a request may take beside moving its bytes
    patience_seconds: float  # how long one operation is tried, with all its retries


class Requests:
    """s3fs's client for one URL, its event loop, and our own retries. `run` may be called from any thread."""

    def __init__(self, url: str, limits: Limits) -> None:
        self.url, self.limits = url, limits
        self.slots = asyncio.Semaphore(limits.parallel)
        self._fs: Any = None
        self._slowness = 1  # how many times slower than `min_rate` large requests may be, by the last that succeeded

    def run(self, work: Awaitable[T]) -> T:
        from fsspec.asyn import sync

        async def run() -> T:
            return await work

        return sync(self._filesystem().loop, run)

    def _filesystem(self) -> Any:
        if self._fs is None:
            import s3fs

            sign_by_known_sums()
            self._fs = s3fs.S3FileSystem(
                skip_instance_cache=True,
                use_listings_cache=False,
                config_kwargs={
                    "connect_timeout": 10,
                    # Of silence: also while a server puts parts together, or the last of one is still on its way.
                    "read_timeout": 120,
                    "max_pool_connections": self.limits.parallel + 2,
                    "retries": {"total_max_attempts": 1},  # `until_done` does it, and knows when to stop
                },
            )
        return self._fs

    async def client(self) -> Any:
        fs = self._filesystem()
        await fs.set_session()
        client = await fs.get_s3(self.url.split("/")[2])
        # a part waits for "100 Continue" otherwise, a round trip for each
        client.meta.events.register_last("before-call.s3", _without_expect, unique_id="clip_train")
        return client

    async def until_done(
        self,
        what: str,
        call: Callable[[Any], Awaitable[T]],
        *,
        num_bytes: int = 0,
        more_seconds: float = 0.0,
        held: bool = False,
    ) -> T:
        """What `call(client)` gives at last.

        num_bytes: how much it moves, for the watchdog. more_seconds: what it may take beside that and
        `Limits.request_seconds`. held: the caller has its slot already.
        FileNotFoundError, PermissionError, S3Error; TakenError for a failed If-None-Match.
        """
        fs = self._filesystem()
        session = Session.of(fs)
        seconds = num_bytes / self.limits.min_rate + more_seconds
        slowness = self._slowness if num_bytes >= _LARGE else 1
        give_up = time.monotonic() + self.limits.patience_seconds
        delay, renew, renewed, generation = 0.2, False, False, session.generation
        for tries in itertools.count(1):
            limit = self._limit(seconds, slowness)
            try:
                if renew:
                    await asyncio.wait_for(session.renew(fs, generation), limit)
                    renew, renewed = False, True
                generation = session.generation
                client = await asyncio.wait_for(self.client(), limit)
                done, took = await self._once(call, client, limit, held)
                session.worked = True
                if num_bytes >= _LARGE:  # the next one need not find out again, nor wait as long when it is better
                    in_less = took <= self._limit(seconds, slowness // _SLOWER)
                    self._slowness = max(slowness // _SLOWER, 1) if in_less else slowness
                return done
            except Exception as e:
                kind = meaning(e)
                renew = renew or session.should_renew(kind, renewed)
                left = give_up - time.monotonic()
                in_time = tries < MIN_TRIES or left > 0
                if not in_time or not (renew or kind == "again"):
                    raise self._error(e, kind, what, limit) from e
                if isinstance(e, asyncio.TimeoutError | TimeoutError):
                    slowness *= _SLOWER
            pause = delay * random.uniform(0.5, 1.0)
            await asyncio.sleep(min(pause, left) if left > 0 else pause)  # the last try is at the end of the patience
            delay = min(2 * delay, 8.0)
        raise AssertionError("unreachable")

    def _limit(self, seconds: float, slowness: int) -> float:
        return min(self.limits.request_seconds + seconds * slowness, _LONGEST_SECONDS)

    async def _once(
        self, call: Callable[[Any], Awaitable[T]], client: Any, limit: float, held: bool
    ) -> tuple[T, float]:
        """What it gives, and the seconds that it took without the wait for its slot."""
        async with contextlib.nullcontext() if held else self.slots:
            began = time.monotonic()
            return await asyncio.wait_for(call(client), limit), time.monotonic() - began

    def _error(self, e: Exception, kind: Meaning, what: str, limit: float) -> Exception:
        """As whom the operation's caller gets to know it."""
        if isinstance(e, asyncio.TimeoutError | TimeoutError):
            return S3Error(errno.ETIMEDOUT, f"{self.url}: {what}: no answer within {limit:.0f} s")
        told = f"{self.url}: {what}: {describe(e)}"
        if kind == "taken":
            return TakenError(told)
        if kind == "missing":
            return FileNotFoundError(errno.ENOENT, told)
        if kind in ("denied", "expired"):
            return PermissionError(errno.EACCES, told)
        lasting = {"no bucket": errno.ENXIO, "final": errno.EPERM}
        return S3Error(lasting.get(kind, errno.EIO), told)


def _without_expect(params: dict[str, Any], **_: Any) -> None:
    params["headers"].pop("Expect", None)
