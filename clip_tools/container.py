"""What `doctor` checks of a container: the limits that its runtime sets."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from clip_train.processes import usable_cores
from launcher.checks import Finding, ok, warning_if

CORES_PER_GPU = 4  # the trainer, the checkpoint writer and two loader workers
INFINIBAND = "dev/infiniband"


def check_cores(num_gpus: int, root: Path = Path("/")) -> Iterator[Finding]:
    """The CPU quota, which nproc does not show. root: where /proc and /sys are."""
    visible, usable = len(os.sched_getaffinity(0)), usable_cores(root)
    if usable == visible:
        yield ok("limits", f"{visible} CPU cores")
        return
    yield warning_if(
        usable < CORES_PER_GPU * num_gpus,
        "limits",
        f"{usable} of the {visible} CPU cores that are visible: the control group has a CPU quota",
        f"{num_gpus} GPUs need at least {CORES_PER_GPU * num_gpus}: raise it (docker: --cpus; "
        "Kubernetes: resources.limits.cpu)",
    )


def check_locked_memory(limit: int | None = None, root: Path = Path("/")) -> Iterator[Finding]:
    """InfiniBand registers memory, which counts as locked. limit: bytes; None: this process's
    limit. root: where /dev is."""
    if not (root / INFINIBAND).is_dir():
        return
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = limit == resource.RLIM_INFINITY
    shown = "unlimited" if unlimited else f"{limit >> 10} KiB"
    yield warning_if(
        not unlimited,
        "limits",
        f"{shown} of locked memory (ulimit -l), and there is InfiniBand here",
        "NCCL fails with `ibv_reg_mr failed`: docker run --ulimit memlock=-1; Slurm: "
        "PropagateResourceLimitsExcept=MEMLOCK",
    )
