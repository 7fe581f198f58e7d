"""Ranks from the environment: torchrun's and SLURM's variables, and what is wrong with them."""

from __future__ import annotations

import pytest

from clip_train.errors import UserError
from launcher.env import detect, first_host

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_NODELIST": "gpu[017-018]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "123456",
}


def test_nothing_set_is_a_world_of_one():
    env = detect({})
    assert (env.rank, env.world_size, env.local_rank, env.master_addr) == (0, 1, 0, "127.0.0.1")


def test_torchrun():
    env = detect(TORCHRUN)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (5, 16, 1, 4)
    assert (env.master_addr, env.master_port) == ("node1", 29500)


def test_a_slurm_step():
    env = detect(SLURM)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (6, 8, 2, 4)
    assert env.master_addr == "gpu017"
    assert detect({**SLURM, "SLURM_PROCID": "0"}).master_port == env.master_port


def test_explicit_variables_win_over_slurm():
    assert detect({**SLURM, **TORCHRUN}).world_size == 16


def test_the_batch_script_itself_is_no_rank():
    batch_shell = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_NODELIST": "a[1-2]"}
    assert detect(batch_shell).world_size == 1


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu[003-005,9],login", "gpu003"),
        ("a1", "a1"),
        ("n[7,9]", "n7"),
        ("x-1,x-2", "x-1"),
        ("r[1-2]-ib,z", "r1-ib"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "environ, said",
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({**TORCHRUN, "RANK": "16"}, "RANK"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "whole numbers"),
    ],
)
def test_mistakes_name_the_variable(environ, said):
    with pytest.raises(UserError, match=said):
        detect(environ)
