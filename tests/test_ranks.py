"""The ranks that tests start: where they compute, how they fail, and their messages when they share a GPU."""

from __future__ import annotations

import pytest
import torch

from clip_train import dist
from tests import devices, shared_gpu
from tests.ranks import RankFailedError, run_ranks
from tests.threads import run_threads


def test_an_unknown_device_is_refused_with_the_choices(monkeypatch):
    monkeypatch.setenv(devices.SWITCH, "gpu")
    with pytest.raises(ValueError, match=r"\(gpu\) must be one of cpu, cuda, cuda-shared"):
        run_ranks(dist.rank, 1)


@pytest.mark.parametrize("placed, gpus", [("cuda", 1), ("cuda-shared", 0)])
def test_too_few_gpus_skip_the_test(monkeypatch, placed, gpus):
    monkeypatch.setenv(devices.SWITCH, placed)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(pytest.skip.Exception, match=f"2 ranks \\({placed}\\) need"):
        run_ranks(dist.rank, 2)
    assert devices.accelerator() == "cuda"


def ring():
    """Everything that one message carries, after the replaced function has sent it."""
    shared_gpu.send_from_the_host()
    here, out = dist.rank(), []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        rows = 2 + here
        arriving = dist.pass_on(
            torch.full((rows, 3), here, dtype=dtype), 2 + (here - 1) % dist.world_size()
        )
        out.append(arriving().tolist())
    return out


def test_messages_of_ranks_that_share_a_gpu_go_through_the_host():
    for rank, received in enumerate(run_ranks(ring, 3)):
        before = (rank - 1) % 3
        assert received == [[[before] * 3] * (2 + before)] * 3


def fail_on_the_second():
    if dist.rank() == 1:
        raise ValueError("no")
    dist.barrier()


def numbers():
    return dist.rank(), dist.sum_scalars(dist.rank(), 1.0), dist.gather_objects(dist.rank())


def test_threads_are_ranks():
    expected = [(rank, [3.0, 3.0], [0, 1, 2]) for rank in range(3)]
    assert run_threads(numbers, 3) == expected == run_ranks(numbers, 3)


def test_a_thread_that_fails_ends_the_others():
    with pytest.raises(RankFailedError, match="rank 1") as failed:
        run_threads(fail_on_the_second, 3)
    assert failed.value.errors == {1: ("ValueError", "no")}
