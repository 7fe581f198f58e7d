"""Read any range of any parameter of a checkpoint, bit for bit, whatever layout wrote it.

A rank reads local files, completed from the remote store. Every block is verified before a byte of
it is returned. If all ranks see one folder, they share the hashing and fetching.
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import (
    DamagedError,
    Found,
    in_parallel,
    read_small,
    readable,
)
from clip_train.checkpoint.manifest import BLOCK_BYTES, Block
from clip_train.errors import CheckpointError, UserError
from clip_train.storage.base import Storage
from clip_train.storage.tensors import DTYPES
from clip_train.task import EMA, StateRange

LARGEST_LAYOUT = 2**32  # bytes; 4,096 ranks of a model with 1,000 parameters have 2^28
PARALLEL_BLOCKS = 4  # hashed or fetched at a time by one rank: 64 MiB
_PROGRESS_SECONDS = 10.0  # between lines about a fetch that takes long
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


class Extent(NamedTuple):
    """Where a part of a tensor is."""

    start: int  # elements [start, end) of the flattened tensor
    end: int
    dtype: torch.dtype
    file: int  # its place in the manifest
    at: int  # bytes [at, stop) of the file
    stop: int

    @property
    def blocks(self) -> slice:
        """The file's blocks that contain this extent."""
        return slice(self.at // BLOCK_BYTES, -(-self.stop // BLOCK_BYTES))


@dataclass
class Layout:
    """LAYOUT, read and checked: where everything is in the files of all ranks."""

    shapes: dict[str, tuple[int, ...]]  # of every parameter
    kinds: list[tuple[str, torch.dtype]]  # slot, dtype
    rows: Any  # one structured array of the fragments, sorted by parameter and start
    tensors: list[dict[str, tuple[list[int], Extent]]]  # for each file, without the fragments


def _natural(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a size")
    return number


def parse_layout(layout: bytes, sizes: list[int]) -> Layout:
    """The inverse of `manifest.build_layout`. sizes: of the files, bytes.

    ValueError if a fragment or a tensor exceeds its parameter or its file. A forged layout may
    cause any other error.
    """
    unpacked = zlib.decompressobj()
    data = unpacked.decompress(layout, LARGEST_LAYOUT)
    if not unpacked.eof:
        raise ValueError(f"it is truncated, or larger than {LARGEST_LAYOUT} bytes")
    begin = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:begin])
    shapes = {name: tuple(shape) for name, shape in head["params"]}
    numels = np.array([math.prod(map(_natural, shape)) for shape in shapes.values()], np.int64)
    kinds = [(slot, _TORCH[dtype]) for slot, dtype in head["kinds"]]

    # LAYOUT's columns as one structured array, [num_rows]; `offsets` are bytes in the file, by kind
    num_rows, fields = _natural(head["rows"]), ["param", "start", "numel", "file"]
    shape = (len(fields) + len(kinds), num_rows)
    columns = np.frombuffer(data, np.int64, math.prod(shape), begin).reshape(shape)
    offsets = ("offsets", np.int64, (len(kinds),))
    rows = np.empty(num_rows, [*((field, np.int64) for field in fields), offsets])
    for field, column in zip(fields, columns, strict=False):
        rows[field] = column
    rows["offsets"] = columns[len(fields) :].T

    size = np.array(sizes, np.int64)
    for field, most in (("param", len(numels)), ("file", len(size))):
        if np.any((rows[field] < 0) | (rows[field] >= most)):
            raise ValueError("a fragment names a parameter or a file that does not exist")
    last_start = numels[rows["param"]] - rows["numel"]
    inside = (rows["start"] >= 0) & (rows["numel"] >= 0) & (rows["start"] <= last_start)
    if not np.all(inside) or np.any(np.diff(rows["param"]) < 0):
        raise ValueError("a fragment is not within its parameter")
    for kind, (_, dtype) in enumerate(kinds):
        offset = rows["offsets"][:, kind]  # -1: the fragment has no such slot
        last = size[rows["file"]] - rows["numel"] * dtype.itemsize
        if np.any((offset < -1) | (offset > np.maximum(last, -1))):
            raise ValueError("a fragment is not within its file")

    whole: list[dict[str, tuple[list[int], Extent]]] = []
    for file, (tensors, num_bytes) in enumerate(zip(head["tensors"], sizes, strict=True)):
        whole.append({})
        for name, (kind, shape, at) in tensors.items():
            numel, dtype = math.prod(map(_natural, shape)), _TORCH[kind]
            stop = _natural(at) + numel * dtype.itemsize
            if stop > num_bytes:
                raise ValueError(f"{name!r} is not within its file")
            whole[file][name] = (shape, Extent(0, numel, dtype, file, at, stop))
    return Layout(shapes, kinds, rows, whole)


