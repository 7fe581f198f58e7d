"""A rank's state as a safetensors file: planned, copied to memory that the checkpoint writer reads, and read back.

The copy is the only thing that the training loop waits for. It is laid out as the file that it becomes, in memory that
is allocated, touched and pinned before the first save. Any cut is read back at any other, bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clip_train.checkpoint import manifest
from clip_train.checkpoint.fetch import Block, CheckpointFiles, blocks_of
from clip_train.errors import CheckpointError, UserError
from clip_train.protocols import EMA, Fragment, Wanted

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
    fragments, tensors = list(fragments), {}
    shapes: dict[str, tuple[int, ...]] = {}
    for fragment in fragments:
        shape = tuple(int(n) for n in fragment.shape)
        if shapes.setdefault(fragment.name, shape) != shape:
            raise ValueError(f"{fragment.name}: two shapes, {shapes[fragment.name]} and {shape}")
        if len({tensor.numel() for tensor in fragment.tensors.values()}) > 1:
            raise ValueError(f"{fragment.name}: slots of different lengths at {fragment.start}")
        for slot, tensor in fragment.tensors.items():
            if (
                tensor.dim() != 1
                or fragment.start < 0
                or fragment.start + tensor.numel() > math.prod(shape)
            ):
                raise ValueError(
                    f"{fragment.name}: {slot} of shape {tuple(tensor.shape)} at {fragment.start} is no range of "
                    f"the parameter's {math.prod(shape)} elements"
                )
            key = manifest.fragment_key(fragment.name, slot, fragment.start)
            if key in tensors:
                raise ValueError(f"{fragment.name}: two fragments start at {fragment.start}")
            tensors[key] = tensor.detach()
    for name, tensor in rank_tensors.items():
        tensors[manifest.RANK_KEY + name] = tensor.detach()
    for name, tensor in (shared_tensors or {}).items() if rank == 0 else ():
        tensors[manifest.SHARED_KEY + name] = tensor.detach()
    plan = lay_out(tensors, {"shapes": json.dumps(shapes)})
    plan.fragments["shapes"] = shapes
    for fragment in fragments:
        row: list[tuple[str, str, int]] = []
        for slot in fragment.tensors:
            key = manifest.fragment_key(fragment.name, slot, fragment.start)
            dtype, (numel,), offset = plan.fragments["tensors"].pop(key)
            row.append((slot, dtype, offset))
        if row and numel:
            plan.fragments["rows"].append((fragment.name, fragment.start, numel, row))
    return plan


def lay_out(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Plan:
    """A safetensors file: 8 bytes with the header's length, a JSON header, the tensors end to end."""

    # the widest first, so that every tensor is aligned to its element; then the weights, which an export reads alone
    def place(key: str) -> tuple[int, bool, str]:
        return -tensors[key].element_size(), not key.startswith("param|"), key.partition("|")[0]

    order = sorted(tensors, key=place)  # and what follows in the model follows in the file
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for key in order:
        tensor, begin = tensors[key], at
        at += tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, at],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    head = len(encoded).to_bytes(8, "little") + encoded
    where = {
        key: (
            header[key]["dtype"],
            header[key]["shape"],
            len(head) + header[key]["data_offsets"][0],
        )
        for key in order
    }
    places = [(where[key][2], tensors[key]) for key in order]
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    return Plan(head, places, len(head) + at, {"shapes": {}, "rows": [], "tensors": where}, on_gpu)


