"""A request to a remote store, repeated until it succeeds, is refused for good, or time is up."""

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from fsspec.asyn import get_loop

from clip_train.storage.errors import (
    Meaning,
    TransferError,
    describe,
    final_error,
    is_unreachable,
    meaning,
)
from clip_train.storage.redact import redact

T = TypeVar("T")
LONGEST_BACKOFF_SECONDS = 20.0
LOUD_ATTEMPT = 3  # fewer failures than this are everyday life on S3
_log = logging.getLogger("clip_train.storage")
_reached: set[str] = set()  # hosts that have answered; another is soon given up if unreachable
_random = random.Random()  # its own: jitter must not shift any other draws


class Connection(Protocol):
    """What a retry needs of a connection to a bucket."""

    worked: bool  # whether it has ever answered

    def renew(self, kind: Meaning, again: bool) -> bool:
        """Fetch credentials (or the region) anew. Return whether another attempt may then succeed.

        kind: what the error meant. again: it was done for this operation already.
        """
        ...


@dataclass(frozen=True)
class Pace:
    """How slow an answer may be before its request is given up."""

    seconds: float  # until it begins
    rate: float  # bytes per second on average from then on; 0: any
    keys: str = ""  # the keys of the recipe that say so, for messages

    def limit(self, num_bytes: int) -> float | None:
        """Seconds that a request of so many bytes may take; None: any."""
        return self.seconds + num_bytes / self.rate if self.rate else None

    async def hold(self, answer: Awaitable[T], seconds: float | None, so_far: str = "") -> T:
        """Return the answer. TransferError if it does not come within `seconds` (None: any)."""
        try:
            return await asyncio.wait_for(answer, seconds)
        except (asyncio.TimeoutError, TimeoutError) as e:
            what = so_far or "no answer"
            raise TransferError(f"{what} within {seconds:.3g} s{self.keys}") from e


@dataclass(frozen=True)
class Retry:
    """Try at least `attempts` times and, if given, for at least `seconds`."""

    url: str
    pace: Pace
    attempts: int
    seconds: float | None = None  # None: only attempts count, and messages name them
    backoff_seconds: float = 0.2  # doubled by each attempt
    connection: Connection | None = None

    async def __call__(self, what: str, request: Callable[[Pace], Awaitable[T]]) -> T:
        """What `request` returns. StorageError with `url`, `what`, the reason and the remedy."""
        end, pace, renewed = time.monotonic() + (self.seconds or 0.0), self.pace, False
        host = urlsplit(self.url).netloc
        for attempt in itertools.count(1):
            try:
                answer = await request(pace)
                _reached.add(host)
                if self.connection is not None:
                    self.connection.worked = True
                return answer
            except Exception as e:
                kind, left = meaning(e), end - time.monotonic()
                count = f", attempt {attempt} of {self.attempts}" if self.seconds is None else ""
                message = redact(f"{self.url}: {what}{count}: {describe(e)}")
                wrong = is_unreachable(e) and host not in _reached and attempt >= LOUD_ATTEMPT
                helps = kind == "again" and not wrong
                if self.connection is not None and kind in ("denied", "expired", "elsewhere"):
                    helps = await asyncio.to_thread(self.connection.renew, kind, renewed)
                    renewed = True
                silent = self.seconds is not None and isinstance(e, TransferError)
                if not helps or (left <= 0 and (silent or attempt >= self.attempts)):
                    raise final_error(kind, message) from e
            level = logging.WARNING if attempt >= LOUD_ATTEMPT else logging.DEBUG
            _log.log(level, "%s; trying again", message)
            if self.seconds is not None:  # the link may be slow
                patient = max(pace.seconds, min(4 * pace.seconds, left))
                pace = replace(pace, seconds=patient, rate=pace.rate / 4)
            longest = self.backoff_seconds * 2.0 ** min(attempt - 1, 64)
            longest = min(LONGEST_BACKOFF_SECONDS, longest)
            pause = _random.uniform(longest / 2, longest)  # so that workers do not march in step
            await asyncio.sleep(min(pause, left) if left > 0 else pause)
        raise AssertionError("unreachable")


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start it on fsspec's event loop, which has a thread of its own."""
    return asyncio.run_coroutine_threadsafe(work, get_loop())


def run(work: Coroutine[Any, Any, T]) -> T:
    """Wait for it, in any thread but the loop's; a signal's handler can run meanwhile."""
    future = submit(work)
    try:
        return future.result()
    finally:
        future.cancel()  # if a handler has raised
