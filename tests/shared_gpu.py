"""One GPU for all ranks of a world, over gloo.

gloo copies CUDA tensors through pinned memory in all collectives that the project and its engines use, except in
messages between two ranks: these it would read from the GPU's address as if it were the host's.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

# The remaining memory is for the CUDA context of each process, which no allocator counts.
ALLOCATED = 0.9


def prepare(world_size: int) -> None:
    """In a new rank, before its process group exists."""
    torch.cuda.set_device(0)
    # several worlds run at the same time under pytest-xdist
    worlds = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.cuda.set_per_process_memory_fraction(ALLOCATED / (world_size * worlds))
    send_from_the_host()


def send_from_the_host() -> None:
    """In this process, `batch_isend_irecv` sends and receives copies in the CPU's memory."""
    on_the_host = torch_dist.batch_isend_irecv

    def batch_isend_irecv(ops: list[torch_dist.P2POp]) -> list[Any]:
        copies = [
            op.tensor.cpu()
            if op.op is torch_dist.isend
            else torch.empty_like(op.tensor, device="cpu")
            for op in ops
        ]
        works = on_the_host(
            [
                torch_dist.P2POp(op.op, copy, op.peer, op.group, op.tag)
                for op, copy in zip(ops, copies, strict=True)
            ]
        )
        received = [
            (op.tensor, copy)
            for op, copy in zip(ops, copies, strict=True)
            if op.op is torch_dist.irecv
        ]
        return [*works, Received(received)]

    torch_dist.batch_isend_irecv = batch_isend_irecv


class Received:
    """The last work of a batch: copies what has arrived to its device."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]):
        self.pairs = pairs

    def wait(self) -> None:
        for target, copy in self.pairs:
            target.copy_(copy)
