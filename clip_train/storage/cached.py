"""`simplecache::URL` and `filecache::URL`: shards of another store, copied whole to a local folder when
they are first read.

fsspec's caches of these names write a copy in place, so another process may read half of it, and a
failed copy stays. Here a copy appears when it is whole, and one process of the machine makes it.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import fsspec

from clip_train.errors import UserError
from clip_train.storage.base import Entry, Storage
from clip_train.storage.errors import (
    ChangedError,
    DeniedError,
    Meaning,
    MissingError,
    StorageError,
    TransferError,
)
from clip_train.storage.remote import Pace, RemoteStorage, checked_length

RANGE_BYTES = 8 << 20  # of a request
PARALLEL = 4  # ranges of a file at a time
_LOOK_SECONDS = 0.1  # between looks at a copy that another process makes


class CachedStorage(RemoteStorage):
    """Reads whole files of another store from copies on this machine; writes nothing.

    The copies are in fsspec's `cache_storage` (`FSSPEC_SIMPLECACHE_CACHE_STORAGE`), by URL and
    ETag. Nothing here removes them.
    """

    def __init__(self, url: str, store: Storage, **limits: Any) -> None:
        """store: the one behind the cache. UserError if it is local, or without a folder."""
        kind, _, target = url.partition("::")
        if not isinstance(store, RemoteStorage):
            raise UserError(f"{url}: {target} is local already; leave {kind}:: out")
        variable = f"FSSPEC_{kind.upper()}_CACHE_STORAGE"
        folder = os.environ.get(variable) or fsspec.config.conf.get(kind, {}).get("cache_storage")
        if not isinstance(folder, str) or folder == "TMP":
            raise UserError(
                f"{url}: the copies need a folder on this machine's disk; set {variable}=/folder, "
                "or read without a cache"
            )
        super().__init__(url, store.root, **limits)
        self._variable = variable
        self.host = store.host
        self._store, self._folder, self._kind = store, Path(folder), kind
        self._copies: dict[tuple[str, str | None], Path] = {}  # by key and tag
        self._distrusted: set[tuple[str, str | None]] = set()  # these were copied anew once
        self._turn = asyncio.Lock()

    async def connect(self) -> None:
        await self._store.connect()

    @property
    def server(self) -> str:
        return self._store.server

    def renew(self, kind: Meaning, again: bool) -> bool:
        return self._store.renew(kind, again)

    async def head(self, key: str, pace: Pace) -> Entry:
        return await self._store.head(key, pace)

    async def listing(self, folder: str, pace: Pace) -> list[Entry]:
        return await self._store.listing(folder, pace)

    async def get(
        self, key: str, begin: int, end: int | None, tag: str | None, pace: Pace
    ) -> bytes:
        """The first range of a file copies all of it."""
        async with self._turn:  # ranges that are fetched ahead wait for the same copy
            if (key, tag) not in self._copies:
                self._copies[key, tag] = await self._copy(key, tag, pace)
            copy = self._copies[key, tag]
        try:
            data = await asyncio.to_thread(_read, copy, begin, end)
            return data if end is None else checked_length(data, end - begin)
        except FileNotFoundError as e:  # the store has the file: it is not missing
            self._copies.pop((key, tag), None)
            raise TransferError(f"its copy {copy} was removed") from e
        except TransferError:
            self._copies.pop((key, tag), None)
            raise

    async def distrust(self, key: str, tag: str | None) -> None:
        """Remove the copy, which the disk may have damaged; only once, since the object itself may be
        damaged."""
        async with self._turn:
            copy = self._copies.get((key, tag))
            if copy is not None and (key, tag) not in self._distrusted:
                self._distrusted.add((key, tag))
                del self._copies[key, tag]
                with self._writing():
                    copy.unlink(missing_ok=True)

    async def put(self, key: str, source: bytes | Path, if_absent: bool, pace: Pace) -> object:
        raise NotImplementedError(f"{self._kind}:: is for reading")

    async def remove(self, keys: Sequence[str], pace: Pace) -> object:
        raise NotImplementedError(f"{self._kind}:: is for reading")

    async def _copy(self, key: str, tag: str | None, pace: Pace) -> Path:
        """The local copy of the object's present content, made here or by another process."""
        head = await self._store.head(key, pace)
        if tag not in (None, head.tag):
            raise ChangedError(f"its ETag was {tag} when it was opened and is {head.tag}")
        content = f"{self._store.url} {key} {head.tag} {head.size}"
        copy = self._folder / hashlib.sha256(content.encode()).hexdigest()
        part = copy.with_suffix(".part")
        with self._writing():
            if _is_whole(copy, head.size):
                return copy
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = part.open("ab")
        with lock:
            # not a blocking lock: it would keep one of the threads that requests need
            while not _locked(lock):
                await asyncio.sleep(_LOOK_SECONDS)
            if _is_whole(copy, head.size):
                part.unlink(missing_ok=True)
                return copy
            with self._writing():
                part.touch()  # a process that waited before may have removed the name
                os.truncate(part, 0)
            try:
                await self._fill(part, key, head, pace)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.truncate(part, 0)  # a part of a shard is of no use, and may fill the disk
                raise
            with self._writing():
                os.replace(part, copy)
        return copy

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of the local disk into a ChangedError, since another attempt cannot help."""
        try:
            yield
        except OSError as e:
            raise ChangedError(
                f"it cannot be copied to {self._folder}: {e.strerror}; make room there, correct its "
                f"permissions, or name another folder in {self._variable}"
            ) from e

    async def _fill(self, part: Path, key: str, head: Entry, pace: Pace) -> None:
        """Write the object into the file, by ranges that are each repeated by themselves."""
        turns = asyncio.Semaphore(PARALLEL)
        range_pace = replace(pace, rate=pace.rate / PARALLEL)  # all of them share the link

        async def fetch(begin: int) -> None:
            end = min(head.size, begin + RANGE_BYTES)

            async def get(pace: Pace) -> bytes:
                return await self._store.get(key, begin, end, head.tag, pace)

            async with turns:
                data = await self._repeat(f"bytes {begin}-{end - 1}", get, range_pace)
                with self._writing():
                    await asyncio.to_thread(_write, part, begin, data)

        tasks = [asyncio.create_task(fetch(begin)) for begin in range(0, head.size, RANGE_BYTES)]
        try:
            await asyncio.gather(*tasks)
        except (MissingError, DeniedError):
            raise
        except StorageError as e:  # this range has had all of its attempts
            raise ChangedError(str(e)) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _locked(file: IO[bytes]) -> bool:
    """Whether this process has the lock now. The kernel releases it when the process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_whole(copy: Path, size: int) -> bool:
    """Whether a copy exists. After a power cut it may be there, and shorter."""
    try:
        return copy.stat().st_size == size
    except FileNotFoundError:
        return False


def _read(copy: Path, begin: int, end: int | None) -> bytes:
    with copy.open("rb") as file:
        file.seek(begin)
        return file.read(-1 if end is None else end - begin)


def _write(part: Path, begin: int, data: bytes) -> None:
    with part.open("r+b") as file:
        file.seek(begin)
        file.write(data)
