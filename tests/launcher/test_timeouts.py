"""A collective's timeout can be shortened once the first step is done, in groups that exist
already."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

from clip_train import dist
from launcher.runtime.environment import RankEnv
from launcher.runtime.outcome import is_lost_contact
from launcher.runtime.rendezvous import form_group, set_timeout
from tests.launcher.conftest import until
from tests.ranks import run_ranks


def late_rank(awake: Path) -> bool | None:
    """On rank 0: whether it gave rank 1 up while that slept. The group's own timeout is 120 s, rank
    1 sleeps 70."""
    given_up = awake.with_name("given up")
    other = torch_dist.new_group([0, 1])
    dist.barrier()
    set_timeout(1)
    if dist.rank() == 1:
        if not until(given_up.exists, 70):
            awake.touch()
        return None
    try:
        torch_dist.all_reduce(torch.zeros(1), group=other)
    except RuntimeError as e:
        late = awake.exists()
        given_up.touch()
        return is_lost_contact(e) and not late
    return False


def slower_than_the_start(folder: Path) -> bool:
    """The group forms within 2 s, and later collectives may take 60: rank 1 comes 4 s late to one."""
    env = RankEnv(dist.rank(), 2, dist.rank(), 2, "127.0.0.1", 0, "this test")
    torch_dist.barrier()
    torch_dist.destroy_process_group()
    torch_dist.set_debug_level_from_env()  # as torch does when it is imported
    store = torch_dist.FileStore(str(folder / "store"), 2)
    form_group(env, torch.device("cpu"), store, 2.0, 60.0)
    set_timeout(60.0)
    if dist.rank() == 1:
        time.sleep(4)
    return dist.sum_scalars(1) == [2.0]


@pytest.mark.distributed
@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_a_slow_collective_is_waited_for(tmp_path, monkeypatch, level):
    """Under DETAIL, which one sets to look for a hang, each collective is checked by another group."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    assert run_ranks(slower_than_the_start, 2, tmp_path) == [True, True]


@pytest.mark.distributed
def test_a_rank_is_given_up_after_the_short_timeout(tmp_path):
    assert run_ranks(late_rank, 2, tmp_path / "awake")[0]


@pytest.mark.parametrize(
    "message, lost",
    [
        ("NCCL error: unhandled system error, Connection closed by peer", True),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000", False),
        ("ncclInvalidUsage: Bootstrap : no socket interface found", False),
    ],
)
def test_a_ranks_own_mistake_is_no_lost_contact(message, lost):
    assert is_lost_contact(torch_dist.DistBackendError(message)) == lost
