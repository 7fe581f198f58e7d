"""Read a file in numbered blocks, verify them by an index's checksums, and share blocks between
processes."""

import abc
import fcntl
import hashlib
import io
import os
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

SUM_DIGITS = 16  # hexadecimal: 64 bits of the block's sha256, against accidents, not forgers


@dataclass(frozen=True)
class Checksums:
    """The expected content of a file: its size, and a checksum of every `block_bytes` (fewer in the
    last block)."""

    size: int  # bytes
    block_bytes: int
    sums: str  # SUM_DIGITS for each block, one after another

    def __post_init__(self) -> None:
        if len(self.sums) != SUM_DIGITS * -(-self.size // self.block_bytes):
            raise ValueError(f"{len(self.sums)} digits do not match a file of {self.size} bytes")

    def of(self, block: int) -> str:
        return self.sums[SUM_DIGITS * block :][:SUM_DIGITS]


def block_sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:SUM_DIGITS]


class BlockCache:
    """The latest blocks of a file that processes of a node read together: each is fetched once.

    A slot is a file in memory: one block, and the digest of its identity. It is locked while it is
    filled. Locks end with their process. The memory ends with the process that made it, which must
    live while others read, because a pickle holds the slots' paths under /proc.
    """

    def __init__(self, slots: int) -> None:
        descriptors = [os.memfd_create("clip-train-blocks") for _ in range(slots)]
        for number in descriptors:
            weakref.finalize(self, os.close, number)
        self._slots = [f"/proc/{os.getpid()}/fd/{number}" for number in descriptors]

    def load(self, name: str, block: int, end: int, start: Callable[[int], Future[bytes]]) -> bytes:
        """Return one block. Meanwhile, blocks after it, up to `end`, are fetched if no other
        process fetches them.

        Args:
            name: of the file and of its content.
            start: begins to fetch a block. OSError from its result.
        """
        for number in range(block + 1, min(end, block + 1 + len(self._slots) // 4)):
            slot, tag = self.slot(name, number)
            try:
                fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
                known = os.pread(slot.fileno(), len(tag), max(0, slot.seek(0, 2) - len(tag)))
            except BlockingIOError:
                known = tag  # soon
            if known == tag:
                slot.close()
            else:
                start(number).add_done_callback(partial(_keep, slot, tag))
        slot, tag = self.slot(name, block)
        with slot:
            fcntl.flock(slot, fcntl.LOCK_EX)
            kept = slot.read()
            if kept.endswith(tag):
                return kept[: -len(tag)]
            fetched = start(block)
            data = fetched.result()
            _keep(slot, tag, fetched)
            return data

    def slot(self, name: str, block: int) -> tuple[io.FileIO, bytes]:
        """The slot where this block may be, and the digest at the slot's end if it is there."""
        # neighbors have places of their own, mostly also where one file follows another
        path = self._slots[(zlib.crc32(name.encode()) + block) % len(self._slots)]
        return io.FileIO(path, "r+"), hashlib.sha256(f"{name} {block}".encode()).digest()


def _keep(slot: io.FileIO, tag: bytes, fetched: Future[bytes]) -> None:
    """Fills a slot that is locked, and frees it."""
    with slot:
        if not fetched.cancelled() and fetched.exception() is None:
            slot.truncate(0)
            slot.seek(0)
            slot.write(fetched.result() + tag)


class BlockFile(io.RawIOBase):
    """A seekable stream for `io.BufferedReader`; a subclass loads block k. Holds one block."""

    def __init__(self, url: str, size: int, block_bytes: int) -> None:
        self.url, self.size, self.block_bytes = url, size, block_bytes
        self._position = 0
        self._number = -1  # of the block in `_data`
        self._data = memoryview(b"")

    @abc.abstractmethod
    def _load(self, block: int) -> bytes:
        """Return the whole of one block. OSError."""

    def bounds(self, block: int) -> tuple[int, int]:
        """The bytes [from, to) of a block."""
        return block * self.block_bytes, min(self.size, (block + 1) * self.block_bytes)

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer, at most up to the end of a block; 0 at the end of the file."""
        if self._position >= self.size:
            return 0
        block, begin = divmod(self._position, self.block_bytes)
        if block != self._number:
            self._number, self._data = -1, memoryview(b"")  # freed before the next one comes
            self._data = memoryview(self._load(block))
            self._number = block
        piece = self._data[begin : begin + len(buffer)]
        assert piece, f"block {block} of {self.url} is shorter than it must be"
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
