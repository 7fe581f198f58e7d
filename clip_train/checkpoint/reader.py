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
    CommittedCheckpoint,
    DamagedError,
    in_parallel,
    read_small,
    readable,
)
from clip_train.checkpoint.manifest import BLOCK_BYTES, FileBlock
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
    file: int  # index in `Manifest.files`
    first_byte: int  # bytes [first_byte, end_byte) of the file
    end_byte: int

    @property
    def blocks(self) -> slice:
        """The file's blocks that contain this extent."""
        return slice(self.first_byte // BLOCK_BYTES, -(-self.end_byte // BLOCK_BYTES))


@dataclass
class FragmentLayout:
    """LAYOUT, parsed and checked: where each fragment and tensor is in the files of all ranks."""

    shapes: dict[str, tuple[int, ...]]  # of every parameter
    kinds: list[tuple[str, torch.dtype]]  # slot, dtype
    rows: Any  # one structured array of the fragments, sorted by parameter and start
    tensors: list[dict[str, tuple[list[int], Extent]]]  # by file: shape and extent of other tensors


def _natural(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a size")
    return number


def parse_layout(layout: bytes, sizes: list[int]) -> FragmentLayout:
    """The inverse of `manifest.build_layout`. sizes: of the files, bytes.

    ValueError if a fragment or a tensor exceeds its parameter or its file. A forged layout may
    cause any other error.
    """
    unpacked = zlib.decompressobj()
    data = unpacked.decompress(layout, LARGEST_LAYOUT)
    if not unpacked.eof:
        raise ValueError(f"it is truncated, or larger than {LARGEST_LAYOUT} bytes")
    header_end = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:header_end])
    shapes = {name: tuple(shape) for name, shape in head["params"]}
    numels = np.array([math.prod(map(_natural, shape)) for shape in shapes.values()], np.int64)
    kinds = [(slot, _TORCH[dtype]) for slot, dtype in head["kinds"]]

    # LAYOUT's columns as one structured array, [num_rows]; `offsets` are bytes in the file, by kind
    num_rows = _natural(head["rows"])
    fields = ["param", "start", "numel", "file"]
    shape = (len(fields) + len(kinds), num_rows)
    columns = np.frombuffer(data, np.int64, math.prod(shape), header_end).reshape(shape)
    offsets = ("offsets", np.int64, (len(kinds),))
    rows = np.empty(num_rows, [*((field, np.int64) for field in fields), offsets])
    for field, column in zip(fields, columns, strict=False):
        rows[field] = column
    rows["offsets"] = columns[len(fields) :].T

    size = np.array(sizes, np.int64)
    for field, count in (("param", len(numels)), ("file", len(size))):
        if np.any((rows[field] < 0) | (rows[field] >= count)):
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

    extents: list[dict[str, tuple[list[int], Extent]]] = []
    for file, (tensors, num_bytes) in enumerate(zip(head["tensors"], sizes, strict=True)):
        extents.append({})
        for name, (dtype_name, tensor_shape, first_byte) in tensors.items():
            numel = math.prod(map(_natural, tensor_shape))
            dtype = _TORCH[dtype_name]
            end_byte = _natural(first_byte) + numel * dtype.itemsize
            if end_byte > num_bytes:
                raise ValueError(f"{name!r} is not within its file")
            extent = Extent(0, numel, dtype, file, first_byte, end_byte)
            extents[file][name] = (tensor_shape, extent)
    return FragmentLayout(shapes, kinds, rows, extents)


def fetch_block(storage: Storage, prefix: str, block: FileBlock) -> bytes:
    """One block, verified. DamagedError, OSError."""
    check = partial(manifest.verified, sha256=block.sha256)
    return read_small(storage, f"{prefix}/{block.name}", check, block.start, block.end)


