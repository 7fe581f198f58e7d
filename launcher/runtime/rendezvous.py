"""The ranks meet in a store: all come and agree on recipe and code, or all learn which rank has failed, and end.

torchrun's agent holds the store, else rank 0. The process group forms through it afterwards.
"""

from __future__ import annotations

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
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from clip_train.errors import RemoteRankError, UserError
from launcher.runtime.environment import RankEnv, backend
from launcher.runtime.heartbeat import Heartbeat
from launcher.runtime.log import log
from launcher.runtime.verdict import node_name

LOOPBACK = ("127.0.0.1", "localhost")
REMIND_SECONDS = 30.0
ANSWER_SECONDS = 15.0  # of the store to one request
OPEN_FILES = 65536
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("clip_train", "launcher")


def raise_open_files() -> None:
    """As many as this process may have: whoever holds the store holds a socket for each rank.

    The soft limit is usually 1024, and Slurm brings it along from the shell that submitted. Not above OPEN_FILES: where
    the hard limit is 2^30, as in containers, programs that go through all possible files take minutes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they claim
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def serve(host: str, port: int, seconds: float) -> TCPStore:
    """A store in this process, on loopback only where that is where the ranks look for it. port 0: a free one."""
    listener = socket.create_server(("127.0.0.1", port)).detach() if host in LOOPBACK else None
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener,
    )


def connect(env: RankEnv, heartbeat: Heartbeat, seconds: float) -> Store:
    """Two clients of the store: one starts the heartbeat, the other is returned.

    seconds: for the store to be there, and for what waits in it.
    """

    def client(seconds: float) -> Store:
        timeout = datetime.timedelta(seconds=seconds)
        return TCPStore(
            env.master_addr,
            env.master_port,
            is_master=False,
            timeout=timeout,
            wait_for_workers=False,
        )

    holds = env.rank == 0 and not env.agent_store
    raise_open_files()
    store = serve(env.master_addr, env.master_port, seconds) if holds else client(seconds)
    heartbeat.open(keys_of_ranks(client(ANSWER_SECONDS)), server=store if holds else None)
    return keys_of_ranks(store)


def keys_of_ranks(store: Store) -> Store:
    """This attempt's: torchrun keeps its store when it restarts ranks."""
    return PrefixStore(f"ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def meet(env: RankEnv, heartbeat: Heartbeat, store: Store, seconds: float) -> None:
    """Returns once all ranks have come. RemoteRankError where one has failed, RuntimeError after `seconds`."""
    end = time.monotonic() + seconds
    if store.add("here", 1) == env.world_size:
        store.set("all", "1")  # `Heartbeat.claim` does so as well
    while not store.check(["all"]):
        with contextlib.suppress(DistStoreError):  # timed out
            store.wait(["all"], datetime.timedelta(seconds=min(seconds, REMIND_SECONDS)))
            break
        missing = f"{store.add('here', 0)} of {env.world_size} ranks have come to {env.master_addr}:{env.master_port}"
        if time.monotonic() > end:
            raise RuntimeError(
                f"Timed out waiting for the other ranks: {missing} within {seconds:.0f} s"
            )
        if env.rank == 0:
            log(f"waiting: {missing}, by {env.found}. If there are no others, unset what says so")
    if heartbeat.wait(0.0) is not None:
        raise RemoteRankError(str(heartbeat.abort))
    heartbeat.came()


# -- the same recipe and code on all ranks


def code_version() -> str:
    """Twelve hex digits over all sources of this project: a git commit does not know of changed files."""
    digest = hashlib.sha256()
    for package in SOURCES:
        for file in sorted((ROOT / package).rglob("*.py")):
            digest.update(
                file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0"
            )
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """What has to be the same on all ranks beside the recipe: the code, and every package that it builds on."""
    found = {"clip-train's code": code_version(), "Python": platform.python_version()}
    needed = ["torch"]
    with contextlib.suppress(PackageNotFoundError):  # run from its folder
        needed = [line for line in requires("clip-train") or () if "extra ==" not in line]
    for package in (re.split(r"[^\w.-]", line)[0] for line in needed):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def check_same(store: Store, rank: int, recipe: dict[str, Any], seconds: float) -> None:
    """UserError on a rank that differs from rank 0. recipe: as resolved. seconds: to wait for rank 0."""
    keys = {
        f"{section}.{key}": value
        for section, values in recipe.items()
        for key, value in values.items()
    }
    here = json.dumps(versions() | keys)
    if rank == 0:
        return store.set("recipe", json.dumps([node_name(), here]))
    store.wait(["recipe"], datetime.timedelta(seconds=seconds))
    node, there = json.loads(store.get("recipe")) or (
        "",
        here,
    )  # none: a rank has failed, as `meet` will find
    one, other = json.loads(there), json.loads(here)
    found = [
        f"{key}: {one.get(key)!r} against {other.get(key)!r}"
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key)
    ]
    if found:
        raise UserError(
            f"this rank differs from rank 0 on {node}: {'; '.join(found)} here; start all with the same line, from "
            "the same folder"
        )


# -- the process group


def start(
    env: RankEnv,
    device: torch.device,
    heartbeat: Heartbeat,
    *,
    recipe: dict[str, Any] | None = None,
    timeout_seconds: float = 1800.0,
) -> None:
    """Meet the other ranks and form the process group. RemoteRankError where one of them fails before.

    recipe: as resolved; UserError where a rank's differs from rank 0's, or its code. timeout_seconds: of every
    collective, until `set_timeout`.
    """
    store: Store = torch_dist.HashStore()  # alone: no port to lose
    if env.world_size > 1:
        store = connect(env, heartbeat, timeout_seconds)
        if recipe is not None:
            check_same(store, env.rank, recipe, timeout_seconds)
        meet(env, heartbeat, store, timeout_seconds)
    torch_dist.init_process_group(
        backend(device),
        store=PrefixStore("group", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )


def set_timeout(seconds: float) -> None:
    """Of every collective from now on, in all groups: the first may take long, the later ones may not."""
    if not torch_dist.is_initialized():
        return
    for group in list(torch_dist.distributed_c10d._world.pg_map):
        torch_dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def stop() -> None:
    """Leave the process group, if there is one."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
