"""Which rank am I, of how many, on what device: from the environment to a process group."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from clip_train.errors import RankError

SLURM_STEP = "the SLURM step"


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
    """Explicit RANK and WORLD_SIZE (torchrun and its like), else a SLURM step, else MPI, else one process.

    RankError for variables that are incomplete, out of range or not numbers, or of two launchers that disagree.
    """
    # Set inside an srun step only: a batch script's own shell has SLURM_NTASKS too, but is not a rank.
    slurm_tasks = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    mpi = next((names for names in MPI if names.size in environ and names.rank in environ), None)
    mpi_tasks = _number(environ, mpi.size, 1) if mpi is not None else 1
    # A batch script may have exported WORLD_SIZE alone, as many do: then the step has to agree.
    if "RANK" in environ or ("WORLD_SIZE" in environ and max(slurm_tasks, mpi_tasks) == 1):
        env = _explicit(environ)
        _refuse_two(env, slurm_tasks, _number(environ, "SLURM_PROCID", 0), "srun", environ)
        if mpi is not None:
            _refuse_two(env, mpi_tasks, _number(environ, mpi.rank, 0), "mpirun", environ)
        return env
    if slurm_tasks > 1:
        return _refuse_size(_slurm(environ), "srun", environ)
    if mpi is not None and mpi_tasks > 1:
        return _refuse_size(_mpi(environ, mpi), "mpirun", environ)
    return RankEnv(0, 1, 0, 1, "127.0.0.1", 0, "no launcher: a single process")


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(environ.get(name, default))
    except ValueError as e:
        raise RankError(f"{name} must be a whole number: {e}") from None


# Set by launchers that start several ranks on each node: of how many nodes, by their word.
NODES = ("GROUP_WORLD_SIZE", "CROSS_SIZE")


def _refuse_two(env: RankEnv, tasks: int, task: int, launcher: str, environ: Mapping[str, str]) -> None:
    """A task of srun or mpirun is one rank, or the launcher of one node's ranks; anything else is a mistake."""
    if tasks <= 1 or (env.world_size == tasks and env.rank == task):
        return
    nodes = next((_number(environ, name, 1) for name in NODES if name in environ), None)
    if nodes is None:  # left over from another launcher: every task of this one would be the same rank
        raise RankError(
            f"the environment has RANK={env.rank} and WORLD_SIZE={env.world_size}, but {launcher} started {tasks} "
            f"tasks and this is task {task}: unset RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT before "
            f"{launcher} (sbatch: --export=NONE, or submit from a clean shell)"
        )
    if nodes != tasks:
        raise RankError(
            f"{launcher} started {tasks} tasks, each with a launcher that knows of {nodes} node{'s' * (nodes > 1)}: "
            f"several worlds would train the same run. Start one task for each node and tell torchrun of all "
            f"(--nnodes {tasks} --rdzv-backend c10d --rdzv-endpoint <the first node>:29500), as slurm/torchrun.sbatch "
            f"does; or no launcher at all: {launcher} python -m launcher train ..."
        )


def _refuse_size(env: RankEnv, launcher: str, environ: Mapping[str, str]) -> RankEnv:
    said = _number(environ, "WORLD_SIZE", env.world_size)
    if said != env.world_size:
        raise RankError(
            f"the environment has WORLD_SIZE={said}, but {launcher} started {env.world_size} tasks: unset WORLD_SIZE, "
            f"or start as many tasks"
        )
    return env


def _explicit(environ: Mapping[str, str]) -> RankEnv:
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environ]
    if missing:
        raise RankError(
            f"the environment has {', '.join(n for n in needed if n in environ)} but not {', '.join(missing)}: "
            "start ranks with torchrun, or unset RANK and WORLD_SIZE for a single process"
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
        found=SLURM_STEP,
    )


