"""Read a file in numbered blocks; verify blocks by the checksums of an index; share blocks between
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
    """The latest blocks of files that several processes of a node read; each is fetched once.

    A slot is a file in memory: the bytes of one block, then its tag (a digest of file and block
    number). A slot is locked while it is filled. The kernel releases a lock when its process ends.
    A pickle holds the slots' paths under /proc, so the process that made the cache must live while
    others read.
    """

    def __init__(self, slots: int) -> None:
        descriptors = [os.memfd_create("clip-train-blocks") for _ in range(slots)]
        for number in descriptors:
            weakref.finalize(self, os.close, number)
        self._slots = [f"/proc/{os.getpid()}/fd/{number}" for number in descriptors]

    def load(self, name: str, block: int, end: int, start: Callable[[int], Future[bytes]]) -> bytes:
        """Return one block. Start to fetch the blocks after it, up to `end`, if no other process
        fetches them.

        Args:
            name: identifies the file and its content.
            start: begins to fetch a block. Its result may be an OSError.
        """
        for number in range(block + 1, min(end, block + 1 + len(self._slots) // 4)):
            slot, tag = self.slot(name, number)
            try:
                fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another process fills this slot
                slot.close()
                continue
            slot_tag = os.pread(slot.fileno(), len(tag), max(0, slot.seek(0, 2) - len(tag)))
            if slot_tag == tag:
                slot.close()
            else:
                start(number).add_done_callback(partial(_fill_slot, slot, tag))
        slot, tag = self.slot(name, block)
        with slot:
            fcntl.flock(slot, fcntl.LOCK_EX)
            content = slot.read()
            if content.endswith(tag):
                return content[: -len(tag)]
            fetched = start(block)
            data = fetched.result()
            _fill_slot(slot, tag, fetched)
            return data

    def slot(self, name: str, block: int) -> tuple[io.FileIO, bytes]:
        """The slot of this block, and the tag at the slot's end if the block is in it."""
        # the blocks of a file have successive slots, so that neighbors do not replace each other
        path = self._slots[(zlib.crc32(name.encode()) + block) % len(self._slots)]
        return io.FileIO(path, "r+"), hashlib.sha256(f"{name} {block}".encode()).digest()


def _fill_slot(slot: io.FileIO, tag: bytes, fetched: Future[bytes]) -> None:
    """Write the block into a locked slot, and unlock it by closing it."""
    with slot:
        if not fetched.cancelled() and fetched.exception() is None:
            slot.truncate(0)
            slot.seek(0)
            slot.write(fetched.result() + tag)


class BlockFile(io.RawIOBase):
    """A seekable stream for `io.BufferedReader`. It holds one block, which a subclass loads."""

    def __init__(self, url: str, size: int, block_bytes: int) -> None:
        self.url, self.size, self.block_bytes = url, size, block_bytes
        self._position = 0
        self._number = -1  # the number of the block in `_data`
        self._data = memoryview(b"")

    @abc.abstractmethod
    def _load(self, block: int) -> bytes:
        """Return all bytes of one block. OSError."""

    def bounds(self, block: int) -> tuple[int, int]:
        """The bytes [from, to) of a block."""
        return block * self.block_bytes, min(self.size, (block + 1) * self.block_bytes)

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer, at most up to the end of a block; 0 at the end of the file."""
        if self._position >= self.size:
            return 0
        block, offset = divmod(self._position, self.block_bytes)
        if block != self._number:
            self._number = -1
            self._data = memoryview(b"")  # freed before the next block is loaded
            self._data = memoryview(self._load(block))
            self._number = block
        data = self._data[offset : offset + len(buffer)]
        assert data, f"block {block} of {self.url} is shorter than it must be"
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