class FragmentReader:
    """A `FragmentSource` over the files of one checkpoint; opens only files with something to read.

    Args:
        checkpoint: its manifest and layout.
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
        checkpoint: CommittedCheckpoint,
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
        self.path = str(folder)
        if remote is not None:
            self.path = f"{remote.url}/{checkpoint.commit.prefix}"
        self.fetched = 0
        self._checkpoint = checkpoint
        self._folder = folder
        self._remote = remote
        self._shared = shared
        self._log = log
        self._sizes = [entry.size for entry in checkpoint.manifest.files]
        self._blocks = manifest.blocks_of(checkpoint.manifest.files)
        self._ready: set[FileBlock] = set()  # verified
        self._maps: dict[int, Tensor] = {}  # by file: its mapped bytes, uint8
        try:
            layout = parse_layout(checkpoint.layout, self._sizes)
        except Exception as e:  # a forged layout may cause any error
            message = f"{self.path}: its layout is not readable: {type(e).__name__}: {e}"
            raise CheckpointError(message) from e
        self.shapes = layout.shapes
        self._kinds = layout.kinds
        self._tensors = layout.tensors
        cuts = np.searchsorted(layout.rows["param"], np.arange(len(self.shapes) + 1)).tolist()
        ranges = zip(self.shapes, itertools.pairwise(cuts), strict=True)
        self._rows = {name: layout.rows[low:high] for name, (low, high) in ranges}

    # -- verifying and fetching

    def verify_all(self) -> str | None:
        """Verify all blocks, or fetch them; each block by one rank. Collective.

        Returns a description of the damage, the same on all ranks. None means no damage; if all
        ranks share the folder, it then has the files. CheckpointError, on all ranks, if one rank
        cannot read for another reason.
        """
        rank, world_size = dist.rank(), dist.world_size()
        blocks = list(itertools.chain(*self._blocks))
        rank_blocks = blocks[
            len(blocks) * rank // world_size : len(blocks) * (rank + 1) // world_size
        ]
        if len(self._blocks) == world_size:
            rank_blocks = self._blocks[rank]  # the file that this rank wrote

        def find_damage() -> str | None:
            try:
                self._verify(rank_blocks)
            except DamagedError as e:
                return str(e)
            return None

        problems = dist.gather_objects(dist.agreed(find_damage))
        problem = next(filter(None, problems), None)
        if self._shared and problem is None:
            self._ready.update(blocks)
        return problem

    def _verify(self, blocks: Iterable[FileBlock]) -> None:
        """Verify these blocks on this disk, or fetch them. DamagedError, CheckpointError."""
        unverified = sorted({block for block in blocks if block not in self._ready})
        start = last_log = time.monotonic()
        for done, fetched in enumerate(in_parallel(self._ensure, unverified, PARALLEL_BLOCKS), 1):
            self.fetched += fetched
            now = time.monotonic()
            if now >= last_log + _PROGRESS_SECONDS and done < len(unverified):
                last_log = now
                left = (now - start) * (len(unverified) / done - 1)
                self._log(
                    f"reading the checkpoint of step {self._checkpoint.commit.step}: {done} of "
                    f"rank 0's {len(unverified)} blocks of {BLOCK_BYTES >> 20} MiB, {left:.0f} s "
                    "to go"
                )

    def _ensure(self, block: FileBlock) -> int:
        """Verify one block on this disk, or fetch it; returns the number of fetched bytes.

        DamagedError, CheckpointError.
        """
        path = self._folder / block.name
        data = b""
        problem = "does not match its sha256: a byte changed after it was written"
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
            data = fetch_block(self._remote, self._checkpoint.commit.prefix, block)
        try:
            _write_block(path, self._sizes[block.file], block.start, data)
        except OSError as e:
            raise CheckpointError(
                f"cannot write {path}, to which the checkpoint of step "
                f"{self._checkpoint.commit.step} is fetched ({type(e).__name__}: {e}): free space "
                "there, or set run.dir to another disk"
            ) from e
        self._ready.add(block)
        return len(data)

    # -- reading

    def slots(self, name: str) -> set[str]:
        """The stored slots of a parameter: "param" and, unless frozen, the optimizer's slots."""
        if name not in self._rows:
            return set()
        has_kind = np.any(self._rows[name]["offsets"] >= 0, axis=0).tolist()
        return {slot for (slot, _), stored in zip(self._kinds, has_kind, strict=True) if stored}

    def _extents(self, name: str, slot: str, start: int, end: int) -> Iterator[Extent]:
        """The stored parts of elements `[start, end)`, in their order. CheckpointError for an
        unknown parameter.
        """
        if name not in self._rows:
            raise CheckpointError(f"{self.path}: no parameter {name!r} in this checkpoint")
        rows = self._rows[name]
        first = max(int(np.searchsorted(rows["start"], start, side="right")) - 1, 0)
        stop = int(np.searchsorted(rows["start"], end, side="left"))
        # the columns of this slot: one for each dtype in which it is stored
        kinds = [
            (kind, dtype)
            for kind, (kind_slot, dtype) in enumerate(self._kinds)
            if kind_slot == slot
        ]
        for row in rows[first:stop]:
            row_start = int(row["start"])
            lower = max(start, row_start)
            upper = min(end, row_start + int(row["numel"]))
            for kind, dtype in kinds:
                offset = int(row["offsets"][kind])  # bytes; -1: the fragment has no such slot
                if offset >= 0 and lower < upper:
                    first_byte = offset + (lower - row_start) * dtype.itemsize
                    end_byte = first_byte + (upper - lower) * dtype.itemsize
                    yield Extent(lower, upper, dtype, int(row["file"]), first_byte, end_byte)

    def prepare(self, ranges: Iterable[StateRange]) -> None:
        """Verify and fetch the blocks that this rank will read. Collective; CheckpointError, on all
        ranks.
        """
        extents = (
            extent
            for name, slot, start, numel in ranges
            for extent in self._extents(name, slot, start, start + numel)
        )
        # a generator, so that an error of `_extents` is raised on all ranks
        blocks = (block for extent in extents for block in self._blocks_of(extent))
        dist.agreed(self._verify, blocks)

    def _blocks_of(self, extent: Extent) -> list[FileBlock]:
        return self._blocks[extent.file][extent.blocks]

    def read(self, name: str, slot: str, start: int, numel: int) -> Tensor:
        """Elements `[start, start + numel)` of the flattened parameter, [numel], in host memory.

        CheckpointError if the checkpoint has no such parameter or slot, or lacks a part of the
        range.
        """
        parts: list[Tensor] = []
        end = start + numel
        done = start  # [start, done) is in `parts`
        for extent in self._extents(name, slot, start, end):
            if extent.start != done:
                break
            parts.append(self._load(extent))
            done = extent.end
        if done < end:
            raise CheckpointError(
                f"{self.path}: {slot!r} of {name} {list(self.shapes[name])} lacks element "
                f"{done}; [{start}, {end}) was asked for, the checkpoint has "
                f"{sorted(self.slots(name))}"
            )
        if not parts:
            return torch.empty(0)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _load(self, extent: Extent) -> Tensor:
        """The elements of an extent, [numel]; verified and fetched if need be. CheckpointError."""
        if extent.first_byte == extent.end_byte:
            return torch.empty(0, dtype=extent.dtype)
        self._verify(self._blocks_of(extent))
        file = extent.file
        if file not in self._maps:
            path = self._folder / self._blocks[file][0].name
            try:
                # a private mapping: torch wants memory that it may write to. No descriptor stays
                # open.
                self._maps[file] = torch.from_file(
                    str(path), shared=False, size=self._sizes[file], dtype=torch.uint8
                )
            except (OSError, RuntimeError) as e:  # the file was removed, or is shorter by now
                raise CheckpointError(f"{path}: {type(e).__name__}: {e}") from e
        return self._maps[file][extent.first_byte : extent.end_byte].view(extent.dtype)

    def open_weights(
        self, ema: bool = False, here: bool = True
    ) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
        """Verify and fetch every parameter of the model's state dict. Returns tensors on `meta`
        with their shapes and types, and a function that reads one of them (fp32). Collective.

        ema: read the moving average of each parameter that has one (frozen parameters have none).
        here: False on a rank that only waits for the others. UserError if no parameter has an
        average; CheckpointError.
        """
        shapes = self.shapes if here else {}
        slots = dict.fromkeys(shapes, "param")
        if ema:
            slots |= {name: EMA for name in shapes if EMA in self.slots(name)}
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

        like = {}
        for name, shape in shapes.items():
            # the dtype is that of the first element
            first = self.read(name, slots[name], 0, min(1, math.prod(shape)))
            like[name] = torch.empty(shape, dtype=first.dtype, device="meta")
        return like, read

    def release(self) -> None:
        """Unmap the files: pages that were read count as this process's memory until then."""
        self._maps.clear()

    def tensors(self, rank: int | None = None) -> dict[str, Tensor]:
        """Tensors that rank `rank` saved for itself (its random state). None: tensors that were
        equal on all ranks (memory banks), which any number of ranks can read. CheckpointError.
        """
        file = 0  # rank 0's has the shared tensors
        prefix = manifest.SHARED_KEY
        if rank is not None:
            file = rank
            prefix = manifest.RANK_KEY
        tensors: dict[str, Tensor] = {}
        for key, (shape, extent) in self._tensors[file].items():
            if key.startswith(prefix):
                # a copy: the caller may keep it for long, and write to it
                tensors[key.removeprefix(prefix)] = self._load(extent).reshape(shape).clone()
        return tensors


