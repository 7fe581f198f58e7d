"""Which rank am I, of how many, on what device: from the environment to a process group."""

from __future__ import annotations

import datetime
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as torch_dist

from clip_train.errors import RankError


@dataclass(frozen=True)
class RankEnv:
    """Where this process stands."""

    rank: int
    world_size: int
    local_rank: int  # on this host: chooses the GPU
    local_world_size: int  # ranks on this host, as far as known
    master_addr: str
    master_port: int
    found: str  # what told us

    def describe(self) -> str:
        return f"rank {self.rank} of {self.world_size} (local {self.local_rank}), from {self.found}"


def detect(environ: Mapping[str, str]) -> RankEnv:
    """Explicit RANK and WORLD_SIZE (torchrun, the deepspeed launcher), else a SLURM step, else one process.

    RankError for variables that are incomplete, out of range or not numbers.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _explicit(environ)
    # Set inside an srun step only: a batch script's own shell has SLURM_NTASKS too, but is not a rank.
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _slurm(environ)
    return RankEnv(0, 1, 0, 1, "127.0.0.1", _free_port(), "no launcher: a single process")


def _explicit(environ: Mapping[str, str]) -> RankEnv:
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environ]
    if missing:
        raise RankError(
            f"the environment has {', '.join(n for n in needed if n in environ)} but not {', '.join(missing)}: "
            "start ranks with torchrun or the deepspeed launcher, or unset RANK and WORLD_SIZE for a single process"
        )
    try:
        rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local = int(environ.get("LOCAL_RANK", rank))
        local_world = int(environ.get("LOCAL_WORLD_SIZE", environ.get("LOCAL_SIZE", "1")))
        port = int(environ["MASTER_PORT"])
    except ValueError as e:
        raise RankError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be whole numbers: {e}") from None
    if not 0 <= rank < world:
        raise RankError(f"RANK ({rank}) must be at least 0 and below WORLD_SIZE ({world})")
    return RankEnv(rank, world, local, local_world, environ["MASTER_ADDR"], port, "RANK and WORLD_SIZE")


def _slurm(environ: Mapping[str, str]) -> RankEnv:
    world = int(environ["SLURM_STEP_NUM_TASKS"])
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    job = int(environ.get("SLURM_JOB_ID", "0"))
    local_world = int(re.split(r"\D", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))[0])
    return RankEnv(
        rank=int(environ["SLURM_PROCID"]),
        world_size=world,
        local_rank=int(environ.get("SLURM_LOCALID", "0")),
        local_world_size=local_world,
        master_addr=environ.get("MASTER_ADDR", first_host(nodes)),
        master_port=int(environ.get("MASTER_PORT", 20000 + job % 20000)),
        found="the SLURM step",
    )


def first_host(nodelist: str) -> str:
    """`gpu[003-005,9],login` -> `gpu003`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodelist)
    if match is None:
        raise RankError(f"SLURM_JOB_NODELIST ({nodelist!r}) names no host; set MASTER_ADDR")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + suffix


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(env: RankEnv, *, timeout_seconds: float = 1800.0) -> torch.device:
    """Take this rank's device and join the process group: NCCL on GPUs, gloo on CPUs.

    Also exports the variables that DeepSpeed insists on, which SLURM and a single process do not set.
    """
    os.environ.update(
        RANK=str(env.rank),
        WORLD_SIZE=str(env.world_size),
        LOCAL_RANK=str(env.local_rank),
        MASTER_ADDR=env.master_addr,
        MASTER_PORT=str(env.master_port),
    )
    if torch.cuda.is_available():
        if env.local_rank >= torch.cuda.device_count():
            raise RankError(
                f"LOCAL_RANK ({env.local_rank}) has no GPU: this host shows {torch.cuda.device_count()}; "
                "start one rank for each GPU"
            )
        device = torch.device("cuda", env.local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // env.local_world_size))
    torch_dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=env.rank,
        world_size=env.world_size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )
    return device


def stop() -> None:
    """Leave the process group, if there is one."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