class SharedMemory:
    """Host memory behind a file descriptor that the checkpoint writer has too; kept from save to save, it only grows.

    Anonymous: nothing of it is left when both processes have gone. Pinned for a GPU: then the copy runs at full speed.
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

    def reserve(self, plan: Plan, *, wait: bool = True) -> None:
        """Allocate, touch and pin, beside what goes on if not to `wait`. OSError or MemoryError where it waits."""
        reserved = self._thread.submit(self._reserve, plan)
        if wait:
            reserved.result()

    def _reserve(self, plan: Plan) -> None:
        if plan.num_bytes <= self.capacity:
            return
        self._unpin()
        size = -(-(plan.num_bytes + SPARE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.fd, size)
        # a new mapping: the old one goes with the last tensor over it
        self._map = memoryview(mmap.mmap(self.fd, size))
        self._view = torch.frombuffer(self._map, dtype=torch.uint8)
        self._view[:: mmap.PAGESIZE] = 0  # a page fault costs more than copying the page
        self.capacity = size
        self._pinned = plan.on_gpu and _register(self._view)

    def fill(self, plan: Plan) -> None:
        """Copy the file that `plan` describes to its start. When it returns, training may go on."""
        assert plan.num_bytes <= self.capacity
        self._map[: len(plan.head)] = plan.head
        for at, tensor in plan.places:
            if tensor.numel():
                # in one go: slicing and casting the view costs 5 us more for each of thousands of tensors
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
        # It stays CUDA's last error, which the check after the training's next kernel would raise: one of ours has it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
    return status == 0


def _natural(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a size")
    return number


LARGEST_LAYOUT = 2**32  # bytes; 4,096 ranks of a model with 1,000 parameters have 2^28


class FragmentReader:
    """A `FragmentSource` over the files of one checkpoint, of which only those with something to read are opened.

    layout: LAYOUT. files: of all ranks, in their order. where: for messages.
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
            self._shapes: dict[str, tuple[int, ...]] = {
                name: tuple(shape) for name, shape in head["params"]
            }
            self._dtypes = [_TORCH[dtype] for _, dtype in head["kinds"]]
            self._slots = [slot for slot, _ in head["kinds"]]
            self._tensors: list[dict[str, Any]] = head["tensors"]
            shape = (4 + len(self._slots), _natural(head["rows"]))
            self._rows = np.frombuffer(data, np.int64, math.prod(shape), begin).reshape(shape)
            self._check_places()
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            zlib.error,
        ) as e:
            raise CheckpointError(
                f"{where}: its layout is not readable: {type(e).__name__}: {e}"
            ) from e
        cuts = np.searchsorted(self._rows[0], np.arange(len(self._shapes) + 1)).tolist()
        self._range = dict(
            zip(self._shapes, itertools.pairwise(cuts), strict=False)
        )  # name -> its rows, by start

    def _check_places(self) -> None:
        """ValueError where a fragment or a tensor does not lie within its parameter or its file."""
        sizes = np.array([entry.size for entry in self._files.entries], np.int64)
        numbers = [math.prod(map(_natural, shape)) for shape in self._shapes.values()]
        params, starts, numels, files, *offsets = self._rows
        for column, most in ((params, len(numbers)), (files, len(sizes))):
            if column.size and not (column.min() >= 0 and column.max() < most):
                raise ValueError("a fragment names a parameter or a file that there is not")
        ends = np.array(numbers, np.int64)[params] - numels
        if np.any((starts < 0) | (numels < 0) | (starts > ends)) or np.any(np.diff(params) < 0):
            raise ValueError("a fragment is not within its parameter")
        for column, dtype in zip(offsets, self._dtypes, strict=True):
            ends = sizes[files] - numels * dtype.itemsize
            if np.any((column < -1) | (column > np.maximum(ends, -1))):
                raise ValueError("a fragment is not within its file")
        for tensors, size in zip(self._tensors, sizes.tolist(), strict=True):
            for name, (kind, shape, at) in tensors.items():
                if _natural(at) + math.prod(map(_natural, shape)) * _TORCH[kind].itemsize > size:
                    raise ValueError(f"{name!r} is not within its file")

    def names(self) -> dict[str, tuple[int, ...]]:
        """Every parameter in the checkpoint with its shape."""
        return dict(self._shapes)

    def slots(self, name: str) -> set[str]:
        """What is stored of a parameter: "param" and, unless it was frozen, the optimizer's slots."""
        low, high = self._range.get(name, (0, 0))
        stored = np.any(self._rows[4:, low:high] >= 0, axis=1).tolist()
        return {slot for slot, there in zip(self._slots, stored, strict=True) if there}

    def _pieces(
        self, name: str, slot: str, start: int, end: int
    ) -> Iterator[tuple[int, int, int, int, torch.dtype]]:
        """What overlaps elements `[start, end)`: first element, the one after the last, file, byte offset, dtype."""
        low, high = self._range.get(name, (0, 0))
        starts = self._rows[1, low:high] if low < high else self._rows[:0]
        first = max(low, low + int(np.searchsorted(starts, start, side="right")) - 1)
        for row in range(first, low + int(np.searchsorted(starts, end, side="left"))):
            _, begin, numel, file, *offsets = map(int, self._rows[:, row])
            lower, upper = max(start, begin), min(end, begin + numel)
            for of, dtype, offset in zip(self._slots, self._dtypes, offsets, strict=True):
                if of == slot and offset >= 0 and lower < upper:
                    yield lower, upper, file, offset + (lower - begin) * dtype.itemsize, dtype

    def prepare(self, wanted: Iterable[Wanted]) -> None:
        """Collective: what this rank is going to read is verified and fetched now. CheckpointError, on all ranks."""
        blocks: set[Block] = set()
        for name, slot, start, numel in wanted:
            for lower, upper, file, at, dtype in self._pieces(name, slot, start, start + numel):
                blocks |= self._blocks(file, at, at + (upper - lower) * dtype.itemsize)
        self._files.prepare(blocks)

    def prepare_named(self, rank: int | None) -> None:
        """The same for `rank_tensors(rank)` (None: of no rank) and `shared_tensors()`."""
        blocks: set[Block] = set()
        for file, prefix in ((0, manifest.SHARED_KEY), (rank, manifest.RANK_KEY)):
            if file is not None:
                for _, at, end, _, _ in self._named_places(file, prefix):
                    blocks |= self._blocks(file, at, end)
        self._files.prepare(blocks)

    def _blocks(self, file: int, start: int, end: int) -> set[Block]:
        return {(file, number) for number in blocks_of(self._files.entries[file], start, end)}

    def read(self, name: str, slot: str, start: int, numel: int) -> Tensor:
        """Elements `[start, start + numel)` of the flattened parameter, [numel], in host memory.

        CheckpointError if the checkpoint has no such parameter or slot, or lacks a part of the range.
        """
        if name not in self._shapes:
            raise CheckpointError(f"{self._where}: no parameter {name!r} in this checkpoint")
        parts: list[Tensor] = []
        done, end = start, start + numel  # [start, done) is in `parts`
        for lower, upper, file, at, dtype in self._pieces(name, slot, start, end):
            if lower != done:
                break
            parts.append(
                self._files.read(file, at, at + (upper - lower) * dtype.itemsize).view(dtype)
            )
            done = upper
        if done < end:
            raise CheckpointError(
                f"{self._where}: {slot!r} of {name} {list(self._shapes[name])} lacks element {done}; "
                f"[{start}, {end}) was asked for, the checkpoint has {sorted(self.slots(name))}"
            )
        if not parts:
            return torch.empty(0)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def full_state(self, ema: bool = False) -> dict[str, Tensor]:
        """Every parameter whole, as in the model's state dict (fp32): for export and evaluation.

        ema: its moving average, where it has one (a frozen one has not). UserError where none has.
        """
        slots = {name: EMA if ema and EMA in self.slots(name) else "param" for name in self._shapes}
        if ema and EMA not in slots.values():
            raise UserError(
                f"--ema: {self._where} has no moving average, as optim.ema_decay was null; leave it out"
            )
        wanted = [
            Wanted(name, slots[name], 0, math.prod(shape)) for name, shape in self._shapes.items()
        ]
        self.prepare(wanted)
        return {each.name: self.read(*each).reshape(self._shapes[each.name]) for each in wanted}

    def rank_tensors(self, rank: int) -> dict[str, Tensor]:
        """What rank `rank` saved for itself (its random state)."""
        return self._named(rank, manifest.RANK_KEY)

    def shared_tensors(self) -> dict[str, Tensor]:
        """What was the same on all ranks (memory banks); readable on any number of them."""
        return self._named(0, manifest.SHARED_KEY)

    def _named_places(
        self, file: int, prefix: str
    ) -> Iterator[tuple[str, int, int, torch.dtype, list[int]]]:
        """name, the bytes' begin and end, dtype, shape"""
        if file >= len(self._tensors):
            raise CheckpointError(
                f"{self._where}: no file {manifest.rank_file(file)} in this checkpoint"
            )
        for key, (dtype, shape, at) in self._tensors[file].items():
            if key.startswith(prefix):
                kind = _TORCH[dtype]
                yield (
                    key.removeprefix(prefix),
                    at,
                    at + math.prod(shape) * kind.itemsize,
                    kind,
                    shape,
                )

    def _named(self, file: int, prefix: str) -> dict[str, Tensor]:
        # copies: the caller may keep them for long, and write to them
        return {
            name: self._files.read(file, at, end).view(dtype).reshape(shape).clone()
            for name, at, end, dtype, shape in self._named_places(file, prefix)
        }
