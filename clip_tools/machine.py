"""What `clip-train doctor` looks at on this machine and its cluster.

As a program, under torchrun, it is one rank of the process group that `check_group` measures.
"""

import datetime
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as torch_dist

from clip_train import dist
from launcher.checks import Check, Finding, check_range, error, ok, warning, warning_if
from launcher.runtime.environment import backend, detect, launcher_pid, take_device
from launcher.runtime.rendezvous import ROOT, code_version
from launcher.slurm.scheduler import answer

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM_SETTINGS = (  # name, a value that hurts (a regular expression), how, and what to do
    (
        "JobRequeue", "0", "jobs are not requeued by default",
        "keep #SBATCH --requeue, or submit --template chain",
    ),
    (
        "PreemptMode", "CANCEL.*", "a job that is preempted is not queued again",
        "submit --template chain: the next job of the array goes on",
    ),
    (
        "KillWait", r"(\d|1[0-4])\b.*", "scancel leaves no time to save",
        "touch STOP before you cancel",
    ),
    (
        "ProctrackType", ".*linuxproc", "it signals every process and loses some",
        "ask for proctrack/cgroup",
    ),
)  # fmt: skip
GROUP_SECONDS = 180  # for two ranks to start and to find each other, on a busy machine too


def check_versions() -> Iterator[Finding]:
    for name in ("Python", "torch"):
        yield from check_range("versions", name)
    yield ok("versions", f"clip-train's code {code_version()}")


def check_devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield warning(
            "devices",
            "no GPU is visible, training would run on CPU",
            "check nvidia-smi and the torch build",
        )
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        memory = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        message = f"{torch.cuda.get_device_name(index)} {index}, {memory}"
        remedy = "another process holds its memory: nvidia-smi shows which"
        yield warning_if(free < 0.9 * total, "devices", message, remedy)


def check_ranks() -> Iterator[Finding]:
    env = detect(os.environ)
    left = [name for name in LAUNCHERS if name in os.environ]
    wrong = bool(left) and launcher_pid(os.environ) is None and "SLURM_STEP_ID" not in os.environ
    message = (
        f"{', '.join(left)} are set in this shell: every task of sbatch or srun would have them"
    )
    yield warning_if(
        wrong, "ranks", message if wrong else env.describe(), f"unset {' '.join(left)}"
    )


def check_group() -> Iterator[Finding]:
    """A process group over this machine's devices (two ranks on CPU), in processes of its own."""
    ranks = torch.cuda.device_count() or 2
    line = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", __name__]
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    environ["PYTHONPATH"] = f"{ROOT}:{environ.get('PYTHONPATH', '')}"
    remedy = "check NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, /etc/hosts and the firewall"
    try:
        done = subprocess.run(
            [sys.executable, "-m", *line],
            env=environ,
            capture_output=True,
            text=True,
            timeout=GROUP_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        yield error(
            "process group",
            f"{ranks} ranks do not find each other within {GROUP_SECONDS} s",
            remedy,
        )
        return
    except subprocess.CalledProcessError as e:
        lines = [text for text in e.stderr.splitlines() if "Error" in text]
        yield error("process group", (lines or ["it failed without a message"])[0][:300], remedy)
        return
    found = json.loads(next(text for text in done.stdout.splitlines() if text.startswith("{")))
    speed = f"all-reduce of 16 MiB at {found['bandwidth'] / 1e9:.2f} GB/s"
    speed += f", latency {found['latency'] * 1e6:.0f} us"
    slow = found["device"] == "cuda" and found["bandwidth"] < 2e9
    yield warning_if(
        slow, "process group", f"{ranks} ranks, {speed}", "slow for GPUs: check nvidia-smi topo -m"
    )


def check_limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    remedy = "ulimit -n 65536: loader workers and sockets need them"
    yield warning_if(files < 4096, "limits", f"{files} open files (ulimit -n)", remedy)
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        remedy = (
            "mount it larger (docker: --shm-size=16g), or data.workers=0: batches travel through it"
        )
        yield warning_if(
            free < 2**30, "limits", f"/dev/shm has {free / 2**20:.0f} MiB free", remedy
        )


def slurm_answers() -> bool:
    """Whether this machine is part of a cluster that runs."""
    return shutil.which("scontrol") is not None and bool(answer("scontrol", "show", "config"))


def check_slurm() -> Iterator[Finding]:
    """Settings of the cluster that hurt a job which is to requeue itself."""
    if shutil.which("scontrol") is None:
        return
    shown = answer("scontrol", "show", "config")
    if not shown:
        message = "scontrol does not answer, which matters only to jobs of a cluster"
        remedy = "is this a login node, and is SLURM_CONF right?"
        yield warning_if("SLURM_CONF" in os.environ, "slurm", message, remedy)
        return
    config = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", shown, re.MULTILINE))
    yield ok("slurm", f"Slurm {config.get('SLURM_VERSION', '?')}")
    for name, bad, effect, remedy in SLURM_SETTINGS:
        if re.fullmatch(bad, config.get(name, "")):
            yield warning("slurm", f"{name}={config[name]}: {effect}", remedy)
    for name in ("SBATCH_EXPORT", "SLURM_EXPORT_ENV"):
        if name in os.environ:
            message = f"{name}={os.environ[name]} changes which variables jobs get"
            yield warning("slurm", message, f"unset {name}, or name PATH and HOME in it")
    for text in answer("scontrol", "show", "partition", "--oneliner").splitlines():
        values = dict(word.split("=", 1) for word in text.split() if "=" in word)
        if (
            values.get("PreemptMode", "OFF") != "OFF" and int(values.get("GraceTime", "0")) < 60
        ):  # seconds
            seconds = values.get("GraceTime", "0")
            message = f"partition {values['PartitionName']} preempts {seconds} s after its warning"
            yield warning(
                "slurm", message, "lower checkpoint.every_minutes: a save that takes longer is lost"
            )


MACHINE: tuple[tuple[str, Check], ...] = (
    ("versions", check_versions),
    ("devices", check_devices),
    ("ranks", check_ranks),
    ("process group", check_group),
    ("limits", check_limits),
    ("slurm", check_slurm),
)


def measure(num_bytes: int, device: torch.device, repeats: int) -> float:
    """Seconds of one all-reduce."""
    x = torch.zeros(num_bytes // 4, device=device)
    dist.all_reduce_sum(x)
    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce_sum(x)
    x.sum().item()  # waits for the device
    return (time.perf_counter() - began) / repeats


if __name__ == "__main__":
    device, _ = take_device(detect(os.environ))
    torch_dist.init_process_group(backend(device), timeout=datetime.timedelta(seconds=60))
    latency, seconds = measure(4, device, 20), measure(16 * 2**20, device, 3)
    if dist.is_main():
        found = {
            "device": device.type,
            "latency": latency,
            "bandwidth": 16 * 2**20 / seconds,
        }  # bytes per second
        print(json.dumps(found), flush=True)
    dist.barrier()
    torch_dist.destroy_process_group()
