"""The copy of the state where the machine has no memory to pin."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

from clip_train.checkpoint.snapshot import SharedMemory, plan_file


class FakeCuda:
    """CUDA's runtime under torch: a failed call leaves an error that the next kernel raises."""

    def __init__(self, status: int) -> None:
        self.status, self.last_error, self.kernels, self.registered = status, 0, 0, 0
        self._zeros = torch.zeros

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.last_error = self.status
        self.registered += self.status == 0
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.registered -= 1
        return 0

    def zeros(self, *shape: int, device: Any = None) -> torch.Tensor:
        if device == "cuda":
            self.kernels += 1
            error, self.last_error = self.last_error, 0
            if error:
                raise RuntimeError(f"CUDA error: {error}")
        return self._zeros(*shape)


@pytest.mark.parametrize("status", [0, 2, 712], ids=["pinned", "no memory", "registered already"])
def test_memory_that_cannot_be_pinned_is_copied_to_all_the_same(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    cuda = FakeCuda(status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch, "zeros", cuda.zeros)
    plan = dataclasses.replace(plan_file(0, [], {"rng": torch.arange(7)}), on_gpu=True)
    memory = SharedMemory()
    memory.reserve(plan.num_bytes, pin=True).result()
    assert cuda.last_error == 0 and (cuda.registered, cuda.kernels) == (
        (1, 0) if status == 0 else (0, 1)
    )
    memory.fill(dataclasses.replace(plan, on_gpu=False))
    ((at, tensor),) = plan.contents
    assert os.pread(memory.fd, tensor.numel() * 8, at) == tensor.numpy().tobytes()
    memory.close()
    assert cuda.registered == 0


def test_it_is_there_before_the_first_save_and_only_grows() -> None:
    memory = SharedMemory()
    plan = plan_file(0, [], {"rng": torch.arange(70_000)})
    memory.reserve(plan.num_bytes)
    memory.reserve(plan.num_bytes).result()
    held, blocks = memory.capacity, os.fstat(memory.fd).st_blocks
    assert held >= plan.num_bytes and 512 * blocks >= held, "its pages are allocated"
    memory.fill(plan)
    assert os.fstat(memory.fd).st_blocks == blocks
    memory.reserve(plan_file(0, [], {}).num_bytes).result()
    assert memory.capacity == held
    larger = plan_file(0, [], {"rng": torch.arange(700_000)})
    memory.reserve(larger.num_bytes).result()
    memory.fill(larger)
    ((at, tensor),) = larger.contents
    assert os.pread(memory.fd, tensor.numel() * 8, at) == tensor.numpy().tobytes()
    memory.close()
