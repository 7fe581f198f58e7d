"""Before there is a process group: do all ranks come, or does one refuse? Its mistake is then told once, and all leave.

Every rank sees mistakes of its own: another recipe on its disk, no GPU, a variable. Without a word to the others they
would wait for it until the rendezvous times out, and say nothing of why.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time

import torch
import torch.distributed as torch_dist
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from clip_train.errors import ClipTrainError, UserError
from launcher.runtime.environment import RankEnv, backend
from launcher.runtime.error_reports import node_name

GO_ON = "go on"
LOOPBACK = ("127.0.0.1", "localhost")
REMIND_SECONDS = 30.0
REFUSING_SECONDS = 120.0  # to reach the others, and for them to hear: imports may take one much longer than another


def open_store(env: RankEnv, seconds: float) -> Store:
    """The one through which the process group will form: torchrun's agent holds it, else rank 0."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = None
    if env.rank == 0 and not agent and env.master_addr in LOOPBACK:  # else it listens on all interfaces
        listener = socket.create_server(("127.0.0.1", env.master_port)).detach()
    return TCPStore(
        env.master_addr,
        env.master_port,
        is_master=env.rank == 0 and not agent,
        timeout=datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener,
    )


def meet(env: RankEnv, seconds: float) -> Store:
    """Returns once all ranks are there; the store is for the process group.

    UserError, already told, where one of them refuses; RuntimeError where some do not come within `seconds`.
    """
    store = open_store(env, seconds)
    meeting = PrefixStore("clip-train", store)
    if meeting.add("here", 1) == env.world_size:
        meeting.compare_set("word", "", GO_ON)
    _wait_for_word(meeting, env, seconds)
    word = meeting.get("word").decode()
    if word != GO_ON:
        _leave(meeting, env)
        error = UserError(word)
        error.told = True
        raise error
    return store


def _wait_for_word(meeting: Store, env: RankEnv, seconds: float) -> None:
    """Rank 0 looks, and reminds of who is missing; the others are woken."""
    end, remind = time.monotonic() + seconds, time.monotonic() + REMIND_SECONDS
    try:
        if env.rank > 0:
            return meeting.wait(["word"], datetime.timedelta(seconds=seconds))
    except DistStoreError:
        raise RuntimeError(f"Timed out waiting for the other ranks: {_missing(meeting, env, seconds)}") from None
    while not meeting.check(["word"]):
        time.sleep(0.02)
        if time.monotonic() > end:
            raise RuntimeError(f"Timed out waiting for the other ranks: {_missing(meeting, env, seconds)}")
        if time.monotonic() > remind:
            remind += REMIND_SECONDS
            told = _missing(meeting, env, REMIND_SECONDS)
            say(f"waiting: {told}, by {env.found}. If there are no others, unset what told so")


def _missing(meeting: Store, env: RankEnv, seconds: float) -> str:
    here, place = meeting.add("here", 0), f"{env.master_addr}:{env.master_port}"
    return f"{here} of {env.world_size} ranks have come to {place} within {seconds:.0f} s"


def refuse(env: RankEnv, error: ClipTrainError) -> None:
    """Tell all ranks of a mistake that this one has seen. The first that refuses prints it, and no other."""
    if env.world_size == 1:
        return
    mine = f"rank {env.rank} on {node_name()}: {error}"
    try:
        meeting = PrefixStore("clip-train", open_store(env, REFUSING_SECONDS))
        first = meeting.compare_set("word", "", mine).decode()
        if first == mine:
            say(f"error: [rank {env.rank} on {node_name()}] {error}")
        error.told = True
        _leave(meeting, env)
    except RuntimeError:  # rank 0 has gone, or never came: there is nobody to tell
        error.everywhere = False  # so this rank prints it


def say(message: str) -> None:
    print(f"clip-train: {message}", file=sys.stderr, flush=True)


def _leave(meeting: Store, env: RankEnv) -> None:
    """Rank 0 may hold the store: it goes last."""
    try:
        left = meeting.add("left", 1)
        end = time.monotonic() + REFUSING_SECONDS
        while env.rank == 0 and left < env.world_size and time.monotonic() < end:
            time.sleep(0.05)
            left = meeting.add("left", 0)
    except RuntimeError:
        return


def start(env: RankEnv, device: torch.device, *, timeout_seconds: float = 1800.0) -> None:
    """Meet the other ranks and join the process group. UserError, told already, where one refuses.

    timeout_seconds: of every collective, until `set_timeout`.
    """
    store = meet(env, timeout_seconds) if env.world_size > 1 else torch_dist.HashStore()  # alone: no port to lose
    torch_dist.init_process_group(
        backend(device),
        store=store,
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
