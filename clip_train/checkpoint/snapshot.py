"""A rank's state as a safetensors file: planned, copied to memory that the checkpoint writer reads,
and read back.

The copy is the only thing that the training loop waits for. It is laid out as the file that it
becomes, in memory that is allocated, touched and pinned before the first save. Any cut is read back
at any other, bit for bit.
"""

import contextlib
import itertools
import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import manifest
from clip_train.checkpoint.fetch import CheckpointFiles
from clip_train.errors import CheckpointError, UserError
from clip_train.task import EMA, Fragment, Wanted

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


_TORCH = {name: dtype for dtype, name in DTYPES.items()}
SPARE_BYTES = 1 << 20  # beside what is needed: a later header may be longer


@dataclass(frozen=True)
class Plan:
    """What a file will hold and where; nothing is copied yet."""

    head: bytes  # the start of the file, its length a multiple of 8
    places: list[tuple[int, Tensor]]  # byte offset in the file -> tensor, still the training's own
    num_bytes: int  # of the file
    fragments: dict[
        str, Any
    ]  # for the rank's manifest: `shapes`, `rows` of fragments, other `tensors`
    on_gpu: bool = False  # the tensors


def plan_file(
    rank: int,
    fragments: Iterable[Fragment],
    rank_tensors: dict[str, Tensor],
    shared_tensors: dict[str, Tensor] | None = None,
) -> Plan:
    """One rank's file. ValueError for what a checkpoint cannot hold.

    shared_tensors: the same on all ranks; rank 0 alone keeps them.
    """
    fragments = list(fragments)
    shapes = {each.name: tuple(int(n) for n in each.shape) for each in fragments}
    tensors: dict[str, Tensor] = {}
    for fragment in fragments:
        numel, start = math.prod(shapes[fragment.name]), fragment.start
        if len({tensor.numel() for tensor in fragment.tensors.values()}) > 1:
            raise ValueError(f"{fragment.name}: slots of different lengths at {start}")
        for slot, tensor in fragment.tensors.items():
            if tensor.dim() != 1 or start < 0 or start + tensor.numel() > numel:
                raise ValueError(
                    f"{fragment.name}: {slot} of shape {tuple(tensor.shape)} at {start} is not a "
                    f"range of the parameter's {numel} elements"
                )
            if "|" in slot or slot.startswith("@"):
                raise ValueError(f"an optimizer slot cannot be called {slot!r}")
            tensors[f"{slot}|{start}|{fragment.name}"] = tensor.detach()
    for name, tensor in rank_tensors.items():
        tensors[manifest.RANK_KEY + name] = tensor.detach()
    for name, tensor in (shared_tensors or {}).items() if rank == 0 else ():
        tensors[manifest.SHARED_KEY + name] = tensor.detach()
    plan = lay_out(tensors, {"shapes": json.dumps(shapes)})
    plan.fragments["shapes"] = shapes
    for fragment in fragments:
        row: list[tuple[str, str, int]] = []
        for slot in fragment.tensors:
            key = f"{slot}|{fragment.start}|{fragment.name}"
            dtype, (numel,), offset = plan.fragments["tensors"].pop(key)
            row.append((slot, dtype, offset))
        if row and numel:
            plan.fragments["rows"].append((fragment.name, fragment.start, numel, row))
    return plan


def lay_out(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Plan:
    """A safetensors file: 8 bytes with the header's length, a JSON header, the tensors."""

    def place(key: str) -> tuple[int, bool, str]:
        """The widest first, so that each is aligned to its element; then weights, for exports."""
        return -tensors[key].element_size(), not key.startswith("param|"), key.partition("|")[0]

    order = sorted(tensors, key=place)  # within a slot in the order of the model
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for key in order:
        tensor, begin = tensors[key], at
        at += tensor.numel() * tensor.element_size()
        dtype, shape = DTYPES[tensor.dtype], list(tensor.shape)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, at]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    head = len(encoded).to_bytes(8, "little") + encoded
    where: dict[str, tuple[str, list[int], int]] = {}  # dtype, shape, byte offset in the file
    for key in order:
        begin = len(head) + header[key]["data_offsets"][0]
        where[key] = (header[key]["dtype"], header[key]["shape"], begin)
    places = [(where[key][2], tensors[key]) for key in order]
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    return Plan(head, places, len(head) + at, {"shapes": {}, "rows": [], "tensors": where}, on_gpu)


