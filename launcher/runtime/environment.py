"""The rank, the number of ranks and the device, from the variables that launchers set."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from clip_train.errors import RankError, UserError
from clip_train.processes import usable_cores

if TYPE_CHECKING:
    import torch

SLURM_STEP = "the SLURM step"
LAUNCHER = "CLIP_TRAIN_LAUNCHER"  # the process that started this rank (`launcher.runtime.launch`)
PARENT = os.getppid()  # read when this process starts, because the imports take seconds
# set by launchers that start several ranks on each node: the number of nodes
NODES = ("GROUP_WORLD_SIZE", "CROSS_SIZE")
# Where ranks meet if no port is given: Linux hands out 32768 and above, unless a site changed it.
FIRST_PORT, NUM_PORTS = 20000, 12000
TRIES = 8
# Segments of GPU memory that grow leave no gaps when sizes vary, as the lengths of texts do. They
# cannot be shared with other processes, which nothing here does.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
# By default NCCL does not report failures.
NCCL = {"NCCL_DEBUG": "WARN"}
# torch's flight recorder keeps the newest collectives of all backends; at 0 it is off. NCCL also
# dumps it when a collective times out. One number has two names, and torch warns of the older one.
RECORDED = "2000"
RECORDER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
NCCL_DUMP = "nccl_rank_"  # its file in the run's folder `hang`; the rank follows
DUMP_FILE_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# cuBLAS without atomics, and sums over ranks in an order that depends on their layout alone.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
# Agreements between ranks use gloo even on GPUs, so that they do not wait for the GPUs' queues.
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_DEVICES = ("", "-1", "NoDevFiles")  # its values that hide all GPUs; the last is Slurm's
# set by Slurm if this process is meant to have GPUs. Launchers set VISIBLE on any machine
MEANT = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE")
ROOT = Path("/")
DRIVER = "proc/driver/nvidia/version"


@dataclass(frozen=True)
class RankEnv:
    """The rank of this process and the size of its world."""

    rank: int
    world_size: int
    local_rank: int  # on this host: chooses the GPU
    local_world_size: int  # ranks on this host, as far as known
    master_addr: str
    master_port: int
    found: str  # where this is from
    job: str = ""  # the same on all ranks, different for each start; empty where the port is given

    def describe(self) -> str:
        return f"rank {self.rank} of {self.world_size} (local {self.local_rank}), from {self.found}"


class Launcher(NamedTuple):
    """The names of one launcher's variables."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]  # the same on all ranks, together another for each start
    name: str
    command: str


TORCHRUN = Launcher(
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", (), "RANK and WORLD_SIZE", "torchrun"
)
SRUN = Launcher(
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
    ("SLURM_JOB_ID", "SLURM_STEP_ID"), SLURM_STEP, "srun",
)  # fmt: skip
MPI = (
    Launcher(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",), "Open MPI", "mpirun",
    ),
    Launcher(
        "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
        ("PMI_ID",), "MPICH or Intel MPI", "mpirun",
    ),
)  # fmt: skip


def detect(environ: Mapping[str, str]) -> RankEnv:
    """Explicit RANK and WORLD_SIZE (torchrun and its like), else a SLURM step, else MPI, else one
    process.

    RankError for variables that are incomplete, out of range or not numbers, or if two launchers
    disagree.
    """
    # SRUN's are set inside a step only: a batch script's own shell has SLURM_NTASKS too, but is not
    # a rank.
    above = [
        each for each in (SRUN, *MPI) if each.rank in environ and _number(environ, each.size, 1) > 1
    ]
    # A batch script may have exported WORLD_SIZE alone, as many do: then the step has to agree.
    if "RANK" in environ or ("WORLD_SIZE" in environ and not above):
        env = _rank_env(environ, TORCHRUN)
        for each in above:
            _refuse_two(env, each, environ)
        return env
    if not above:
        _number(environ, SRUN.size, 1)
        return RankEnv(0, 1, 0, 1, "127.0.0.1", 0, "no launcher: a single process")
    env = _rank_env(environ, above[0])
    size = _number(environ, "WORLD_SIZE", env.world_size)
    if size != env.world_size:
        raise RankError(
            f"the environment has WORLD_SIZE={size}, but {above[0].command} started "
            f"{env.world_size} tasks: unset WORLD_SIZE, or start as many tasks"
        )
    return env


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    try:
        return int(re.split(r"[(,]", text)[0])  # Slurm writes 4(x2) for 4 on each of 2 nodes
    except ValueError as e:
        raise RankError(f"{name} must be a whole number: {e}") from None