def averaged(
    readers: Sequence[FragmentReader], ema: bool = False
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Like `FragmentReader.open_weights`, for the mean of these checkpoints (LAWA, model soups), in
    fp32 and one tensor at a time. Collective.

    It is a running mean, so a tensor that is equal in all checkpoints (frozen) stays equal to the
    bit. Integers come from the first checkpoint. Memory: two tensors for any number of checkpoints.
    ema: average the moving averages. UserError for models of different shapes; CheckpointError.
    """
    for reader in readers:
        if reader.shapes != readers[0].shapes:
            name, _ = min(reader.shapes.items() ^ readers[0].shapes.items())
            raise UserError(
                f"{reader.path} and {readers[0].path} hold different models ({name}): average "
                "checkpoints of one model"
            )
    opened = [reader.open_weights(ema) for reader in readers]
    like, read_first = opened[0]

    def read(name: str) -> Tensor:
        mean = read_first(name)
        if mean.is_floating_point():
            mean = mean.to(torch.float32, copy=True)
            for count, (_, read_other) in enumerate(opened[1:], 2):
                mean.lerp_(read_other(name).float(), 1 / count)
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
        while done < len(data):  # not through a mapping: on a full disk, that ends the process
            done += os.pwrite(fd, memoryview(data)[done:], start + done)
        os.fsync(fd)
    finally:
        os.close(fd)
