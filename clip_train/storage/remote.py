"""What all remote stores share: names, patience and retries around single requests."""

import builtins
import errno
import os
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from fsspec.utils import glob_translate

from clip_train.storage.base import Entry, Storage, checked
from clip_train.storage.errors import TakenError, TransferError
from clip_train.storage.retry import Connection, Pace, Retry, run

T = TypeVar("T")

PART_BYTES = 8 << 20  # of an upload
MIN_RATE = 256 << 10  # bytes per second, of all parts together
REQUEST_SECONDS = 20.0
PATIENCE_SECONDS = 60.0
_MIN_ATTEMPTS = 3  # even if each took long, unless no answer came


class RemoteStorage(Storage):
    """A remote store: a subclass makes single requests, this class limits and repeats them.

    The abstract methods are the requests. They run on fsspec's event loop, keep to the `Pace` and
    may raise anything that `errors.meaning` understands. Their keys are whole: root and name.

    min_rate: bytes per second. request_seconds: of a request, besides what its bytes take.
    patience_seconds: of one operation with all its retries (None: the environment's
    `CLIP_TRAIN_S3_PATIENCE_SECONDS`, or a minute).
    """

    def __init__(
        self,
        url: str,
        root: str,
        *,
        connection: Connection | None = None,
        part_bytes: int = PART_BYTES,
        min_rate: int = MIN_RATE,
        request_seconds: float = REQUEST_SECONDS,
        patience_seconds: float | None = None,
    ) -> None:
        self.url, self.root, self.part_bytes = url.rstrip("/"), root.rstrip("/"), part_bytes
        self.connection = connection
        default = os.environ.get("CLIP_TRAIN_S3_PATIENCE_SECONDS", PATIENCE_SECONDS)
        self.patience = float(default if patience_seconds is None else patience_seconds)
        pace = Pace(min(request_seconds, max(1.0, self.patience / _MIN_ATTEMPTS)), min_rate)
        self._retry = Retry(self.url, pace, _MIN_ATTEMPTS, self.patience, connection=connection)

    @abstractmethod
    async def head(self, key: str, pace: Pace) -> Entry:
        """The object as it is now, with its tag if the store has such a thing."""

    @abstractmethod
    async def get(
        self, key: str, begin: int, end: int | None, tag: str | None, pace: Pace
    ) -> bytes:
        """Exactly the bytes [begin, end) (None: all); tag: of the object that it must still be."""

    @abstractmethod
    async def listing(self, folder: str, found: builtins.list[Entry], pace: Pace) -> None:
        """Append all keys that begin with `folder`. After an error it is called for the rest."""

    @abstractmethod
    async def put(self, key: str, data: bytes, if_absent: bool, pace: Pace) -> object:
        """Store a small object by one request."""

    @abstractmethod
    async def upload(self, key: str, file: Path, pace: Pace) -> object:
        """Store a file of any size."""

    @abstractmethod
    async def remove(self, keys: Sequence[str], pace: Pace) -> object:
        """Remove objects; a missing one is no error."""

    def ask(self, what: str, request: Callable[[Pace], Awaitable[T]]) -> T:
        """Make a request until it succeeds. OSError."""
        return run(self._retry(what, request))

    def key(self, name: str) -> str:
        return "/".join(part for part in (self.root, checked(name)) if part)

    def folder(self, prefix: str) -> str:
        """How the keys below a folder begin."""
        key = self.key(prefix).rstrip("/")
        return f"{key}/" if key else ""

    def read_bytes(self, name: str) -> bytes:
        return self.ask(f"reading {name}", partial(self.get, self.key(name), 0, None, None))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        if start >= end:
            return b""
        return self.ask(f"reading {name}", partial(self.get, self.key(name), start, end, None))

    def list(self, prefix: str = "") -> list[Entry]:
        found: builtins.list[Entry] = []
        request = partial(self.listing, self.folder(prefix), found)
        self.ask(f"listing {prefix}".strip(), request)
        cut = len(self.root) + 1 if self.root else 0
        return sorted(Entry(each.name[cut:], each.size, each.modified) for each in found)

    def size(self, name: str) -> int:
        return self.ask(f"looking at {name}", partial(self.head, self.key(name))).size

    def put_bytes(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        try:
            self.ask(f"writing {name}".strip(), partial(self.put, self.key(name), data, if_absent))
        except TakenError:
            return self.read_bytes(name) == data  # an attempt of ours whose answer was lost
        return True

    def put_file(self, local_path: str | os.PathLike, name: str, *, move: bool = False) -> None:
        size = os.stat(local_path).st_size
        self.ask(f"writing {name}".strip(), partial(self.upload, self.key(name), Path(local_path)))
        stored = self.size(name)
        if stored != size:
            raise OSError(errno.EIO, f"{self.url}/{name}: {stored} of {size} bytes are stored")
        if move:
            os.unlink(local_path)

    def delete(self, *names: str) -> None:
        keys = [self.key(name) for name in names]
        self.ask(f"deleting {', '.join(names[:1])}", partial(self.remove, keys))

    def glob(self, pattern: str) -> builtins.list[str]:
        """URLs of the files whose names match, sorted. OSError, also if a folder is not listed."""
        like = re.compile(glob_translate(pattern))
        names = [entry.name for entry in self.list()]
        folders = {name.rpartition("/")[0] for name in names}  # consoles make objects for them
        return [f"{self.url}/{name}" for name in names if like.match(name) and name not in folders]


def whole(data: bytes, num_bytes: int) -> bytes:
    if len(data) != num_bytes:
        raise TransferError(f"{len(data)} bytes came instead of {num_bytes}")
    return data