def fetch_block(storage: Storage, prefix: str, block: Block) -> bytes:
    """One block, verified. DamagedError, OSError."""
    check = partial(manifest.verified, sha256=block.sha256)
    return read_small(storage, f"{prefix}/{block.name}", check, block.start, block.end)


class FragmentReader:
    """A `FragmentSource` over the files of one checkpoint; opens only files with something to read.

    Args:
        folder: holds the files, or receives the fetched ones; None: a temporary folder per rank.
        remote: the source of missing blocks, if any.
        shared: all ranks see `folder`, so only one of them fetches each block.
        log: called with the progress of a fetch.

    Attributes:
        path: folder or URL of the checkpoint.
        shapes: the shape of every parameter, by name.
        fetched: bytes that this rank has fetched.
    """

    def __init__(
        self,
        found: Found,
        folder: Path | None,
        remote: Storage | None,
        *,
        shared: bool = True,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        """CheckpointError if the layout is not readable."""
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="clip-train-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = f"{remote.url}/{found.commit.prefix}" if remote is not None else str(folder)
        self.fetched = 0
        self._found, self._folder, self._remote = found, folder, remote
        self._shared, self._log = shared, log
        self._sizes = [entry.size for entry in found.manifest.files]
        self._blocks = manifest.blocks_of(found.manifest.files)
        self._ready: set[Block] = set()  # verified
        self._maps: dict[int, Tensor] = {}
        try:
            layout = parse_layout(found.layout, self._sizes)
        except Exception as e:  # whatever a forged one leads to
            why = f"{self.path}: its layout is not readable: {type(e).__name__}: {e}"
            raise CheckpointError(why) from e
        self.shapes, self._kinds, self._tensors = layout.shapes, layout.kinds, layout.tensors
        cuts = np.searchsorted(layout.rows["param"], np.arange(len(self.shapes) + 1)).tolist()
        ranges = zip(self.shapes, itertools.pairwise(cuts), strict=True)
        self._rows = {name: layout.rows[low:high] for name, (low, high) in ranges}

    # -- verifying and fetching

    def verify_all(self) -> str | None:
        """Each block is verified or fetched by one rank. Collective.

        Returns a description of the damage, the same on all ranks. None means no damage; if all
        ranks share the folder, it then has the files. CheckpointError, on all ranks, if one rank
        cannot read for another reason.
        """
        rank, world_size = dist.rank(), dist.world_size()
        blocks = list(itertools.chain(*self._blocks))
        mine = blocks[len(blocks) * rank // world_size : len(blocks) * (rank + 1) // world_size]
        if len(self._blocks) == world_size:
            mine = self._blocks[rank]  # its own file

        def damage() -> str | None:
            try:
                self._verify(mine)
            except DamagedError as e:
                return str(e)
            return None

        damaged = next(filter(None, dist.gather_objects(dist.agreed(damage))), None)
        if self._shared and damaged is None:
            self._ready.update(blocks)
        return damaged

    def _verify(self, blocks: Iterable[Block]) -> None:
        """These are whole on this disk, or fetched. DamagedError, CheckpointError."""
        unknown = sorted({block for block in blocks if block not in self._ready})
        start = said = time.monotonic()
        for done, fetched in enumerate(in_parallel(self._ensure, unknown, PARALLEL_BLOCKS), 1):
            self.fetched += fetched
            now = time.monotonic()
            if now >= said + _PROGRESS_SECONDS and done < len(unknown):
                said, left = now, (now - start) * (len(unknown) / done - 1)
                self._log(
                    f"reading the checkpoint of step {self._found.commit.step}: {done} of rank "
                    f"0's {len(unknown)} blocks of {BLOCK_BYTES >> 20} MiB, {left:.0f} s to go"
                )

    def _ensure(self, block: Block) -> int:
        """Verify one block on this disk, or fetch it; returns the number of fetched bytes.

        DamagedError, CheckpointError.
        """
        path = self._folder / block.name
        data, problem = b"", "does not match its sha256: a byte changed after it was written"
        with readable(str(self._folder)):
            try:
                with path.open("rb") as f:
                    f.seek(block.start)
                    data = f.read(block.end - block.start)
            except FileNotFoundError:
                problem = "is missing"
        if hashlib.sha256(data).hexdigest() == block.sha256:
            self._ready.add(block)
            return 0
        if self._remote is None:
            raise DamagedError(f"{path} {problem}; take an older checkpoint, or another copy of it")
        with readable(self._remote.url):
            data = fetch_block(self._remote, self._found.commit.prefix, block)
        try:
            _write_block(path, self._sizes[block.file], block.start, data)
        except OSError as e:
            raise CheckpointError(
                f"cannot write {path}, to which the checkpoint of step {self._found.commit.step} "
                f"is fetched ({type(e).__name__}: {e}): free space there, or set "
                "run.dir to another disk"
            ) from e
        self._ready.add(block)
        return len(data)

    # -- reading

    def slots(self, name: str) -> set[str]:
        """The stored slots of a parameter: "param" and, unless frozen, the optimizer's slots."""
        if name not in self._rows:
            return set()
        stored = np.any(self._rows[name]["offsets"] >= 0, axis=0).tolist()
        return {slot for (slot, _), there in zip(self._kinds, stored, strict=True) if there}

    def _pieces(self, name: str, slot: str, start: int, end: int) -> Iterator[Extent]:
        """The stored parts of elements `[start, end)`, in their order. CheckpointError for an
        unknown parameter.
        """
        if name not in self._rows:
            raise CheckpointError(f"{self.path}: no parameter {name!r} in this checkpoint")
        rows = self._rows[name]
        first = max(int(np.searchsorted(rows["start"], start, side="right")) - 1, 0)
        stop = int(np.searchsorted(rows["start"], end, side="left"))
        kinds = [(kind, dtype) for kind, (of, dtype) in enumerate(self._kinds) if of == slot]
        for row in rows[first:stop]:
            begin = int(row["start"])
            lower, upper = max(start, begin), min(end, begin + int(row["numel"]))
            for kind, dtype in kinds:
                offset = int(row["offsets"][kind])
                if offset >= 0 and lower < upper:
                    at = offset + (lower - begin) * dtype.itemsize
                    stop = at + (upper - lower) * dtype.itemsize
                    yield Extent(lower, upper, dtype, int(row["file"]), at, stop)

    def prepare(self, ranges: Iterable[StateRange]) -> None:
        """Verify and fetch the blocks that this rank will read. Collective; CheckpointError, on all
        ranks.
        """
        pieces = (
            piece
            for name, slot, start, numel in ranges
            for piece in self._pieces(name, slot, start, start + numel)
        )
        blocks = (block for piece in pieces for block in self._blocks[piece.file][piece.blocks])
        dist.agreed(self._verify, blocks)

    def read(self, name: str, slot: str, start: int, numel: int) -> Tensor:
        """Elements `[start, start + numel)` of the flattened parameter, [numel], in host memory.

        CheckpointError if the checkpoint has no such parameter or slot, or lacks a part of the
        range.
        """
        parts: list[Tensor] = []
        done, end = start, start + numel  # [start, done) is in `parts`
        for piece in self._pieces(name, slot, start, end):
            if piece.start != done:
                break
            parts.append(self._load(piece))
            done = piece.end
        if done < end:
            raise CheckpointError(
                f"{self.path}: {slot!r} of {name} {list(self.shapes[name])} lacks element "
                f"{done}; [{start}, {end}) was asked for, the checkpoint has "
                f"{sorted(self.slots(name))}"
            )
        if not parts:
            return torch.empty(0)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _load(self, piece: Extent) -> Tensor:
        """Its elements, flat; verified and fetched if need be. CheckpointError."""
        if piece.at == piece.stop:
            return torch.empty(0, dtype=piece.dtype)
        self._verify(self._blocks[piece.file][piece.blocks])
        if piece.file not in self._maps:
            path, size = self._folder / self._blocks[piece.file][0].name, self._sizes[piece.file]
            try:  # private: torch wants memory that it could write to; it holds no file descriptor
                data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
            except (OSError, RuntimeError) as e:  # torch's own: it is gone, or shorter by now
                raise CheckpointError(f"{path}: {type(e).__name__}: {e}") from e
            self._maps[piece.file] = data
        return self._maps[piece.file][piece.at : piece.stop].view(piece.dtype)

    def whole(
        self, ema: bool = False, here: bool = True
    ) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
        """Verify and fetch every parameter of the model's state dict. Returns tensors on `meta`
        with their shapes and types, and a function that reads one of them (fp32). Collective.

        ema: its moving average, if it has one (frozen parameters have none). here: False on a rank
        that only waits for the others. UserError if no parameter has an average; CheckpointError.
        """
        shapes = self.shapes if here else {}
        slots = {name: EMA if ema and EMA in self.slots(name) else "param" for name in shapes}
        if ema and EMA not in slots.values():
            raise UserError(
                f"--ema: {self.path} has no moving average, as optim.ema_decay was null; leave "
                "it out"
            )
        ranges = {
            name: StateRange(name, slots[name], 0, math.prod(shapes[name])) for name in shapes
        }
        self.prepare(ranges.values())

        def read(name: str) -> Tensor:
            return self.read(*ranges[name]).reshape(shapes[name])

        types = {
            each.name: self.read(each.name, each.slot, 0, min(1, each.numel)).dtype
            for each in ranges.values()
        }
        like = {
            name: torch.empty(shapes[name], dtype=types[name], device="meta") for name in shapes
        }
        return like, read

    def release(self) -> None:
        """Unmap the files: pages that were read count as this process's memory until then."""
        self._maps.clear()

    def tensors(self, rank: int | None = None) -> dict[str, Tensor]:
        """Tensors that rank `rank` saved for itself (its random state). None: tensors that were
        equal on all ranks (memory banks), which any number of ranks can read. CheckpointError.
        """
        file, prefix = (0, manifest.SHARED_KEY) if rank is None else (rank, manifest.RANK_KEY)
        tensors: dict[str, Tensor] = {}
        for key, (shape, piece) in self._tensors[file].items():
            if key.startswith(prefix):
                # a copy: the caller may keep it for long, and write to it
                tensors[key.removeprefix(prefix)] = self._load(piece).reshape(shape).clone()
        return tensors


def averaged(
    readers: Sequence[FragmentReader], ema: bool = False
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Like `FragmentReader.whole`, for the mean of these checkpoints (LAWA, model soups), in fp32
    and one tensor at a time. Collective.

    It is a running mean, so a tensor that is the same in all of them (frozen) stays the same to the
    bit. Integers come from the first. Memory: two tensors for any number of checkpoints. ema: the
    mean of their moving averages. UserError for checkpoints of models of different shapes;
    CheckpointError.
    """
    for reader in readers:
        if reader.shapes != readers[0].shapes:
            name, _ = min(reader.shapes.items() ^ readers[0].shapes.items())
            raise UserError(
                f"{reader.path} and {readers[0].path} hold different models ({name}): average "
                "checkpoints of one model"
            )
    (like, first), *others = [reader.whole(ema) for reader in readers]

    def read(name: str) -> Tensor:
        mean = first(name)
        if mean.is_floating_point():
            mean = mean.to(torch.float32, copy=True)
            for count, (_, other) in enumerate(others, 2):
                mean.lerp_(other(name).float(), 1 / count)
        for reader in readers:
            reader.release()
        return mean

    return like, read


def _write_block(path: Path, size: int, start: int, data: bytes) -> None:
    """Write `data` at `start` of a file of `size` bytes, to which several ranks may write. OSError.

    The hashes of an incomplete file do not match.
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
