"""A rank's state as a safetensors file: its plan, and its copy for the checkpoint writer.

The training loop waits for this copy only. The copy has the layout of the file. Its memory is
allocated, touched and pinned before the first save.
"""

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from clip_train.checkpoint import manifest
from clip_train.storage.tensors import FilePlan, lay_out
from clip_train.task import Fragment

SPARE_BYTES = 1 << 20  # allocated beyond the first file's size: a later header may be longer


def plan_file(
    rank: int,
    fragments: Iterable[Fragment],
    rank_tensors: dict[str, Tensor],
    shared_tensors: dict[str, Tensor] | None = None,
) -> FilePlan:
    """Plan one rank's file. ValueError for a fragment that is not a range of its parameter.

    shared_tensors: the same on all ranks; rank 0 alone keeps them.
    """
    fragments = list(fragments)
    shapes = {fragment.name: tuple(int(n) for n in fragment.shape) for fragment in fragments}
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
    if rank == 0 and shared_tensors is not None:
        for name, tensor in shared_tensors.items():
            tensors[manifest.SHARED_KEY + name] = tensor.detach()
    plan = lay_out(tensors, {"shapes": json.dumps(shapes)})
    plan.fragments["shapes"] = shapes
    for fragment in fragments:
        slots: list[tuple[str, str, int]] = []  # slot, dtype, byte offset in the file
        for slot in fragment.tensors:
            key = f"{slot}|{fragment.start}|{fragment.name}"
            dtype, (numel,), offset = plan.fragments["tensors"].pop(key)
            slots.append((slot, dtype, offset))
        if slots and numel:
            plan.fragments["rows"].append((fragment.name, fragment.start, numel, slots))
    return plan


class SharedMemory:
    """Host memory behind a file descriptor that is shared with the checkpoint writer. It is kept
    between saves and only grows.

    The memory has no name, so it is freed when both processes have ended. It is pinned for a GPU,
    so that the copy runs at full speed.
    """

    def __init__(self) -> None:
        # not in /dev/shm: containers keep it small
        self.fd = os.memfd_create("clip-train-snapshot", os.MFD_CLOEXEC)
        self.capacity = 0  # bytes
        self._map = memoryview(b"")
        self._view = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        # the thread uses this process's GPU; -1 changes nothing
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        self._thread = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(gpu,))

    def reserve(self, num_bytes: int, *, pin: bool = False) -> Future[None]:
        """Allocate, touch and pin this memory, in a thread. The future may raise an OSError or a
        MemoryError."""

        def grow() -> None:
            if num_bytes <= self.capacity:
                return
            self._unpin()
            size = -(-(num_bytes + SPARE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self.fd, size)
            # a new mapping: the old one is unmapped with the last tensor over it
            self._map = memoryview(mmap.mmap(self.fd, size))
            self._view = torch.frombuffer(self._map, dtype=torch.uint8)
            self._view[:: mmap.PAGESIZE] = 0  # a page fault costs more than copying the page
            self.capacity = size
            self._pinned = pin and _register(self._view)

        return self._thread.submit(grow)

    def fill(self, plan: FilePlan) -> None:
        """Copy the planned file to the start of the memory. When this returns, the training loop
        may change the tensors."""
        assert plan.num_bytes <= self.capacity
        self._map[: len(plan.head)] = plan.head
        for offset, tensor in plan.contents:
            if tensor.numel():
                # one call: slicing and casting `_view` costs 5 us more for each of thousands of
                # tensors
                target = torch.frombuffer(
                    self._map, dtype=tensor.dtype, count=tensor.numel(), offset=offset
                )
                target.view(tensor.shape).copy_(tensor, non_blocking=self._pinned)
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
    """Pin memory that torch has not allocated. Returns False if it cannot be pinned: then the copy
    is slower."""
    try:
        status = int(torch.cuda.cudart().cudaHostRegister(view.data_ptr(), view.numel(), 0))
    except (AttributeError, RuntimeError):
        return False
    if status != 0:
        # The failure stays CUDA's last error, which is raised after the next kernel. Launch one
        # here, so that it is not raised in the training loop.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
    return status == 0
