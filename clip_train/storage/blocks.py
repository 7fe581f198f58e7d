"""A file read in numbered blocks, and the checksums that an index keeps of them."""

import abc
import hashlib
import io
import os
from dataclasses import dataclass
from typing import Any

SUM_DIGITS = 16  # hexadecimal: 64 bits of the block's sha256, against accidents, not forgers


@dataclass(frozen=True)
class Checksums:
    """What a file must be: its size, and the sum of every `block_bytes` (the last are fewer)."""

    size: int  # bytes
    block_bytes: int
    sums: str  # SUM_DIGITS for each block, one after another

    def __post_init__(self) -> None:
        if len(self.sums) != SUM_DIGITS * -(-self.size // self.block_bytes):
            raise ValueError(f"{len(self.sums)} digits are not the sums of {self.size} bytes")

    def of(self, block: int) -> str:
        return self.sums[SUM_DIGITS * block :][:SUM_DIGITS]


def block_sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:SUM_DIGITS]


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