def _refuse_two(env: RankEnv, above: Launcher, environ: Mapping[str, str]) -> None:
    """Check that a task of srun or mpirun is one rank, or the launcher of one node's ranks."""
    tasks, task = _number(environ, above.size, 1), _number(environ, above.rank, 0)
    launcher = above.command
    if env.world_size == tasks and env.rank == task:
        return
    nodes = next((_number(environ, name, 1) for name in NODES if name in environ), None)
    if nodes is None:
        # left over from another launcher: every task would be the same rank
        raise RankError(
            f"the environment has RANK={env.rank} and WORLD_SIZE={env.world_size}, but {launcher} "
            f"started {tasks} tasks and this is task {task}: unset RANK, WORLD_SIZE, LOCAL_RANK, "
            f"MASTER_ADDR and MASTER_PORT before {launcher} (sbatch: --export=NONE, or submit from "
            "a clean shell)"
        )
    if nodes != tasks:
        raise RankError(
            f"{launcher} started {tasks} tasks, each with a launcher that knows of {nodes} "
            f"node{'s' * (nodes > 1)}: several worlds would train the same run. Start one task for "
            f"each node and give torchrun all of them (--nnodes {tasks} --rdzv-backend c10d "
            "--rdzv-endpoint <the first node>:29500), as slurm/torchrun.sbatch does; or no "
            f"launcher at all: {launcher} python -m launcher train ..."
        )


def _rank_env(environ: Mapping[str, str], names: Launcher) -> RankEnv:
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environ]
    if names is TORCHRUN and missing:
        raise RankError(
            f"the environment has {', '.join(n for n in needed if n in environ)} but not "
            f"{', '.join(missing)}: start ranks with torchrun, or unset RANK and WORLD_SIZE for a "
            "single process"
        )
    rank, world = _number(environ, names.rank, 0), _number(environ, names.size, 1)
    if not 0 <= rank < world:
        raise RankError(
            f"{names.rank} ({rank}) must be at least 0 and below {names.size} ({world})"
        )
    local = _number(environ, names.local_rank, 0 if names is SRUN else rank)
    local_size = _number(environ, names.local_size, _number(environ, "LOCAL_SIZE", 1))
    host = environ.get("MASTER_ADDR", "")
    if not host and local_size < world:  # on one node, no other host needs to reach the store
        if names is not SRUN:
            raise RankError(
                f"{names.size} ({world}) ranks are on several hosts, and MPI does not say which is "
                "first: mpirun -x MASTER_ADDR=<the first host> -x MASTER_PORT=29500 ..."
            )
        host = first_host(
            environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
        )
    host = host or "127.0.0.1"
    port, job = _number(environ, "MASTER_PORT", 0), ""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # its agent has the port itself
        job = f"{host}:{port} {environ.get('TORCHELASTIC_RESTART_COUNT')}"
    elif not port:
        job = ".".join(environ[name] for name in names.job if name in environ)
        job = job or str(os.getppid())
    if job:
        port = candidates(job)[0]
    return RankEnv(rank, world, local, local_size, host, port, names.name, job)