class SharedMemory:
    """Host memory behind a file descriptor that the checkpoint writer has too; kept from save to
    save, it only grows.

    Anonymous: nothing of it is left when both processes have gone. Pinned for a GPU: then the copy
    runs at full speed.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create(
            "clip-train-snapshot", os.MFD_CLOEXEC
        )  # not in /dev/shm: containers keep it small
        self.capacity = 0  # bytes
        self._map = memoryview(b"")
        self._view = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        self._thread = ThreadPoolExecutor(
            1, initializer=lambda: torch.cuda.set_device(gpu)
        )  # -1: as it is

    def reserve(self, num_bytes: int, *, pin: bool = False) -> Future[None]:
        """Allocate, touch and pin, in a thread; the result may be an OSError or a MemoryError."""

        def grow() -> None:
            if num_bytes <= self.capacity:
                return
            self._unpin()
            size = -(-(num_bytes + SPARE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self.fd, size)
            # a new mapping: the old one goes with the last tensor over it
            self._map = memoryview(mmap.mmap(self.fd, size))
            self._view = torch.frombuffer(self._map, dtype=torch.uint8)
            self._view[:: mmap.PAGESIZE] = 0  # a page fault costs more than copying the page
            self.capacity = size
            self._pinned = pin and _register(self._view)

        return self._thread.submit(grow)

    def fill(self, plan: Plan) -> None:
        """Copy the file that `plan` describes to its start. When it returns, training may go on."""
        assert plan.num_bytes <= self.capacity
        self._map[: len(plan.head)] = plan.head
        for at, tensor in plan.places:
            if tensor.numel():
                # in one go: slicing and casting the view costs 5 us more for each of thousands of
                # tensors
                place = torch.frombuffer(
                    self._map, dtype=tensor.dtype, count=tensor.numel(), offset=at
                )
                place.view(tensor.shape).copy_(tensor, non_blocking=self._pinned)
        if plan.on_gpu:
            torch.cuda.synchronize()

    def close(self) -> None:
        self._thread.shutdown()
        self._unpin()
        self.capacity = 0
        os.close(self.fd)

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._view.data_ptr())
            self._pinned = False


def _register(view: Tensor) -> bool:
    """Pin memory that torch has not allocated; without it the copy is slower and still right."""
    try:
        status = int(torch.cuda.cudart().cudaHostRegister(view.data_ptr(), view.numel(), 0))
    except (AttributeError, RuntimeError):
        return False
    if status != 0:
        # It stays CUDA's last error, which the check after the training's next kernel would raise:
        # one of ours has it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
    return status == 0


def _natural(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a size")
    return number


LARGEST_LAYOUT = 2**32  # bytes; 4,096 ranks of a model with 1,000 parameters have 2^28


class Extent(NamedTuple):
    """Where a part of a tensor is."""

    start: int  # elements [start, end) of the flattened tensor
    end: int
    dtype: torch.dtype
    file: int  # its place in the manifest
    at: int  # bytes [at, stop) of the file
    stop: int


class FragmentReader:
    """A `FragmentSource` over the files of one checkpoint; opens only files with something to read.

    layout: LAYOUT. files: of all ranks, in their order. where: for messages.
    shapes: every parameter in the checkpoint with its shape.
    """

    def __init__(
        self, layout: bytes, files: CheckpointFiles, where: str = "the checkpoint"
    ) -> None:
        """CheckpointError if the layout is not readable."""
        self._files, self._where = files, where
        try:
            unpacked = zlib.decompressobj()
            data = unpacked.decompress(layout, LARGEST_LAYOUT)
            if not unpacked.eof:
                raise ValueError(f"it is cut, or more than {LARGEST_LAYOUT} bytes")
            begin = 8 + int.from_bytes(data[:8], "little")
            head = json.loads(data[8:begin])
            self.shapes = {name: tuple(shape) for name, shape in head["params"]}
            self._slots = [slot for slot, _ in head["kinds"]]
            self._dtypes = [_TORCH[dtype] for _, dtype in head["kinds"]]
            # of each file: those that are no fragments, with their shapes
            self._tensors: list[dict[str, tuple[list[int], Extent]]] = []
            # LAYOUT's columns (`manifest.build_layout`) as one structured array, [num_rows]
            num_rows, fields = _natural(head["rows"]), ["param", "start", "numel", "file"]
            shape = (len(fields) + len(self._slots), num_rows)
            columns = np.frombuffer(data, np.int64, math.prod(shape), begin).reshape(shape)
            # byte offset in the file of each slot and dtype
            offsets = ("offsets", np.int64, (len(self._slots),))
            self._rows = np.empty(num_rows, [*((field, np.int64) for field in fields), offsets])
            for field, column in zip(fields, columns, strict=False):
                self._rows[field] = column
            self._rows["offsets"] = columns[len(fields) :].T
            self._check_places(head["tensors"])
        except Exception as e:  # whatever a forged one leads to
            why = f"{where}: its layout is not readable: {type(e).__name__}: {e}"
            raise CheckpointError(why) from e
        cuts = np.searchsorted(self._rows["param"], np.arange(len(self.shapes) + 1)).tolist()
        ranges = zip(self.shapes, itertools.pairwise(cuts), strict=True)
        self._of = {name: self._rows[low:high] for name, (low, high) in ranges}  # sorted by start

    def _check_places(self, head_tensors: list[dict[str, Any]]) -> None:
        """ValueError if a fragment or a tensor is not within its parameter and its file."""
        rows = self._rows
        numels = [math.prod(map(_natural, shape)) for shape in self.shapes.values()]
        sizes = np.array([entry.size for entry in self._files.entries], np.int64)
        for field, most in (("param", len(numels)), ("file", len(sizes))):
            if np.any((rows[field] < 0) | (rows[field] >= most)):
                raise ValueError("a fragment names a parameter or a file that does not exist")
        last_start = np.array(numels, np.int64)[rows["param"]] - rows["numel"]
        inside = (rows["start"] >= 0) & (rows["numel"] >= 0) & (rows["start"] <= last_start)
        if not np.all(inside) or np.any(np.diff(rows["param"]) < 0):
            raise ValueError("a fragment is not within its parameter")
        for kind, dtype in enumerate(self._dtypes):
            offset = rows["offsets"][:, kind]  # -1: the fragment has no such slot
            last = sizes[rows["file"]] - rows["numel"] * dtype.itemsize
            if np.any((offset < -1) | (offset > np.maximum(last, -1))):
                raise ValueError("a fragment is not within its file")
        for file, (tensors, size) in enumerate(zip(head_tensors, sizes.tolist(), strict=True)):
            self._tensors.append({})
            for name, (kind, shape, at) in tensors.items():
                numel, dtype = math.prod(map(_natural, shape)), _TORCH[kind]
                stop = _natural(at) + numel * dtype.itemsize
                if stop > size:
                    raise ValueError(f"{name!r} is not within its file")
                self._tensors[file][name] = (shape, Extent(0, numel, dtype, file, at, stop))

    def slots(self, name: str) -> set[str]:
        """What is stored of a parameter: "param" and, unless frozen, the optimizer's slots."""
        if name not in self._of:
            return set()
        stored = np.any(self._of[name]["offsets"] >= 0, axis=0).tolist()
        return {slot for slot, there in zip(self._slots, stored, strict=True) if there}

    def _pieces(self, name: str, slot: str, start: int, end: int) -> Iterator[Extent]:
        """What overlaps elements `[start, end)`, in their order."""
        rows = self._of.get(name, self._rows[:0])
        first = max(int(np.searchsorted(rows["start"], start, side="right")) - 1, 0)
        stop = int(np.searchsorted(rows["start"], end, side="left"))
        kinds = [kind for kind, of in enumerate(self._slots) if of == slot]
        for row in rows[first:stop]:
            begin = int(row["start"])
            lower, upper = max(start, begin), min(end, begin + int(row["numel"]))
            for kind in kinds:
                offset, dtype = int(row["offsets"][kind]), self._dtypes[kind]
                if offset >= 0 and lower < upper:
                    at = offset + (lower - begin) * dtype.itemsize
                    stop = at + (upper - lower) * dtype.itemsize
                    yield Extent(lower, upper, dtype, int(row["file"]), at, stop)

    def prepare(self, wanted: Iterable[Wanted]) -> None:
        """Verify and fetch what this rank is going to read. Collective; CheckpointError, on all
        ranks.
        """
        ranges = (
            (piece.file, piece.at, piece.stop)
            for name, slot, start, numel in wanted
            for piece in self._pieces(name, slot, start, start + numel)
        )
        dist.agreed(self._files.prepare, ranges)

    def read(self, name: str, slot: str, start: int, numel: int) -> Tensor:
        """Elements `[start, start + numel)` of the flattened parameter, [numel], in host memory.

        CheckpointError if the checkpoint has no such parameter or slot, or lacks a part of the
        range.
        """
        if name not in self.shapes:
            raise CheckpointError(f"{self._where}: no parameter {name!r} in this checkpoint")
        parts: list[Tensor] = []
        done, end = start, start + numel  # [start, done) is in `parts`
        for piece in self._pieces(name, slot, start, end):
            if piece.start != done:
                break
            parts.append(self._files.read(piece.file, piece.at, piece.stop).view(piece.dtype))
            done = piece.end
        if done < end:
            raise CheckpointError(
                f"{self._where}: {slot!r} of {name} {list(self.shapes[name])} lacks element "
                f"{done}; [{start}, {end}) was asked for, the checkpoint has "
                f"{sorted(self.slots(name))}"
            )
        if not parts:
            return torch.empty(0)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def full_state(self, ema: bool = False) -> dict[str, Tensor]:
        """Every parameter whole, as in the model's state dict (fp32): for export and evaluation.

        ema: its moving average, if it has one (a frozen one has not). UserError if none has.
        """
        slots = {name: EMA if ema and EMA in self.slots(name) else "param" for name in self.shapes}
        if ema and EMA not in slots.values():
            raise UserError(
                f"--ema: {self._where} has no moving average, as optim.ema_decay was null; leave "
                "it out"
            )
        wanted = [
            Wanted(name, slots[name], 0, math.prod(shape)) for name, shape in self.shapes.items()
        ]
        self.prepare(wanted)
        return {each.name: self.read(*each).reshape(self.shapes[each.name]) for each in wanted}

    def tensors(self, rank: int | None = None) -> dict[str, Tensor]:
        """What rank `rank` saved for itself (its random state); None: what was the same on all
        ranks (memory banks), readable on any number of them. CheckpointError.
        """
        file, prefix = (0, manifest.SHARED_KEY) if rank is None else (rank, manifest.RANK_KEY)
        tensors: dict[str, Tensor] = {}
        for key, (shape, piece) in self._tensors[file].items():
            if key.startswith(prefix):
                # a copy: the caller may keep it for long, and write to it
                flat = self._files.read(file, piece.at, piece.stop).view(piece.dtype)
                tensors[key.removeprefix(prefix)] = flat.reshape(shape).clone()
        return tensors
