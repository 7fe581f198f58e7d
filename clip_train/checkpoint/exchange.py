"""Where ranks share no disk: each gives the others what they need of its share of a checkpoint's files.

Nobody holds more of it in memory than two windows; what arrives lies in a file without a name, on the rank's disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from clip_train import dist
from clip_train.checkpoint.disk import check_space, free_bytes
from clip_train.checkpoint.files import SparseFile
from clip_train.checkpoint.shares import Range, Ranges, common, length, merged, without
from clip_train.storage import LocalStorage

WINDOW_BYTES = 64 << 20  # sent and received by a rank at once
Pieces = list[tuple[int, int, int]]  # file, start, end


class Exchange:
    """The shares of one checkpoint's files.

    files: this rank's view of them. held: [rank][file] -> the bytes that it has verified; the same on all ranks.
    """

    def __init__(
        self, local: LocalStorage, files: Sequence[SparseFile], held: Sequence[Mapping[int, Sequence[Range]]]
    ) -> None:
        self._local, self._files = local, files
        self._held = [{i: merged(ranges) for i, ranges in each.items()} for each in held]

    def holds(self, file: int, rank: int) -> bool:
        """Whether `rank` has the beginning of a file."""
        return self._held[rank].get(file, [(1, 1)])[0][0] == 0

    def prepare(self, wanted: Mapping[int, Ranges]) -> None:
        """Called by all ranks: file -> what this one is going to read. CheckpointError, on all ranks."""
        here, world_size = dist.rank(), dist.world_size()
        missing = {i: gaps for i, ranges in wanted.items() if (gaps := without(ranges, self._files[i].have))}
        everyone = dist.gather_objects(missing)
        needed = sum(length(ranges) for ranges in missing.values())
        if dist.any_rank(needed > 0):
            dist.agreed(lambda: check_space(self._local.root, needed, free_bytes(self._local.root)))
        sending = [self._pieces(here, everyone[rank]) for rank in range(world_size)]
        receiving = [self._pieces(rank, missing) for rank in range(world_size)]
        window = max(WINDOW_BYTES // world_size, 1 << 16)  # bytes to or from one rank at a time
        longest = max(sum(end - start for _, start, end in pieces) for pieces in [*sending, *receiving])
        error: Exception | None = None
        outgoing = [_windows(pieces, window) for pieces in sending]
        incoming = [_windows(pieces, window) for pieces in receiving]
        for _ in range(int(dist.max_scalar(-(-longest // window)))):
            leaving, arriving = [next(each) for each in outgoing], [next(each) for each in incoming]
            packed = torch.empty(sum(map(_length, leaving)), dtype=torch.uint8)
            try:
                self._pack(packed, leaving)
            except Exception as e:  # the others count on the bytes; that they are worthless is told at the end
                error = error or e
            arrived = dist.all_to_all(packed, [*map(_length, leaving)], [*map(_length, arriving)])
            try:
                self._unpack(arrived, arriving)
            except Exception as e:
                error = error or e
        dist.raise_agreed(error)
        for pieces in receiving:
            for i, start, end in pieces:
                self._files[i].note([(start, end)])

    def _pieces(self, holder: int, missing: Mapping[int, Ranges]) -> Pieces:
        """What `holder` gives to a rank that misses this."""
        held = self._held[holder]
        return [(i, a, b) for i in sorted(missing) if i in held for a, b in common(missing[i], held[i])]

    def _pack(self, out: torch.Tensor, leaving: list[Pieces]) -> None:
        at = 0
        for i, start, end in (piece for pieces in leaving for piece in pieces):
            data = self._files[i].read(start, end)
            out[at : at + end - start] = torch.frombuffer(data, dtype=torch.uint8)
            at += end - start

    def _unpack(self, arrived: torch.Tensor, arriving: list[Pieces]) -> None:
        data, at = arrived.numpy().data, 0
        for i, start, end in (piece for pieces in arriving for piece in pieces):
            self._files[i].put(start, data[at : at + end - start])
            at += end - start


def _length(pieces: Pieces) -> int:
    return sum(end - start for _, start, end in pieces)


def _windows(pieces: Pieces, window: int) -> Iterator[Pieces]:
    """`pieces` cut into parts of `window` bytes (the last has fewer), and then empty ones without end."""
    part: Pieces = []
    left = window
    for i, start, end in pieces:
        at = start
        while at < end:
            upto = min(end, at + left)
            part.append((i, at, upto))
            left -= upto - at
            at = upto
            if left == 0:
                yield part
                part, left = [], window
    yield part
    while True:
        yield []