def first_host(nodelist: str) -> str:
    """`gpu[003-005,9],login` -> `gpu003`."""
    match = re.match(r"[^,\[]+(\[[^\]]+\][^,\[]*)*", nodelist)
    if match is None:
        raise RankError(f"SLURM_JOB_NODELIST ({nodelist!r}) names no host; set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def candidates(job: str) -> tuple[int, ...]:
    """Ports to try in this order: the same for every process of `job`, different for another
    job."""
    start = zlib.crc32(job.encode())
    return tuple(FIRST_PORT + (start + 1009 * number) % NUM_PORTS for number in range(TRIES))


def free_port(ports: Sequence[int]) -> int:
    """The first free port of this machine; if none is free, the first."""
    for port in ports:
        with contextlib.suppress(OSError):
            socket.create_server(("", port)).close()
            return port
    return ports[0]


def prepare(
    environ: MutableMapping[str, str], deterministic: bool = False, hang_dir: Path | None = None
) -> None:
    """Set the variables that CUDA, NCCL and torch read when they start. The user's own values stay.

    hang_dir: where NCCL dumps the collectives of a hang.
    """
    both_names = {"PYTORCH_ALLOC_CONF", *ALLOCATOR}  # of the same variable
    wanted = dict(NCCL)
    if not both_names & environ.keys():
        wanted |= ALLOCATOR
    if not environ.keys() & {*RECORDER_NAMES}:
        wanted |= {RECORDER_NAMES[0]: RECORDED}
    wanted |= {DUMP_ON_TIMEOUT: "1"}
    if hang_dir is not None and not environ.keys() & {*DUMP_FILE_NAMES}:
        wanted |= {DUMP_FILE_NAMES[0]: str(hang_dir.absolute() / NCCL_DUMP)}
    for name, value in (wanted | (DETERMINISTIC if deterministic else {})).items():
        environ.setdefault(name, value)


def take_device(env: RankEnv, workers: int | Literal["auto"] = 0) -> tuple[torch.device, int]:
    """This rank's GPU, or the CPU, and its loader workers. RankError if the host has no GPU for
    this rank, or if torch cannot use it.

    Also sets the number of CPU threads to `threads`, unless the user has set it.

    workers: `data.workers`.
    """
    import torch

    from clip_train.data.config import resolve_workers

    require_usable_gpu(os.environ)
    if torch.cuda.is_available():
        device = torch.device("cuda", gpu_index(env, torch.cuda.device_count(), os.environ))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    own = cores(env, os.environ, usable_cores())
    number = resolve_workers(own, device.type) if workers == "auto" else workers
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads(own, number if device.type == "cpu" else 0))
    return device, number


def driver(root: Path = ROOT) -> str:
    """The version of NVIDIA's driver; empty if the kernel has none."""
    text = (root / DRIVER).read_text() if (root / DRIVER).exists() else ""
    return next(iter(re.findall(r"\s(\d+\.[\d.]+)\s", text)), "")


def stack(device: torch.device) -> dict[str, str]:
    """Versions of the layers below the Python packages on a GPU."""
    import torch

    if device.type != "cuda":
        return {}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"CUDA": str(torch.version.cuda), "NCCL": nccl, "driver": driver()}


def require_usable_gpu(environ: Mapping[str, str], root: Path = ROOT) -> None:
    """RankError if this node has a GPU that torch cannot use: the run would train on the CPU.
    UserError if this torch is built without CUDA. root: where /dev and /proc are."""
    import torch

    if torch.cuda.is_available() or environ.get(VISIBLE) in NO_DEVICES:
        return
    signs = sorted(map(str, root.glob("dev/nvidia[0-9]*")))
    signs += [f"{name}={environ[name]}" for name in MEANT if environ.get(name)]
    version, cuda = driver(root), torch.version.cuda
    if not signs and not version:
        return
    try:
        torch.cuda.init()
        reason = "it finds none"
    except (RuntimeError, AssertionError) as e:
        reason = str(e).strip()
    kind = RankError if cuda else UserError
    raise kind(
        f"there is a GPU here ({', '.join(signs) or root / DRIVER}), but torch cannot use it: "
        f"{reason}. torch {torch.__version__} is built "
        f"{f'for CUDA {cuda}' if cuda else 'without CUDA'}, the "
        f"driver is {version or 'not loaded'}. nvidia-smi shows the newest CUDA that the driver "
        "supports. Install a torch for that one, or a newer driver. For CUDA 12.6: pip install "
        "torch --index-url https://download.pytorch.org/whl/cu126. In a container "
        "or a Slurm job, ask for the GPU (--gpus all, --gpus-per-node). To train on the CPU on "
        f"purpose, set {VISIBLE}= (empty)"
    )


