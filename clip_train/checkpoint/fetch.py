"""The files of one checkpoint as a rank reads them: local copies, completed from the remote store.

Every block is verified before a byte of it is given out. Where all ranks see one folder, they share
hashing and fetching.
"""

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch
from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import READS, DamagedError, Found, in_parallel, readable
from clip_train.checkpoint.manifest import BLOCK_BYTES, FileEntry
from clip_train.errors import CheckpointError
from clip_train.storage.base import Storage

PARALLEL_BLOCKS = 4  # hashed or fetched at a time by one rank: 64 MiB
_PROGRESS_SECONDS = 10.0  # between lines about a fetch that takes long
Block = tuple[int, int]  # file (its place in the manifest), number in it


def fetch_block(storage: Storage, name: str, entry: FileEntry, number: int) -> bytes:
    """One block, verified. DamagedError, OSError."""
    start, end = entry.block_range(number)
    try:
        for _ in range(READS):
            data = storage.read_bytes(name, start, end)
            if hashlib.sha256(data).hexdigest() == entry.blocks[number]:
                return data
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing") from None
    raise DamagedError(
        f"{name} does not have its sha256 in bytes {start} to {end}: one has changed since"
    )


class CheckpointFiles:
    """One checkpoint's files.

    folder: where they are, or are fetched to. remote: where missing blocks come from; None:
    nowhere. shared: all ranks see `folder`, and what one of them fetches the others need not. log:
    takes how far a fetch is.
    """

    def __init__(
        self,
        found: Found,
        folder: Path,
        remote: Storage | None,
        *,
        shared: bool = True,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.entries = found.manifest.files
        self.fetched = 0  # bytes, by this rank
        self._counting = threading.Lock()
        self._found, self._folder, self._remote = found, folder, remote
        self._shared, self._log = shared, log
        self._ready: set[Block] = set()  # verified
        self._maps: dict[int, Tensor] = {}

    # -- reading

    def read(self, file: int, start: int, end: int) -> Tensor:
        """Bytes `[start, end)`, uint8 [end - start]; fetched if need be. CheckpointError."""
        if start == end:
            return torch.empty(0, dtype=torch.uint8)
        self.prepare([(file, start, end)])
        if file not in self._maps:
            entry = self.entries[file]
            path = self._folder / entry.name
            try:  # private: torch wants memory that it could write to; it holds no file descriptor
                self._maps[file] = torch.from_file(
                    str(path), shared=False, size=entry.size, dtype=torch.uint8
                )
            except (OSError, RuntimeError) as e:  # torch's own: it is gone, or shorter by now
                raise CheckpointError(f"{path}: {type(e).__name__}: {e}") from e
        return self._maps[file][start:end]

    def prepare(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Verify and fetch the blocks of byte ranges (file, start, end). It is too late to step
        back to an older checkpoint: CheckpointError, for damage too.
        """
        blocks = {
            (file, number)
            for file, start, end in ranges
            if start < end
            for number in range(start // BLOCK_BYTES, manifest.num_blocks(end))
        }
        try:
            self._verify(blocks)
        except DamagedError as e:
            raise CheckpointError(f"{e}; resume from an older one, or from another copy") from e

    # -- verifying and fetching

    def verify_all(self) -> None:
        """Every block is verified by some rank, or fetched by it. Collective.

        Where all ranks see one folder the files are in it afterwards. On all ranks: DamagedError;
        CheckpointError if one cannot read for another reason.
        """
        rank, world_size = dist.rank(), dist.world_size()
        blocks = [
            (file, number)
            for file, entry in enumerate(self.entries)
            for number in range(len(entry.blocks))
        ]
        mine = blocks[len(blocks) * rank // world_size : len(blocks) * (rank + 1) // world_size]
        if len(self.entries) == world_size:
            mine = [block for block in blocks if block[0] == rank]  # its own file

        why: str | None = None
        error: Exception | None = None
        try:
            self._verify(mine)
        except DamagedError as e:
            why = str(e)
        except Exception as e:
            error = e
        dist.raise_agreed(error)
        damaged = [each for each in dist.gather_objects(why) if each is not None]
        if damaged:
            raise DamagedError(damaged[0])
        if self._shared:
            self._ready.update(blocks)

    def _verify(self, blocks: Collection[Block]) -> None:
        """These are whole on this disk, or fetched. DamagedError, CheckpointError."""
        unknown = [block for block in blocks if block not in self._ready]
        before, began = self.fetched, time.monotonic()
        next_line = began + _PROGRESS_SECONDS

        for done, _ in enumerate(in_parallel(self._ensure, unknown, PARALLEL_BLOCKS), 1):
            now = time.monotonic()
            if self.fetched > before and now >= next_line and done < len(unknown):
                next_line, left = now + _PROGRESS_SECONDS, (now - began) * (len(unknown) / done - 1)
                self._log(
                    f"fetching the checkpoint of step {self._found.commit.step}: {done} of rank "
                    f"0's {len(unknown)} blocks of {BLOCK_BYTES >> 20} MiB, {left:.0f} s to go"
                )

    def _ensure(self, block: Block) -> None:
        """One block is whole on this disk, or fetched. DamagedError, CheckpointError."""
        file, number = block
        entry = self.entries[file]
        path, (start, end) = self._folder / entry.name, entry.block_range(number)
        data, problem = b"", "does not have its sha256: a byte has changed since it was written"
        with readable(str(self._folder)):
            try:
                with path.open("rb") as f:
                    f.seek(start)
                    data = f.read(end - start)
            except FileNotFoundError:
                problem = "is missing"
        if hashlib.sha256(data).hexdigest() == entry.blocks[number]:
            self._ready.add(block)
            return
        if self._remote is None:
            raise DamagedError(f"{path} {problem}")
        try:
            with readable(self._remote.url):
                name = f"{self._found.commit.prefix}/{entry.name}"
                data = fetch_block(self._remote, name, entry, number)
        except DamagedError as e:
            raise DamagedError(f"{self._remote.url}: {e}") from None
        try:
            _write_block(path, entry.size, start, data)
        except OSError as e:
            what, remedy = "cannot write at", "mend it, or set run.dir"
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                what, remedy = (
                    "the disk is full at",
                    "make room there, or lower checkpoint.keep_last",
                )
            where = f"{path}, to which the checkpoint of step {self._found.commit.step} is fetched"
            raise CheckpointError(f"{what} {where} ({type(e).__name__}: {e}): {remedy}") from e
        with self._counting:
            self.fetched += len(data)
            self._ready.add(block)


def _write_block(path: Path, size: int, start: int, data: bytes) -> None:
    """Write `data` at `start` of a file of `size` bytes, to which several ranks may write. OSError.

    A file that is not complete yet does not have its hashes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, size)
        done = 0
        while done < len(data):  # not through a map, where a full disk would end the process
            done += os.pwrite(fd, memoryview(data)[done:], start + done)
        os.fsync(fd)
    finally:
        os.close(fd)
