"""The checks of `clip-train doctor`. Each finding is ok, a warning or an error with the remedy.

As a program, under torchrun, this module is one rank of the process group that `check_group`
measures.
"""

import contextlib
import itertools
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from clip_tools.container import check_cores, check_locked_memory
from clip_tools.shards.equal import describe
from clip_tools.shards.index import index_shard
from clip_train import dist
from clip_train.data.config import first_samples
from clip_train.data.decode import image_bytes
from clip_train.data.invalid import InvalidSample
from clip_train.data.pixels import is_transparent
from clip_train.data.tar import TarSample
from clip_train.data.worker import shared_bytes
from clip_train.errors import ClipTrainError, UserError
from clip_train.metrics.nvml import Nvml, open_nvml
from clip_train.models.clip import shape_of_sample
from clip_train.processes import node_name
from clip_train.recipe.recipe import Recipe, load_config
from clip_train.recipe.resolve import resolve
from clip_train.storage.base import Storage
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import open_storage
from clip_train.versions import NEWEST, installed, too_old, version_tuple
from launcher.checks import (
    PLACES,
    Check,
    Finding,
    check_places,
    error,
    ok,
    warning,
    warning_if,
)
from launcher.runtime import rendezvous
from launcher.runtime.environment import detect, require_usable_gpu, take_device
from launcher.runtime.heartbeat import Heartbeat
from launcher.runtime.rendezvous import REDUCED_BYTES, ROOT, code_version
from launcher.runtime.verdict import STOP_FILE, end_process
from launcher.slurm.profile import load_site
from launcher.slurm.scheduler import run_command

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM_SETTINGS = (  # name, a harmful value (a regular expression), its effect, and the remedy
    (
        "JobRequeue", "0", "jobs are not requeued by default",
        "keep #SBATCH --requeue, or submit several times with -- --dependency=singleton",
    ),
    (
        "PreemptMode", "CANCEL.*", "a job that is preempted is not queued again",
        "submit several times with -- --dependency=singleton: the next job resumes",
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
MAX_SHARDS, MAX_SHARD_BYTES = 8, 4 << 30  # that are read together, to count equal captions
LOOK_AT = 200  # samples whose images are decoded
RATE_BYTES = 32 << 20  # written to a disk or a store to measure it
SLOW_DISK, SLOW_STORE = 50e6, 5e6  # bytes per second, below which saves take long
PAIRS_SHOWN = 4
GROUP_SECONDS = 240  # for the ranks to start, find each other and exchange


def look(recipe: str | None, overrides: list[str], all_nodes: bool = False) -> Iterator[Finding]:
    """Check the machine, and the recipe if there is one that can be read.

    A check that raises an error becomes a finding; the other checks still run.
    """
    checks: list[tuple[str, Check]] = [*MACHINE]
    if recipe is None:
        checks.append(("limits", check_shared_memory))
    else:
        try:
            config = load_config(recipe, overrides)
        except UserError as e:
            yield error("recipe", str(e), "see the message; clip-train keys lists all keys")
        else:
            checks += [
                (name, partial(check, config)) for name, check in [*RECIPE.items(), *PLACES.items()]
            ]
    checks += [("nodes", partial(check_group, all_nodes=True))] if all_nodes else []
    for name, of_it in checks:
        try:
            yield from of_it()
        except UserError as e:
            yield error(name, str(e), "see the message")
        except Exception as e:
            yield error(
                name,
                f"{type(e).__name__}: {e}",
                "correct it, or report it if this machine is not the cause",
            )


# -- this machine and its cluster


def check_versions() -> Iterator[Finding]:
    """The versions of Python and of the packages, against the supported ones."""
    for name in filter(installed, NEWEST):
        found, newest = installed(name) or "", version_tuple(NEWEST[name])
        for problem in too_old(name):
            yield error("versions", *problem.split(": ", 1))
        yield warning_if(
            version_tuple(found)[: len(newest)] > newest,
            "versions",
            f"{name} {found} (the newest tested version is {NEWEST[name]})",
            "docs/versions.md lists the tested versions; install one if something fails",
        )
    yield ok("versions", f"clip-train's code {code_version()}")


def check_ranks() -> Iterator[Finding]:
    yield ok("ranks", detect(os.environ).describe())


def check_devices() -> Iterator[Finding]:
    require_usable_gpu(os.environ)
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
        yield warning_if(
            free < 0.9 * total,
            "devices",
            f"{torch.cuda.get_device_name(index)} {index}, {memory}",
            "another process holds its memory: nvidia-smi shows which",
        )


def check_health() -> Iterator[Finding]:
    """The GPUs of this node as NVML sees them: how many, and in which state."""
    yield from health_of_gpus(open_nvml(), expected_gpus(os.environ))


def health_of_gpus(nvml: Nvml | None, expected: int) -> Iterator[Finding]:
    if nvml is None:
        return
    count = nvml.count()
    if count < expected and not nvml.is_divided():
        yield error(
            "health",
            f"NVML sees {count} of {expected} GPUs",
            "one has fallen off the bus: dmesg | grep -i xid; restart the node, or exclude it",
        )
    for index, state in enumerate(nvml.states()):
        if state is None:
            yield error(
                "health",
                f"GPU {index} does not answer NVML",
                "it has fallen off the bus: dmesg | grep -i xid; restart the node, or exclude it",
            )
            continue
        problems = state.problems()
        for problem, remedy in problems:
            yield warning("health", f"GPU {state.index} ({state.name}): {problem}", remedy)
        if not problems:
            heat = "" if state.temperature_celsius is None else f", {state.temperature_celsius} C"
            clock = "" if state.sm_mhz is None else f", {state.sm_mhz} MHz"
            yield ok("health", f"GPU {state.index} ({state.name}){clock}{heat}")


def expected_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Of this node: those that Slurm has given to the job, else those that the kernel has devices
    for, which a GPU keeps after it has failed."""
    given = environ.get("SLURM_GPUS_ON_NODE", "")
    if given.isdigit():
        return int(given)
    return len([*root.glob("dev/nvidia[0-9]*")])


def check_group(all_nodes: bool = False) -> Iterator[Finding]:
    """A process group in processes of its own: over this machine's devices (two ranks on CPU), or
    with one rank on each node of a Slurm job."""
    nodes, ranks = os.environ.get("SLURM_JOB_NUM_NODES"), torch.cuda.device_count() or 2
    start = [
        sys.executable,
        *f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split(),
    ]
    if all_nodes and nodes is None:
        raise UserError(
            "--all-nodes needs a Slurm job: salloc --nodes N, then the same line; or put it into a "
            "batch script"
        )
    if all_nodes:
        options = ["--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=1"]
        start = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", *options, sys.executable]
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    # an empty part would be the working directory, where a user's random.py may be
    paths = [str(ROOT), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # the ranks give up by themselves before
    done = subprocess.run(
        [*start, "-m", __name__],
        env=environ,
        capture_output=True,
        text=True,
        timeout=GROUP_SECONDS,
        check=False,
    )
    if done.returncode:
        lines = [text for text in (done.stdout + done.stderr).splitlines() if "rror" in text]
        yield error(
            "process group",
            (lines or ["it failed without a message"])[0][:600],
            "check NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, /etc/hosts and the firewall",
        )
        return
    found = json.loads(next(text for text in done.stdout.splitlines() if text.startswith("{")))
    yield warning_if(
        found["device"] == "cuda" and found["all_reduce"] < 2e9,
        "process group",
        f"{len(found['nodes'])} ranks, all-reduce of {REDUCED_BYTES[found['device']] >> 20} MiB at "
        f"{found['all_reduce'] / 1e9:.2f} GB/s",
        "slow for GPUs: check nvidia-smi topo -m",
    )
    # without `all_nodes` they are this node's, which other checks have looked at
    for node, problem in found["problems"] if all_nodes else ():
        yield warning("health", f"{node}: {problem}", f"exclude it (--exclude={node})")
    # a slow node is slow with all others; with two nodes, one cannot tell which is slow
    usual = statistics.median(found["rates"])
    for node, rate in zip(found["nodes"], found["rates"], strict=True) if all_nodes else ():
        yield warning_if(
            rate < usual / 2,
            "nodes",
            f"{node} exchanges {rate / 1e9:.3f} GB/s with another node, the median node "
            f"{usual / 1e9:.3f} GB/s",
            f"exclude it (--exclude={node}) and check its network",
        )
    slow_pairs = [pair for pair in found["pairs"] if pair[2] < usual / 2] if all_nodes else []
    for one, other, rate in sorted(slow_pairs, key=lambda pair: pair[2])[:PAIRS_SHOWN]:
        two = [found["nodes"][rank] for rank in (one, other)]
        yield warning(
            "links",
            f"{two[0]} and {two[1]} exchange {rate / 1e9:.3f} GB/s, the median node "
            f"{usual / 1e9:.3f} GB/s",
            "check the link between them; if one of the two is in many such lines, exclude it",
        )


def check_limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield warning_if(
        files < 4096,
        "limits",
        f"{files} open files (ulimit -n)",
        "ulimit -n 65536: loader workers and sockets need them",
    )
    yield from check_cores(torch.cuda.device_count())
    yield from check_locked_memory()


def check_shared_memory(needed: int = 1 << 30) -> Iterator[Finding]:
    """needed: bytes for the loader workers; 1 GiB without a recipe."""
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        yield warning_if(
            free < needed,
            "limits",
            f"/dev/shm has {free / 2**20:,.0f} MiB free; the loader workers of all ranks on this "
            f"machine take {needed / 2**20:,.0f} MiB",
            "remove files that ended jobs left in it (ls -l /dev/shm), mount it larger (docker: "
            "--shm-size=16g), or set data.workers=0: batches pass through it",
        )


def check_slurm() -> Iterator[Finding]:
    """Settings of the cluster that prevent a job from requeuing itself."""
    shown = run_command("scontrol", "show", "config").output
    if not shown:
        if "SLURM_CONF" in os.environ:
            yield warning(
                "slurm",
                "scontrol does not answer",
                "check that this is a login node, and SLURM_CONF",
            )
        return
    config = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", shown, re.MULTILINE))
    yield ok("slurm", f"Slurm {config.get('SLURM_VERSION', '?')}")
    for name, bad, effect, remedy in SLURM_SETTINGS:
        if re.fullmatch(bad, config.get(name, "")):
            yield warning("slurm", f"{name}={config[name]}: {effect}", remedy)


MACHINE: tuple[tuple[str, Check], ...] = (
    ("versions", check_versions),
    ("devices", check_devices),
    ("health", check_health),
    ("ranks", check_ranks),
    ("process group", check_group),
    ("limits", check_limits),
    ("slurm", check_slurm),
)


# -- a recipe


def check_recipe(config: Recipe) -> Iterator[Finding]:
    """The checks of `train --dry-run` before its plan: the recipe, its shards, captions, labels."""
    world = max(1, torch.cuda.device_count())
    lacking = config.engine.on_this_machine(world).mistakes_here()
    for mistake in [*lacking, *config.log.mistakes_here()]:
        yield warning("recipe", mistake, "see the message; ignore it if the run has GPUs")
    quickly = {"attempts": min(3, config.storage.attempts)}
    resolved = resolve(config.updated(storage=quickly), world)
    plan, source = resolved.plan, resolved.source
    assert source is not None  # read_data
    streams, steps = resolved.config.data.lanes, resolved.config.steps
    yield ok(
        "recipe",
        f"global batch {plan.global_size} = {world} ranks x {plan.per_rank}, {streams} streams; "
        f"{steps} steps",
    )
    yield ok(
        "shards",
        f"data.train ({config.data.train}): the first sample is {source.first_key}: "
        f"{source.caption_start!r}",
    )
    yield warning_if(
        bool(source.index.unindexed) and config.data.verify != "off",
        "index",
        source.index.describe(),
        f"clip-train index '{config.data.train}'",
    )
    for note in resolved.notes():
        said, _, remedy = note.rpartition("; ")
        yield warning("recipe", said, remedy)
    yield from check_shared_memory(
        shared_bytes(
            resolved.config.data,
            config.batch.sizes,
            shape_of_sample(resolved.architecture),
            world,
        )
    )
    shards = shards_to_read(source.index.shards)
    if not shards:
        return
    seen = [index_shard(shard, config.data.caption_key) for shard in shards]
    num = len(source.index.shards)
    pairs = describe(
        [each.captions for each in seen], [each.used for each in seen], [plan.global_size], num
    ).strip()
    yield warning_if(
        bool(pairs) and config.loss.groups is None,
        "captions",
        f"from {len(shards)} of {num} shards: {pairs or 'few samples have equal captions'}",
        "set loss.groups=caption, and such pairs are not negatives of each other",
    )
    transparent, looked = count_transparent(first_samples(source.index, config.storage, MAX_SHARDS))
    yield warning_if(
        transparent > 0 and "alpha" not in config.data.model_fields_set,
        "images",
        f"{transparent} of the first {looked} images have transparent pixels",
        "they are blended with white; OpenCLIP ignores the transparency: choose data.alpha=white "
        "or data.alpha=drop",
    )


def shards_to_read(shards: Sequence[str]) -> list[str]:
    """Local shards from the whole list, evenly spaced, that can be read quickly."""
    count = min(len(shards), MAX_SHARDS)
    some = [shards[number * len(shards) // count] for number in range(count)]
    some = [shard for shard in some if Path(shard).is_file()]
    while some and sum(Path(shard).stat().st_size for shard in some) >= MAX_SHARD_BYTES:
        some.pop()
    return some


def count_transparent(samples: Iterable[TarSample]) -> tuple[int, int]:
    """The images with transparent pixels among the first samples, and how many were decoded."""
    transparent = looked = 0
    for sample in itertools.islice(samples, LOOK_AT):
        with contextlib.suppress(InvalidSample):
            transparent += is_transparent(image_bytes(sample.members))
            looked += 1
    return transparent, looked


def check_run_dir(config: Recipe) -> Iterator[Finding]:
    if shutil.which("sbatch") is not None and run_command("scontrol", "show", "config").output:
        yield from check_places(config, load_site(None))
    stop_file = config.run_dir.absolute() / STOP_FILE
    if stop_file.exists():
        yield error("run", f"{stop_file} exists: training would stop at once", f"rm {stop_file}")


def check_rates(config: Recipe) -> Iterator[Finding]:
    """Write a file to the disk of run.dir and to the store, and read it from the store."""
    run_dir = config.run_dir.absolute()
    folder = next(parent for parent in (run_dir, *run_dir.parents) if parent.is_dir())
    data = os.urandom(RATE_BYTES)
    name = f".doctor-rate-{os.getpid()}"
    try:
        seconds = measure_write(LocalStorage(folder), name, data)
    except OSError:  # `check_disk` says what is wrong
        return
    yield warning_if(
        RATE_BYTES / seconds < SLOW_DISK,
        "rates",
        f"run.dir ({run_dir}) is written at {RATE_BYTES / seconds / 1e6:,.0f} MB/s",
        "choose a faster disk for run.dir: each save is written there first",
    )
    if config.checkpoint.remote is None:
        return
    try:
        storage = open_storage(config.checkpoint.remote, patience_seconds=5.0)
        up, down = measure_store(storage, name, data[: RATE_BYTES // 8])
    except (OSError, ClipTrainError):  # `check_store` says what is wrong
        return
    yield warning_if(
        min(up, down) < SLOW_STORE,
        "rates",
        f"checkpoint.remote ({storage.url}) is written at {up / 1e6:,.1f} MB/s and read at "
        f"{down / 1e6:,.1f} MB/s, by one request",
        "check the network to the store; a save that is slower than checkpoint.every_steps is "
        "skipped",
    )


def measure_write(storage: Storage, name: str, data: bytes) -> float:
    """Seconds to write these bytes, and to have them on the disk; the file is removed."""
    start = time.perf_counter()
    try:
        storage.put_bytes(name, data)
        return time.perf_counter() - start
    finally:
        storage.delete(name)


def measure_store(storage: Storage, name: str, data: bytes) -> tuple[float, float]:
    """Bytes per second of writing and reading; the file is removed."""
    try:
        start = time.perf_counter()
        storage.put_bytes(name, data)
        written = time.perf_counter()
        storage.read_bytes(name)
        read = time.perf_counter()
    finally:
        storage.delete(name)
    return len(data) / (written - start), len(data) / (read - written)


RECIPE = {"recipe": check_recipe, "run": check_run_dir, "rates": check_rates}


def meet() -> None:
    """One rank of a process group: rank 0 prints how fast it reduces, and each rank's rate beside
    one other rank."""
    env = detect(os.environ)
    device, _ = take_device(env)
    rendezvous.start(env, device, Heartbeat(env), rendezvous_seconds=100, group_seconds=60)
    found: dict[str, Any] = {
        "device": device.type,
        "nodes": dist.gather_objects(node_name()),
        "all_reduce": rendezvous.measure_all_reduce(device),
    }
    keep_busy(device)  # clocks say something of a GPU that computes
    problems = [f.message for f in [*check_health(), *check_shared_memory()] if f.level != "ok"]
    gathered = dist.gather_objects(problems)
    by_pair = measure_pairs(device)
    found["problems"] = [
        (node, problem)
        for node, those in zip(found["nodes"], gathered, strict=True)
        for problem in those
    ]
    found["pairs"] = [
        (one, other, rate)
        for one, rates in enumerate(by_pair)
        for other, rate in rates.items()
        if one < other
    ]
    found["rates"] = [statistics.median_high(of.values() or [0.0]) for of in by_pair]
    if dist.is_main():
        print(json.dumps(found), flush=True)
    dist.barrier()
    end_process(0)


def keep_busy(device: torch.device, seconds: float = 0.5) -> None:
    """Multiply matrices on a GPU for so long."""
    if device.type == "cuda":
        x = torch.ones(4096, 4096, device=device, dtype=torch.bfloat16)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            x @ x
            torch.cuda.synchronize(device)


def measure_pairs(device: torch.device) -> list[dict[int, float]]:
    """By rank, by each other rank: bytes per second each way between the two. Collective.

    A tournament: in each round every rank has another partner, and all pairs exchange at once.
    """
    x = torch.zeros(REDUCED_BYTES[device.type] // 4, device=device)
    y, here, W = torch.empty_like(x), dist.rank(), dist.world_size()
    times_here: dict[int, float] = {}  # seconds of an exchange, by partner
    rounds = W + 1 - W % 2  # odd: then each pair has one round
    for number in range(rounds):
        partner = (number - here) % rounds  # for which `here` is the partner
        is_paired = partner < W and partner != here
        seconds = float("inf")
        for _ in range(5):  # the first opens the connection, others may be disturbed
            dist.barrier()
            start = time.perf_counter()
            if is_paired:
                both_ways = [
                    torch_dist.P2POp(torch_dist.isend, x, partner),
                    torch_dist.P2POp(torch_dist.irecv, y, partner),
                ]
                for work in torch_dist.batch_isend_irecv(both_ways):
                    work.wait()
                y.sum().item()  # waits for the device
            seconds = min(seconds, time.perf_counter() - start)
        if is_paired:
            times_here[partner] = seconds
    times = dist.gather_objects(times_here)
    size = REDUCED_BYTES[device.type]
    # the slower one of a pair: a sender is done when its kernel has the bytes
    return [
        {other: size / max(seconds, times[other][rank]) for other, seconds in by_partner.items()}
        for rank, by_partner in enumerate(times)
    ]


if __name__ == "__main__":
    meet()