def gpu_index(env: RankEnv, visible: int, environ: Mapping[str, str]) -> int:
    """The index of this rank's GPU among those that the process sees."""
    chosen = environ.get(VISIBLE, "")
    # ours and torchrun give all ranks of a host the same variables
    shared = LAUNCHER in environ or "TORCHELASTIC_RUN_ID" in environ
    alone = env.found == SLURM_STEP or (chosen and "," not in chosen)
    if visible == 1 and alone and not shared:
        # --gpus-per-task, --gpu-bind, or a launcher that does the same: each task sees its own GPU
        # alone. (`rendezvous.meet` makes sure of it)
        return 0
    if env.local_rank >= visible:
        because = f" ({VISIBLE}={chosen})" if chosen else ""
        raise RankError(
            f"LOCAL_RANK ({env.local_rank}) has no GPU: this host shows {visible}{because} to "
            f"{env.local_world_size} ranks; start one rank for each GPU, or show one for each rank"
        )
    return env.local_rank


def gpu_identity(device: torch.device) -> str:
    """The same for every process on this GPU, whatever number it has there; empty for a CPU."""
    import torch

    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def cores(env: RankEnv, environ: Mapping[str, str], usable: int) -> int:
    """CPU cores for this rank and its loader workers. Since Slurm 22.05, srun ignores sbatch's
    --cpus-per-task unless SRUN_CPUS_PER_TASK is set, but it binds the task to its cores. So this is
    the smaller of the two. CPU cores that this process may use."""
    share = max(1, usable // env.local_world_size)
    asked = environ.get("SLURM_CPUS_PER_TASK") or environ.get("SRUN_CPUS_PER_TASK") or ""
    return max(1, min(int(asked), usable)) if asked.isdigit() and env.found == SLURM_STEP else share


def threads(cores: int, workers: int) -> int:
    """The trainer's threads on this many cores: those that the loader's workers leave, at least
    half.

    OpenMP's threads spin while they wait for each other. With one thread per core, any other
    process takes a core from one of them, while all others spin. A step of the demo then took 3 to
    20 times as long.
    """
    return max(1, cores // 2, cores - workers)


def check_restarts(resume: str, environ: Mapping[str, str], *, requeues: bool = False) -> None:
    """UserError if `checkpoint.resume` is never, and the same command is run again after a failure
    or a preemption: each attempt would start from step 0.

    requeues: by the controller of a batch job.
    """
    if resume != "never":
        return
    who = "the batch script" if requeues else ""
    if _number(environ, "SLURM_RESTART_COUNT", 0) > 0:
        who = f"Slurm (SLURM_RESTART_COUNT={environ['SLURM_RESTART_COUNT']})"
    elif _number(environ, "TORCHELASTIC_MAX_RESTARTS", 0) > 0:
        who = f"torchrun (--max-restarts={environ['TORCHELASTIC_MAX_RESTARTS']})"
    if who:
        raise UserError(
            f"checkpoint.resume (never): {who} runs this command again after a failure or a "
            "preemption, and every attempt would start from step 0; set checkpoint.resume=auto, "
            "and choose a new run.name if the old run must not continue"
        )


def this_rank() -> RankEnv:
    """`detect`, or a world of one where the launcher's variables are mistakes."""
    try:
        return detect(os.environ)
    except UserError:
        return detect({})


def launcher_pid(environ: Mapping[str, str]) -> int | None:
    """The process that started this rank, whose death makes it an orphan; None without one."""
    if LAUNCHER in environ:
        return int(environ[LAUNCHER])
    of_launchers = {"TORCHELASTIC_RUN_ID", "CROSS_RANK", *(each.rank for each in MPI)}
    return PARENT if of_launchers & environ.keys() else None
