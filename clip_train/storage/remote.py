"""The base of all remote stores: names, time limits, and retries of single requests.

A request is repeated until it succeeds, is refused finally, or runs out of time.
"""

import asyncio
import builtins
import errno
import itertools
import logging
import os
import random
import re
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from fsspec.asyn import get_loop
from fsspec.utils import glob_translate

from clip_train.storage.base import Entry, Storage, checked_name
from clip_train.storage.errors import (
    RAISED,
    Meaning,
    StorageError,
    TransferError,
    describe_error,
    describe_route,
    meaning,
)
from clip_train.storage.redact import redact

T = TypeVar("T")
PART_BYTES = 8 << 20  # of an upload
MIN_RATE = 256 << 10  # bytes per second, of all parts together
REQUEST_SECONDS = 20.0
PATIENCE_SECONDS = 60.0
_MIN_ATTEMPTS = 3  # even after the time limit, if the server has answered
LONGEST_BACKOFF_SECONDS = 20.0
LOUD_ATTEMPT = 3  # warn from this attempt on: fewer failures are normal on S3
_log = logging.getLogger("clip_train.storage")
reached: set[str] = set()  # hosts and buckets that have answered this process
_random = random.Random()  # a separate generator: jitter must not shift any other draws


@dataclass(frozen=True)
class Pace:
    """Limits for the duration of an answer, and for the number of attempts."""

    seconds: float  # until the answer begins
    rate: float  # least bytes per second on average, once it has begun; 0: no limit
    attempts: int = _MIN_ATTEMPTS  # at least
    total_seconds: float | None = None  # of all attempts, at least; None: only attempts are limited
    backoff_seconds: float = 0.2  # doubled by each attempt
    keys: str = ""  # for messages: the recipe's keys for `seconds` and `rate`
    limit: str = ""  # for messages: the key for `attempts` or `total_seconds`

    async def hold(self, answer: Awaitable[T], num_bytes: int = 0, so_far: str = "no answer") -> T:
        """Await the answer to a request of this many bytes. TransferError if it takes too long."""
        seconds: float | None = self.seconds
        if num_bytes:
            seconds = self.seconds + num_bytes / self.rate if self.rate else None
        try:
            return await asyncio.wait_for(answer, seconds)
        except (asyncio.TimeoutError, TimeoutError) as e:
            raise TransferError(f"{so_far} within {seconds:.3g} s{self.keys}") from e


