"""The ranks meet in a store. All of them join and compare recipe and code, or all learn which rank
failed and end.

Rank 0 holds the store. The process group forms through it afterwards.
"""

import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import resource
import socket
import time
from collections.abc import Sequence
from concurrent import futures
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from clip_train import dist
from clip_train.errors import RankError, RemoteRankError, RendezvousError, UserError
from clip_train.processes import node_name
from clip_train.torch_internals import backends
from launcher.runtime.environment import (
    BACKENDS,
    LAUNCHER,
    SLURM_STEP,
    VISIBLE,
    RankEnv,
    gpu_identity,
)
from launcher.runtime.heartbeat import JOIN_IS_OVER, Heartbeat
from launcher.runtime.log import log
from launcher.slurm.scheduler import run_command

RESOLVE_SECONDS = 10.0  # for a name that cannot be resolved yet
# In the environment of each pod of Kubernetes. There the name of a pod exists once that pod has a
# node, so it may take as long as the pod.
IN_POD = "KUBERNETES_SERVICE_HOST"
LATE_SECONDS = 5.0  # for gloo's own error, which names the address that it could not reach
CAUSE_SECONDS = 20.0  # until the death of a rank is known, which may be why no group has formed
LOOPBACK = ("127.0.0.1", "localhost")
REMIND_SECONDS = 30.0
ANSWER_SECONDS = 15.0  # of the store to one request
OPEN_FILES = 65536
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("clip_train", "launcher")
# Bytes of the all-reduce at the start, by device: enough on GPUs to show a slow network.
REDUCED_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}


