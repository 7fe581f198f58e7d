"""Ranks from the environment: torchrun's and SLURM's variables, and what is wrong with them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from clip_train.errors import RankError, UserError
from launcher.runtime import environment as env_module
from launcher.runtime.environment import RankEnv, detect, first_host
from launcher.runtime.verdict import RUN_DIR
from tests.launcher.conftest import finish, start, start_cold

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


def test_the_script_for_lsf_in_the_documents(tmp_path):
    page = Path("docs/slurm.md").read_text()
    (tmp_path / "rank.sh").write_text(re.search("```bash\n(# rank.sh.*?)```", page, re.S)[1])
    (tmp_path / "python").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "python").chmod(0o755)
    seen = []
    for task in "1234":
        lsf = {"LSF_PM_TASKID": task, "LSB_JOBID": "12001", "LSB_HOSTS": "b9 b9 a1 b9"}
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        script = ["bash", "-eu", str(tmp_path / "rank.sh"), "my.yaml"]
        said = subprocess.run(script, env=lsf | path, text=True, stdout=subprocess.PIPE, check=True)
        env = detect(dict(line.split("=", 1) for line in said.stdout.splitlines()))
        seen.append((env.rank, env.world_size, env.local_rank, env.local_world_size))
        assert (env.master_addr, env.master_port) == ("b9", 20001)
    assert seen == [(0, 4, 0, 3), (1, 4, 1, 3), (2, 4, 0, 1), (3, 4, 2, 3)]


def test_torchrun():
    env = detect(TORCHRUN)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (5, 16, 1, 4)
    assert (env.master_addr, env.master_port) == ("node1", 29500)


def test_a_slurm_step():
    env = detect(SLURM)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (6, 8, 2, 4)
    assert env.master_addr == "gpu017"
    assert detect({**SLURM, "SLURM_PROCID": "0"}).master_port == env.master_port


def test_two_steps_of_a_job_have_two_ports():
    ports = {detect({**SLURM, "SLURM_STEP_ID": step}).master_port for step in ("0", "1")}
    assert len(ports) == 2 and all(20000 <= port < 32000 for port in ports)


MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "job-7",
}


@pytest.mark.parametrize(
    "nodes", ["GROUP_WORLD_SIZE", "CROSS_SIZE"]
)  # torchrun's and the deepspeed launcher's
def test_a_launcher_on_each_node_wins_over_srun_and_mpirun(nodes):
    assert detect({**SLURM, **TORCHRUN, nodes: "8"}).world_size == 16
    assert detect({**MPI, **TORCHRUN, nodes: "4"}).rank == 5


@pytest.mark.parametrize("tasks, launcher", [(SLURM, "srun"), (MPI, "mpirun")])
def test_a_world_of_its_own_in_each_task_is_refused(tasks, launcher):
    """`srun --ntasks-per-node 8 torchrun --standalone ...`: eight runs in the same run directory."""
    with pytest.raises(
        UserError, match=f"{launcher} started . tasks.*knows of 1 node: several worlds"
    ):
        detect({**tasks, **TORCHRUN, "GROUP_WORLD_SIZE": "1"})


def test_a_single_task_may_hold_any_launcher():
    assert (
        detect(
            {**SLURM, "SLURM_STEP_NUM_TASKS": "1", **TORCHRUN, "GROUP_WORLD_SIZE": "4"}
        ).world_size
        == 16
    )


def test_world_size_alone_has_to_agree_with_the_step():
    """Batch scripts export it, with MASTER_ADDR and MASTER_PORT, and leave the rank to SLURM_PROCID."""
    env = detect({**SLURM, "WORLD_SIZE": "8", "MASTER_ADDR": "gpu017", "MASTER_PORT": "29501"})
    assert (env.rank, env.world_size, env.master_port) == (6, 8, 29501)
    assert detect({**MPI, "WORLD_SIZE": "4"}).rank == 3


def test_a_task_that_sees_one_gpu_takes_it():
    """`srun --gpus-per-task 1`: device 0 on every rank. Elsewhere two ranks would share it."""
    one = {"CUDA_VISIBLE_DEVICES": "3"}
    assert env_module.gpu_index(detect(MPI), 1, one) == 0
    assert env_module.gpu_index(detect(SLURM), 1, {}) == 0
    assert env_module.gpu_index(detect(SLURM), 4, {}) == 2
    with pytest.raises(UserError, match=r"LOCAL_RANK \(1\) has no GPU: this host shows 1"):
        env_module.gpu_index(detect(TORCHRUN), 1, {})


@pytest.mark.parametrize("launcher", ["CLIP_TRAIN_LAUNCHER", "TORCHELASTIC_RUN_ID"])
def test_ranks_that_were_shown_one_gpu_together_do_not_share_it(launcher):
    """CUDA_VISIBLE_DEVICES=0 in the shell: each of four ranks sees one GPU, the same."""
    environ = {"CUDA_VISIBLE_DEVICES": "0", launcher: "1"}
    ranks = [RankEnv(rank, 4, rank, 4, "127.0.0.1", 1, "RANK and WORLD_SIZE") for rank in range(4)]
    assert env_module.gpu_index(ranks[0], 1, environ) == 0
    for rank in ranks[1:]:
        with pytest.raises(UserError, match=r"shows 1 \(CUDA_VISIBLE_DEVICES=0\) to 4 ranks"):
            env_module.gpu_index(rank, 1, environ)


def test_variables_that_srun_itself_was_told_to_set_agree():
    explicit = {"RANK": "6", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert detect({**SLURM, **explicit}).rank == 6


def test_slurm_wins_over_mpi():
    assert detect({**SLURM, **MPI}).world_size == 8


def test_mpi_on_one_host():
    env = detect(MPI)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (3, 4, 3, 4)
    assert env.master_addr == "127.0.0.1"
    assert detect({**MPI, "OMPI_COMM_WORLD_RANK": "0"}).master_port == env.master_port
    assert detect({**MPI, "PMIX_NAMESPACE": "job-8"}).master_port != env.master_port


def test_mpich():
    env = detect({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (env.rank, env.world_size, env.local_rank) == (1, 2, 1)


@pytest.mark.parametrize(
    "said, environ, usable, cores",
    [
        ("cpus per task", {**SLURM, "SLURM_CPUS_PER_TASK": "6"}, 64, 6),
        ("but no more than srun has bound", {**SLURM, "SLURM_CPUS_PER_TASK": "6"}, 1, 1),
        ("a share of the host", TORCHRUN, 64, 16),
        ("at least one", TORCHRUN, 2, 1),
    ],
)
def test_a_ranks_cores(said, environ, usable, cores):
    assert env_module.cores(detect(environ), environ, usable) == cores, said


@pytest.mark.parametrize(
    "said, cores, workers, threads",
    [
        ("the demo", 2, 1, 1),
        ("all, where the trainer loads by itself", 8, 0, 8),
        ("what the workers leave", 8, 2, 6),
        ("but half of them at least, since workers wait most of the time", 8, 6, 4),
        ("at least one", 1, 2, 1),
    ],
)
def test_threads_leave_cores_to_the_loaders_workers(said, cores, workers, threads):
    assert env_module.threads(cores, workers) == threads, said


def test_the_batch_script_itself_is_no_rank():
    batch_shell = {
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "0",
        "SLURM_NODELIST": "a[1-2]",
    }
    assert detect(batch_shell).world_size == 1


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu[003-005,9],login", "gpu003"),
        ("a1", "a1"),
        ("n[7,9]", "n7"),
        ("x-1,x-2", "x-1"),
        ("rack7-[a-b]", "rack7-a"),
        ("r[1-2]-ib,z", "r1-ib"),
        ("r[1-2]n[1-4],r3n[1,7]", "r1n1"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "environ, said",
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({**TORCHRUN, "RANK": "16"}, "RANK"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number"),
        ({**SLURM, **TORCHRUN}, "srun started 8 tasks and this is task 6: unset RANK"),
        ({**SLURM, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, "unset RANK"),
        ({**MPI, **TORCHRUN}, "mpirun started 4 tasks"),
        ({**SLURM, "WORLD_SIZE": "16"}, "WORLD_SIZE=16, but srun started 8 tasks"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE but not RANK"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS must be a whole number"),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "mpirun -x MASTER_ADDR"),
    ],
)
def test_mistakes_name_the_variable(environ, said):
    with pytest.raises(UserError, match=said):
        detect(environ)


RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_variables_of_the_user_stay(name):
    environ = {name: "max_split_size_mb:512", "NCCL_ALGO": "Tree"}
    env_module.prepare(environ, deterministic=True)
    assert environ == {
        name: "max_split_size_mb:512",
        "NCCL_ALGO": "Tree",
        "NCCL_PROTO": "Simple",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_DEBUG": "WARN",
        **RECORDER,
    }
    empty: dict[str, str] = {}
    env_module.prepare(empty)
    assert empty == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_DEBUG": "WARN",
        **RECORDER,
    }
    chosen = {"NCCL_DEBUG": "VERSION"}
    env_module.prepare(chosen)
    assert chosen["NCCL_DEBUG"] == "VERSION"


OPEN_KERNEL = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  525.60.13  Release Build"


@pytest.mark.parametrize(
    "environ, device, said",
    [
        (
            {},
            True,
            r"nvidia0\), but torch cannot use it: The NVIDIA driver on your system is too old",
        ),
        ({}, True, r"built for CUDA 99\.1, the driver is 525\.60\.13"),
        ({}, False, r"a GPU here \(.*version\)"),
        ({"SLURM_JOB_GPUS": "0,1"}, False, r"SLURM_JOB_GPUS=0,1"),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_GPUS": "0,1"}, True, None),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, True, None),
    ],
)
def test_a_gpu_that_a_newer_torch_cannot_use(environ, device, said, tmp_path, monkeypatch):
    """Pretended: the files of a driver of 2022, and what torch says to it."""

    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12000).")

    version = tmp_path / "proc" / "driver" / "nvidia" / "version"
    version.parent.mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    version.write_text(OPEN_KERNEL + "\nGCC version:  gcc version 12.1.0\n")
    (tmp_path / "dev" / "nvidiactl").touch()
    if device:
        (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    with contextlib.nullcontext() if said is None else pytest.raises(RankError, match=said):
        env_module.require_usable_gpu(environ, tmp_path)


@pytest.mark.parametrize(
    "environ, who",
    [
        ({"SLURM_RESTART_COUNT": "1"}, "Slurm (SLURM_RESTART_COUNT=1)"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, "torchrun (--max-restarts=3)"),
        ({RUN_DIR: "{tmp}"}, "the batch script"),
        ({"SLURM_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}, ""),
    ],
)
def test_a_command_that_is_repeated_must_resume(recipe, tmp_path, environ, who):
    """A launcher or a scheduler that starts it again would make it start over each time."""
    environ = {name: value.replace("{tmp}", str(tmp_path)) for name, value in environ.items()}
    line = ("checkpoint.resume=never", "run.steps=2", "schedule.warmup_steps=0")
    status, out = finish(start(recipe, *line, environ=environ))
    assert status == (2 if who else 0), out
    if who:
        assert f"{who} runs this command again" in out and "set checkpoint.resume=auto" in out


@pytest.mark.full
def test_torchrun_itself_says_that_it_restarts(recipe):
    more = ("--standalone", "--nproc-per-node=1", "--max-restarts=2", "-m", "launcher")
    process = start_cold(recipe, "checkpoint.resume=never", module=("torch.distributed.run", *more))
    _, out = finish(process)
    assert "torchrun (--max-restarts=2) runs this command again" in out, out
