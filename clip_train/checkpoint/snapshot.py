"""The only thing the training loop waits for: a copy of the state, in memory that the saver can read.

The copy is laid out as the safetensors file that it becomes, so the saver just writes bytes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clip_train.checkpoint import layout
from clip_train.protocols import Fragment

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


@dataclass(frozen=True)
class Plan:
    """What a file will hold and where; nothing is copied yet."""

    head: bytes  # the file's beginning, its length a multiple of 8
    places: list[tuple[int, Tensor]]  # byte offset in the file -> tensor, still the training's own
    num_bytes: int  # of the file


def plan_file(
    rank: int,
    fragments: Iterable[Fragment],
    rank_tensors: dict[str, Tensor],
    shared_tensors: dict[str, Tensor] | None = None,
) -> Plan:
    """One rank's file. ValueError for what a checkpoint cannot hold.

    shared_tensors: the same on all ranks; rank 0 alone keeps them.
    """
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for fragment in fragments:
        shape = tuple(int(n) for n in fragment.shape)
        if shapes.setdefault(fragment.name, shape) != shape:
            raise ValueError(f"{fragment.name}: two shapes, {shapes[fragment.name]} and {shape}")
        _check_lengths(fragment, shape)
        for slot, tensor in fragment.tensors.items():
            key = layout.fragment_key(fragment.name, slot, fragment.start)
            if key in tensors:
                raise ValueError(f"{fragment.name}: two fragments start at {fragment.start}")
            tensors[key] = tensor.detach()
    for name, tensor in rank_tensors.items():
        tensors[layout.rank_tensor_key(name)] = tensor.detach()
    for name, tensor in (shared_tensors or {}).items() if rank == 0 else ():
        tensors[layout.shared_tensor_key(name)] = tensor.detach()
    return lay_out(tensors, {"shapes": json.dumps(shapes)})


def _check_lengths(fragment: Fragment, shape: tuple[int, ...]) -> None:
    total = torch.Size(shape).numel()
    for slot, tensor in fragment.tensors.items():
        if tensor.dim() != 1 or fragment.start < 0 or fragment.start + tensor.numel() > total:
            raise ValueError(
                f"{fragment.name}: {slot} of shape {tuple(tensor.shape)} at {fragment.start} is no range of "
                f"the parameter's {total} elements"
            )
    if len({t.numel() for t in fragment.tensors.values()}) > 1:
        raise ValueError(f"{fragment.name}: slots of different lengths at {fragment.start}")


def lay_out(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Plan:
    """A safetensors file: 8 bytes with the header's length, a JSON header, the tensors end to end."""

    # the widest first, so that every tensor is aligned to its element; then the weights, which an export reads alone
    def place(key: str) -> tuple[int, bool, str]:
        return -tensors[key].element_size(), not key.startswith("param|"), key.partition("|")[0]

    order = sorted(tensors, key=place)  # and what follows in the model follows in the file
    header: dict[str, Any] = {"__metadata__": metadata}
    at, offsets = 0, {}
    for key in order:
        tensor = tensors[key]
        offsets[key], at = at, at + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offsets[key], at]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    head = len(encoded).to_bytes(8, "little") + encoded
    return Plan(head, [(len(head) + offsets[key], tensors[key]) for key in order], len(head) + at)


class SharedBuffer:
    """Host memory behind a file descriptor, which the saver is given; kept from save to save.

    Anonymous: nothing of it is left when both processes have gone, however they went. Pinned where the
    state lies on a GPU, so that the copy runs at the bus's speed.
    """

    def __init__(self, num_bytes: int, *, pin: bool) -> None:
        """OSError or MemoryError where the machine does not have it."""
        self.capacity = max(num_bytes, mmap.PAGESIZE)
        self.fd = _anonymous_file(self.capacity)
        self._map = mmap.mmap(self.fd, self.capacity)
        self._view = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = pin and _register(self._view)

    def fill(self, plan: Plan) -> None:
        """Copy the file that `plan` describes to the beginning. When it returns, training may go on."""
        assert plan.num_bytes <= self.capacity
        self._map[: len(plan.head)] = plan.head
        on_gpu = False
        for at, tensor in plan.places:
            if tensor.numel():
                # in one go: slicing and casting the view costs 5 us more for each of thousands of tensors
                place = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=at)
                place.view(tensor.shape).copy_(tensor, non_blocking=self._pinned)
                on_gpu |= tensor.is_cuda
        if on_gpu:
            torch.cuda.synchronize()

    def close(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._view.data_ptr())
            self._pinned = False
        os.close(self.fd)  # the mapping goes with the last tensor over it


def _anonymous_file(num_bytes: int) -> int:
    """Not in /dev/shm, which containers keep small."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("clip-train-snapshot", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as f:
            fd = os.dup(f.fileno())
    os.ftruncate(fd, num_bytes)
    return fd


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