class MpiNames(NamedTuple):
    """What one MPI calls its variables."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str


MPI = (
    MpiNames(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),  # Open MPI
    MpiNames("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_ID"),  # MPICH, Intel MPI
)


def _mpi(environ: Mapping[str, str], names: MpiNames) -> RankEnv:
    try:
        rank, world = int(environ[names.rank]), int(environ[names.size])
        local = int(environ.get(names.local_rank, rank))
        local_world = int(environ.get(names.local_size, "1"))
    except ValueError as e:
        raise RankError(f"{names.rank}, {names.size} and {names.local_rank} must be whole numbers: {e}") from None
    if local_world < world and "MASTER_ADDR" not in environ:
        raise RankError(
            f"{names.size} ({world}) ranks are on several hosts, and MPI does not tell which is first: "
            "mpirun -x MASTER_ADDR=<the first host> -x MASTER_PORT=29500 ..."
        )
    # the same on all ranks and another for each mpirun
    port = 20000 + zlib.crc32(environ.get(names.job, str(os.getppid())).encode()) % 20000
    return RankEnv(
        rank,
        world,
        local,
        local_world,
        environ.get("MASTER_ADDR", "127.0.0.1"),
        int(environ.get("MASTER_PORT", port)),
        f"MPI ({names.rank})",
    )


def first_host(nodelist: str) -> str:
    """`gpu[003-005,9],login` -> `gpu003`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodelist)
    if match is None:
        raise RankError(f"SLURM_JOB_NODELIST ({nodelist!r}) names no host; set MASTER_ADDR")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + suffix


def take_device(env: RankEnv, workers: int = 0) -> torch.device:
    """This rank's GPU, or the CPU. RankError where the host shows none for it.

    Also takes as many CPU threads as `threads` says, unless the user has said it.

    workers: this rank's loader processes.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", gpu_index(env, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if "OMP_NUM_THREADS" not in os.environ:
        own = cores(env, os.environ, len(os.sched_getaffinity(0)))
        torch.set_num_threads(threads(own, workers if device.type == "cpu" else 0))
    return device


def gpu_index(env: RankEnv, visible: int) -> int:
    """Which of the GPUs that this process sees is its own."""
    if env.found == SLURM_STEP and visible == 1:
        return 0  # --gpus-per-task, --gpu-bind: each task sees its own alone. (NCCL refuses two ranks on one GPU)
    if env.local_rank >= visible:
        raise RankError(
            f"LOCAL_RANK ({env.local_rank}) has no GPU: this host shows {visible}; start one rank for each GPU"
        )
    return env.local_rank


def cores(env: RankEnv, environ: Mapping[str, str], usable: int) -> int:
    """CPU cores for this rank and its loader workers. srun has not handed --cpus-per-task on since Slurm 22.05 unless
    SRUN_CPUS_PER_TASK says so, but binds the task to its cores then: the smaller of both. `usable` by this process."""
    share = max(1, usable // env.local_world_size)
    said = environ.get("SLURM_CPUS_PER_TASK") or environ.get("SRUN_CPUS_PER_TASK") or ""
    return max(1, min(int(said), usable)) if said.isdigit() and env.found == SLURM_STEP else share


def threads(cores: int, workers: int) -> int:
    """Of the trainer, on so many cores: what the loader's workers leave, but at least half.

    OpenMP's threads spin while they wait for each other. With one for each core, whatever else wants a core takes it
    from one of them, and all others burn theirs meanwhile: a step of the demo then took 3 to 20 times as long.
    """
    return max(1, cores // 2, cores - workers)


def has_launcher(environ: Mapping[str, str]) -> bool:
    """Whether a launcher of ranks is this process's parent, so that its death leaves the rank an orphan."""
    return any(name in environ for name in ("TORCHELASTIC_RUN_ID", "CROSS_RANK", *(names.rank for names in MPI)))


def backend(device: torch.device) -> str:
    """What ranks decide together goes by gloo even on GPUs: it must not wait for their queues."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def describe_start(env: RankEnv, device: torch.device) -> str:
    """The one line that says what was found, before the others are waited for."""
    through = f" through {env.master_addr}:{env.master_port}" if env.world_size > 1 else ""
    return f"{env.describe()}; {device}, {backend(device)}{through}, {torch.get_num_threads()} threads"
