"""An attempt at a remote store, repeated until it succeeds, is refused for good, or patience is over.

What it is about: whatever a client lets through (a short body, a lost answer, a refused digest, an expired token).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fsspec.asyn import get_loop

from clip_train.storage.bucket import Bucket
from clip_train.storage.errors import TransferError, describe, final_error, is_unreachable, meaning
from clip_train.storage.redact import redact

T = TypeVar("T")
LONGEST_BACKOFF_SECONDS = 20.0
LOUD_ATTEMPT = 3  # failures up to here are everyday life on S3
_log = logging.getLogger("clip_train.storage")
_reached = {""}  # hosts that have answered; what another refuses at first will hardly come up
_random = random.Random()  # of its own: jitter must not shift anybody else's draws


@dataclass(frozen=True)
class Retry:
    """How patiently `url` is asked: `attempts` at least, and as many as `seconds` have room for."""

    url: str
    attempts: int
    seconds: float | None = None  # None: the attempts are all that counts, and messages name them
    backoff_seconds: float = 0.2  # doubled by each attempt

    async def __call__(
        self, what: str, action: Callable[[], Awaitable[T]], bucket: Bucket | None
    ) -> T:
        """What `action` gives at last; StorageError with `url`, `what`, the reason and the remedy.

        bucket: where it asks, if it is one, whose credentials may be renewed.
        """
        end, renewed = time.monotonic() + (self.seconds or 0.0), False
        host = urlsplit(self.url).netloc if bucket is None else ""
        for attempt in itertools.count(1):
            generation = bucket.generation if bucket else 0
            try:
                done = await action()
            except Exception as e:
                kind, left = meaning(e), end - time.monotonic()
                count = f", attempt {attempt} of {self.attempts}" if self.seconds is None else ""
                message = redact(f"{self.url}: {what}{count}: {describe(e)}")
                renew = bucket is not None and bucket.renew(kind, generation, renewed)
                tried = attempt >= self.attempts or (
                    self.seconds is not None and isinstance(e, TransferError)
                )
                unreached = host not in _reached and attempt >= LOUD_ATTEMPT and is_unreachable(e)
                if not (renew or kind == "again") or (tried and left <= 0) or unreached:
                    raise final_error(kind, message) from e
                _log.log(
                    logging.WARNING if attempt >= LOUD_ATTEMPT else logging.DEBUG,
                    "%s; trying again",
                    message,
                )
            else:
                _reached.add(host)
                if bucket is not None:
                    bucket.worked = True
                return done
            renewed = renewed or renew
            longest = min(
                LONGEST_BACKOFF_SECONDS, self.backoff_seconds * 2.0 ** min(attempt - 1, 64)
            )
            pause = _random.uniform(longest / 2, longest)  # so that workers do not march
            await asyncio.sleep(
                min(pause, left) if left > 0 else pause
            )  # the last one is at the end of the patience
        raise AssertionError("unreachable")


async def within(seconds: float | None, answer: Awaitable[T], reason: str = "") -> T:
    """The answer; TransferError with the reason where it does not come in time."""
    try:
        return await asyncio.wait_for(answer, seconds)
    except (asyncio.TimeoutError, TimeoutError) as e:
        raise TransferError(reason or f"no answer within {seconds:.3g} s") from e


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin it on fsspec's event loop, which has a thread of its own."""
    return asyncio.run_coroutine_threadsafe(work, get_loop())


def run(work: Coroutine[Any, Any, T]) -> T:
    """From any thread but the loop's; a signal's handler can run meanwhile."""
    future = submit(work)
    try:
        return future.result()
    finally:
        future.cancel()  # where a handler has raised