def serve(env: RankEnv, seconds: float) -> TCPStore:
    """Rank 0's store; on loopback only, if the other ranks connect there. RendezvousError if the
    port is taken.

    It holds a socket for each rank, so it raises the limit of open files. The soft limit is usually
    1024, and Slurm brings it along from the shell that submitted. Not above OPEN_FILES: where the
    hard limit is 2^30, as in containers, programs that go through all possible files take minutes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they claim
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        listener = None
        if env.master_addr in LOOPBACK:
            listener = socket.create_server(("127.0.0.1", env.master_port)).detach()
        return TCPStore(
            env.master_addr,
            env.master_port,
            is_master=True,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener,
        )
    except (RuntimeError, OSError) as e:
        raise RendezvousError(
            f"rank 0 on {node_name()} cannot listen at MASTER_PORT ({env.master_port}): {e}; "
            "set MASTER_PORT to another port on all ranks, or end the process that has it; under "
            "torchrun start again with another --rdzv-endpoint"
        ) from e


def connect(env: RankEnv, heartbeat: Heartbeat, seconds: float) -> Store:
    """A client of rank 0's store; a second one starts the heartbeat. RendezvousError.

    seconds: the limit for rank 0 to appear, and for each wait for a key.
    """
    resolve(env, seconds)
    server = serve(env, seconds) if env.rank == 0 else None

    def client(seconds: float) -> Store:
        store = TCPStore(
            env.master_addr,
            env.master_port,
            is_master=False,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        return PrefixStore(env.job, store)  # ranks of another job change nothing here

    try:
        store = client(seconds)
    except DistNetworkError as e:
        raise RendezvousError(
            f"rank 0 did not answer at {env.master_addr}:{env.master_port} within "
            f"launch.rendezvous_seconds ({seconds:.0f}): {e}; check that it runs, and that "
            f"{node_name()} can reach that port"
        ) from e
    heartbeat.open(client(ANSWER_SECONDS), server=server)
    return store


def resolve(env: RankEnv, seconds: float) -> None:
    """RendezvousError if this node cannot resolve the name of rank 0's node. seconds: the limit in a
    pod."""
    end = time.monotonic() + (seconds if IN_POD in os.environ else RESOLVE_SECONDS)
    while True:
        try:
            socket.getaddrinfo(env.master_addr, env.master_port)
            return
        except OSError as e:
            if time.monotonic() > end:
                raise RendezvousError(
                    f"rank {env.rank} on {node_name()} cannot resolve MASTER_ADDR "
                    f"({env.master_addr}), rank 0's node: {e.strerror}; correct DNS or /etc/hosts "
                    f"on {node_name()}, or set MASTER_ADDR to an IP address",
                    node_suspect=True,
                ) from e
        time.sleep(1.0)


def meet(
    env: RankEnv,
    heartbeat: Heartbeat,
    store: Store,
    seconds: float,
    recipe: dict[str, Any] | None = None,
    gpu: str = "",
) -> None:
    """Returns once all ranks have joined with the same code and the same resolved recipe.

    gpu: `gpu_identity` of this rank's device.

    RemoteRankError if one has failed, RendezvousError after `seconds`, UserError if this rank
    differs from rank 0, or counts other ranks, RankError if another rank has this one's GPU.
    """
    # the first rank to come says how many there are: with two counts, nobody would be complete
    world = int(store.compare_set("world", "", str(env.world_size)))
    if world != env.world_size:
        raise UserError(
            f"{node_name()} counts {env.world_size} ranks in all, and a node that came before it "
            f"{world}: start the same number on every node (--ranks, --nodes, WORLD_SIZE)"
        )
    if gpu:
        # the first rank to ask has it
        holder = int(store.compare_set(f"gpu/{gpu}", "", str(env.rank)))
        if holder != env.rank:
            raise RankError(
                f"ranks {holder} and {env.rank} have the same GPU ({gpu}) on {node_name()}: "
                f"{VISIBLE} is {os.environ.get(VISIBLE, 'not set')} for {env.local_world_size} "
                "ranks there; start one rank for each GPU, or show each rank its own"
            )
    end = time.monotonic() + seconds
    here = versions()
    for section, values in (recipe or {}).items():
        here |= {f"{section}.{key}": value for key, value in values.items()}
    here = json.loads(json.dumps(here))  # as rank 0's arrives: lists for tuples
    if env.rank == 0:
        store.set("run", json.dumps(here))
    store.set(f"here/{env.rank}", node_name())
    if store.add("here", 1) == env.world_size:
        store.set(JOIN_IS_OVER, "1")
    while not store.check([JOIN_IS_OVER]):
        with contextlib.suppress(DistStoreError):  # timed out
            store.wait([JOIN_IS_OVER], datetime.timedelta(seconds=min(seconds, REMIND_SECONDS)))
            break
        if time.monotonic() > end:
            raise RendezvousError(
                f"within launch.rendezvous_seconds ({seconds:.0f}) {joined(env, store)}; see their "
                "nodes' logs, or allow more time if ranks start slowly"
            )
        if env.rank == 0:
            # the user has not set what `clip-train train` sets
            hint = f". Ranks counted by {env.found}: unset it if this is all"
            log(f"waiting: {joined(env, store)}{'' if LAUNCHER in os.environ else hint}")
    if heartbeat.wait(0.0) is not None:
        raise RemoteRankError(str(heartbeat.abort))
    heartbeat.all_joined = True
    there = json.loads(store.get("run"))
    differences = [
        f"{key}: {there.get(key)!r} against {here.get(key)!r}"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
    if differences:
        raise UserError(
            f"this rank differs from rank 0 on {node_of(store, 0)}: {'; '.join(differences)} here; "
            "start all ranks with the same command, from the same folder"
        )


def joined(env: RankEnv, store: Store) -> str:
    """A text: how many ranks have joined, and which are missing."""
    world = range(env.world_size)
    absent = [rank for rank in world if not store.check([f"here/{rank}"])]
    nodes = {node_of(store, rank) for rank in world if rank not in absent}
    nodelist = os.environ.get("SLURM_STEP_NODELIST", "")
    listed = run_command("scontrol", "show", "hostnames", nodelist).output
    silent = [node for node in listed.split() if env.found == SLURM_STEP and node not in nodes]
    return (
        f"{len(world) - len(absent)} of {len(world)} ranks have joined at "
        f"{env.master_addr}:{env.master_port}; missing: rank{'s' * (len(absent) > 1)} "
        f"{first_ranks(absent)}{'; no rank has joined from ' * bool(silent)}{', '.join(silent)}"
    )


def first_ranks(ranks: Sequence[object]) -> str:
    return f"{', '.join(map(str, ranks[:20]))}{', ...' * (len(ranks) > 20)}"


def node_of(store: Store, rank: int) -> str:
    """The node of a rank that has joined."""
    return store.get(f"here/{rank}").decode()


# -- the same recipe and code on all ranks


def code_version() -> str:
    """A hash (12 hex digits) of all sources: a git commit does not show changed files."""
    digest = hashlib.sha256()
    for package in SOURCES:
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(
                file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0"
            )
    return digest.hexdigest()[:12]


def commit() -> str | None:
    """The git commit, with `-dirty` if files differ. Frozen code has the commit of its submission.
    None if there is none."""
    if (ROOT / ".git").exists():
        describe = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
        return run_command(*describe).output or None
    with contextlib.suppress(OSError, ValueError):
        return json.loads((ROOT.parent / "submit.json").read_text()).get("commit")
    return None


def versions() -> dict[str, str]:
    """The versions that must be equal on all ranks: the code and every package that it needs."""
    found = {"clip-train's code": code_version(), "Python": platform.python_version()}
    needed = ["torch"]
    with contextlib.suppress(PackageNotFoundError):  # run from its folder
        needed = [line for line in requires("clip-train") or () if "extra ==" not in line]
    for package in (re.split(r"[^\w.-]", line)[0] for line in needed):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


# -- the process group


def start(
    env: RankEnv,
    device: torch.device,
    heartbeat: Heartbeat,
    *,
    recipe: dict[str, Any] | None = None,
    rendezvous_seconds: float = 600.0,
    group_seconds: float = 180.0,
    timeout_seconds: float = 1800.0,
) -> None:
    """Meet the other ranks within `rendezvous_seconds`, then form the process group within
    `group_seconds`; RendezvousError. RemoteRankError if one of them fails before.

    recipe: as resolved; UserError if a rank's differs from rank 0's, or its code does.
    timeout_seconds: of every collective.
    """
    store: Store = torch_dist.HashStore()  # alone: no port to lose
    if env.world_size > 1:
        store = connect(env, heartbeat, rendezvous_seconds)
        meet(env, heartbeat, store, rendezvous_seconds, recipe, gpu_identity(device))
    pool = futures.ThreadPoolExecutor(1)  # NCCL may wait for ever, and this thread must not
    forming = pool.submit(form_group, env, device, store, group_seconds, timeout_seconds)
    start = time.monotonic()
    while not forming.done() and time.monotonic() < start + group_seconds + LATE_SECONDS:
        time.sleep(0.01)
    try:
        speed = forming.result(0)
    except (RuntimeError, futures.TimeoutError) as e:
        seconds = time.monotonic() - start
        if heartbeat.wait(CAUSE_SECONDS - seconds) is not None:
            raise RemoteRankError(str(heartbeat.abort)) from e
        absent = [
            f"{rank} on {node_of(store, rank)}"
            for rank in range(env.world_size)
            if env.world_size > 1 and not store.check([f"formed/{rank}"])
        ]
        missing = (
            f"missing: rank {first_ranks(absent)}" if absent else "its first all-reduce did not end"
        )
        raise RendezvousError(
            f"the ranks have joined, but their process group did not form in {seconds:.0f} s "
            f"(launch.group_seconds is {group_seconds:.0f}); {missing}. Can their "
            "nodes reach each other, and is GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME needed? (gloo "
            "needs it where /etc/hosts gives a node's own name a loopback address) "
            f"`clip-train doctor --all-nodes` tries pairs of nodes. {e}"
        ) from e
    if env.world_size > 1 and env.rank == 0:
        log(
            "the process group has formed; all-reduce of "
            f"{REDUCED_BYTES[device.type] >> 20} MiB at {speed / 1e9:.2f} GB/s"
        )
    set_timeout(timeout_seconds)


def form_group(
    env: RankEnv,
    device: torch.device,
    store: Store,
    seconds: float,
    later_seconds: float | None = None,
) -> float:
    """Form the process group, and try it; bytes per second of an all-reduce.

    later_seconds: of the collectives after that, for `set_timeout`.
    """
    if torch_dist.get_debug_level() == torch_dist.DebugLevel.DETAIL and later_seconds is not None:
        seconds = later_seconds  # it cannot be changed; the caller limits how long this takes
    torch_dist.init_process_group(
        BACKENDS[device.type],
        store=PrefixStore("group", store.clone()),  # type: ignore[attr-defined]
        rank=env.rank,
        world_size=env.world_size,
        timeout=datetime.timedelta(seconds=seconds),
        device_id=device if device.type == "cuda" else None,
    )
    store.set(f"formed/{env.rank}", "")
    return measure_all_reduce(device)


def measure_all_reduce(device: torch.device) -> float:
    """Bytes per second of an all-reduce of REDUCED_BYTES, the second of two. Collective."""
    x = torch.zeros(REDUCED_BYTES[device.type] // 4, device=device)
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        dist.all_reduce_sum(x)
        x.sum().item()  # waits for the device
        seconds = time.perf_counter() - start
    return REDUCED_BYTES[device.type] / seconds


def set_timeout(seconds: float) -> None:
    """Set the timeout of every later collective in all groups.

    Under TORCH_DISTRIBUTED_DEBUG=DETAIL a group checks each collective with a group of its own,
    which keeps its first timeout: see `form_group`.
    """
    timeout = datetime.timedelta(seconds=seconds)
    for backend in backends():
        # under TORCH_DISTRIBUTED_DEBUG=DETAIL each backend is wrapped
        getattr(backend, "wrapped_pg", backend).set_timeout(timeout)