class RemoteStorage(Storage):
    """A remote store: a subclass makes single requests, this class limits and repeats them.

    The abstract methods are the requests. They run on fsspec's event loop and keep to the `Pace`
    (`pace.hold`). Their keys, and the names that `listing` returns, contain the root.

    A request raises FileNotFoundError, FileExistsError (`if_absent`) or PermissionError. It raises
    ChangedError or ValueError if another attempt cannot help, and TransferError if it can. An error
    with an HTTP `status` or `code`, or of obstore or botocore, means the same (`errors.meaning`).
    Any other error is tried again.

    A process makes a storage for each shard that it opens, and never closes one. So let them share
    a client, as `ObjectStorage` does. Split a URL at `://`: `urlsplit` finds no scheme in
    `my_package.MyStore://bucket/prefix`, because of its underscore.

    Args:
        root: the part of `url` with which all keys begin.
        part_bytes: of an upload.
        min_rate: bytes per second.
        request_seconds: time limit of a request, besides the time for its bytes.
        patience_seconds: time limit of one operation with all its retries (None: the environment's
            `CLIP_TRAIN_S3_PATIENCE_SECONDS`, or a minute).
    """

    def __init__(
        self,
        url: str,
        root: str,
        *,
        part_bytes: int = PART_BYTES,
        min_rate: int = MIN_RATE,
        request_seconds: float = REQUEST_SECONDS,
        patience_seconds: float | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.root = root.rstrip("/")
        self.part_bytes = part_bytes
        self.host = url.partition("://")[2].partition("/")[0]
        default = os.environ.get("CLIP_TRAIN_S3_PATIENCE_SECONDS", PATIENCE_SECONDS)
        self.patience = float(default if patience_seconds is None else patience_seconds)
        seconds = min(request_seconds, max(1.0, self.patience / _MIN_ATTEMPTS))
        key = "CLIP_TRAIN_S3_PATIENCE_SECONDS" if patience_seconds is None else ""
        self.pace = Pace(seconds, min_rate, total_seconds=self.patience, limit=key)

    @abstractmethod
    async def head(self, key: str, pace: Pace) -> Entry:
        """The object's present state, with its tag if the store has tags."""

    @abstractmethod
    async def get(
        self, key: str, begin: int, end: int | None, tag: str | None, pace: Pace
    ) -> bytes:
        """Exactly the bytes [begin, end) (None: to the end). ChangedError if the object's tag is
        not `tag` (None: any)."""

    @abstractmethod
    async def listing(self, folder: str, pace: Pace) -> builtins.list[Entry]:
        """All keys that begin with `folder`, or an error; never a part of them.

        Each entry has the time of its last change. If the store has none, use the present time:
        the caller may remove files that look old.
        """

    @abstractmethod
    async def put(self, key: str, source: bytes | Path, if_absent: bool, pace: Pace) -> object:
        """Store a small object by one request, or a file of any size (never with `if_absent`):
        completely or not at all."""

    @abstractmethod
    async def remove(self, keys: Sequence[str], pace: Pace) -> object:
        """Remove objects; a missing one is not an error."""

    async def distrust(self, key: str, tag: str | None) -> None:
        """Called if bytes of this object are not what they must be: read no copy of it again."""

    async def connect(self) -> None:
        """Called before each request: make sure that there is a client."""

    @property
    def server(self) -> str:
        """The host that requests are sent to, for messages."""
        return self.host.rpartition("@")[2]

    def renew(self, kind: Meaning, again: bool) -> bool:
        """Fetch credentials anew. Return whether another attempt may then succeed.

        kind: the class of the error. again: this operation has fetched them once already.
        """
        return False

    def start(self, what: str, request: Callable[[Pace], Awaitable[T]], pace: Pace) -> Future[T]:
        """Make the request on fsspec's event loop, which has a thread of its own."""
        return asyncio.run_coroutine_threadsafe(self._repeat(what, request, pace), get_loop())

    def wait(
        self, what: str, request: Callable[[Pace], Awaitable[T]], pace: Pace | None = None
    ) -> T:
        """Make the request on the event loop's thread, and wait. Signal handlers run meanwhile."""
        future = self.start(what.strip(), request, pace or self.pace)
        try:
            return future.result()
        finally:
            future.cancel()  # has an effect only if a signal handler has raised

    async def _repeat(self, what: str, request: Callable[[Pace], Awaitable[T]], pace: Pace) -> T:
        """Return the result of `request`, with retries. StorageError with the URL, `what`, the
        reason and the remedy."""
        end = time.monotonic() + (pace.total_seconds or 0.0)
        renewed = False
        for attempt in itertools.count(1):
            try:
                await self.connect()
                answer = await request(pace)
                reached.add(self.host)
                return answer
            except Exception as e:
                kind = meaning(e)
                left = end - time.monotonic()
                count = ""
                if pace.total_seconds is None:
                    count = f", attempt {attempt} of {pace.attempts}"
                scheme = self.url.partition("://")[0]
                reason = describe_error(e, scheme) + describe_route(e, self.server)
                message = redact(f"{self.url}: {what}{count}: {reason}")
                may_help = kind == "again"  # another attempt
                if kind == "unreachable":  # the URL may be wrong
                    may_help = attempt < LOUD_ATTEMPT or self.host in reached
                if kind in ("denied", "expired"):
                    may_help = await asyncio.to_thread(self.renew, kind, renewed)
                    renewed = True
                is_silent = pace.total_seconds is not None and isinstance(e, TransferError)
                is_last = left <= 0 and (is_silent or attempt >= pace.attempts)
                if is_last or not may_help:
                    if kind == "again" and pace.limit:
                        message += f"; {pace.limit} limits the attempts"
                    raise RAISED.get(kind, StorageError)(message) from e
            level = logging.WARNING if attempt >= LOUD_ATTEMPT else logging.DEBUG
            _log.log(level, "%s; trying again", message)
            if pace.total_seconds is not None:  # the link may be slow
                patient = max(pace.seconds, min(4 * pace.seconds, left))
                pace = replace(pace, seconds=patient, rate=pace.rate / 4)
            longest = pace.backoff_seconds * 2.0 ** min(attempt - 1, 64)
            longest = min(LONGEST_BACKOFF_SECONDS, longest)
            # random, so that workers do not retry at the same time
            pause = _random.uniform(longest / 2, longest)
            await asyncio.sleep(min(pause, left) if left > 0 else pause)
        raise AssertionError("unreachable")

    def key(self, name: str) -> str:
        return "/".join(part for part in (self.root, checked_name(name)) if part)

    def read_bytes(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        if end is not None and start >= end:
            return b""
        return self.wait(f"reading {name}", partial(self.get, self.key(name), start, end, None))

    def list(self, prefix: str = "") -> list[Entry]:
        key = self.key(prefix).rstrip("/")
        folder = f"{key}/" if key else ""
        entries = self.wait(f"listing {prefix}", partial(self.listing, folder))
        cut = len(self.root) + 1 if self.root else 0  # characters before the name
        return sorted(Entry(entry.name[cut:], entry.size, entry.modified) for entry in entries)

    def size(self, name: str) -> int:
        return self.wait(f"looking at {name}", partial(self.head, self.key(name))).size

    def put_bytes(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        try:
            self.wait(f"writing {name}", partial(self.put, self.key(name), data, if_absent))
        except FileExistsError:
            # True: an attempt of this call stored it, and its answer was lost
            return self.read_bytes(name) == data
        return True

    def put_file(self, local_path: str | os.PathLike, name: str) -> None:
        size = os.stat(local_path).st_size
        self.wait(f"writing {name}", partial(self.put, self.key(name), Path(local_path), False))
        stored = self.size(name)
        if stored != size:
            raise OSError(errno.EIO, f"{self.url}/{name}: {stored} of {size} bytes are stored")

    def delete(self, *names: str) -> None:
        keys = [self.key(name) for name in names]
        self.wait(f"deleting {', '.join(names[:1])}", partial(self.remove, keys))

    def glob(self, pattern: str) -> builtins.list[str]:
        """URLs of the files whose names match, sorted. OSError, also if a folder is not listed."""
        regex = re.compile(glob_translate(pattern))
        names = [entry.name for entry in self.list()]
        folders = {name.rpartition("/")[0] for name in names}  # consoles make objects for folders
        return [f"{self.url}/{name}" for name in names if regex.match(name) and name not in folders]


async def collected(chunks: AsyncIterator[bytes], num_bytes: int, pace: Pace) -> bytes:
    """The chunks of an answer, joined. TransferError if they are not `num_bytes`, or come at less
    than the pace's rate on average, which an idle timeout would not notice."""
    received: list[bytes] = []
    count = 0  # bytes
    start = newest = time.monotonic()

    async def receive() -> None:
        nonlocal count, newest
        async for chunk in chunks:
            received.append(chunk)
            count += len(chunk)
            newest = time.monotonic()

    # one timeout for each chunk would cost a task each
    receiving = asyncio.ensure_future(receive())
    try:
        while not receiving.done():
            late = pace.seconds + (start + count / pace.rate if pace.rate else newest)
            left = late - time.monotonic()
            if left <= 0:
                elapsed = time.monotonic() - start
                raise TransferError(f"only {count} bytes within {elapsed:.3g} s{pace.keys}")
            await asyncio.wait([receiving], timeout=left)
        receiving.result()
    finally:
        receiving.cancel()
    return checked_length(b"".join(received), num_bytes)


def checked_length(data: bytes, num_bytes: int) -> bytes:
    """`data`. TransferError if its length is not `num_bytes`."""
    if len(data) != num_bytes:
        raise TransferError(f"received {len(data)} bytes instead of {num_bytes}")
    return data
