"""The store in which ranks meet: who reaches it, and what strangers make of it."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import Store, TCPStore

from clip_train.errors import RemoteRankError, RendezvousError, UserError
from launcher.runtime.environment import RankEnv, detect
from launcher.runtime.heartbeat import Heartbeat
from launcher.runtime.rendezvous import connect, meet, resolve, serve
from launcher.runtime.verdict import Failure
from tests.launcher.conftest import PATIENCE, free_port

HELLO = bytes.fromhex("16030100a8010000a40303") + bytes(160)  # of TLS


def listeners(port: int) -> list[str]:
    """Addresses, as the kernel writes them, on which somebody listens at this port."""
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return [
        line[1].partition(":")[0]
        for line in sockets
        if line[3] == "0A" and line[1].endswith(f":{port:04X}")
    ]


def world(rank: int, port: int, host: str = "127.0.0.1") -> RankEnv:
    return RankEnv(rank, 2, rank, 2, host, port, "this test")


def test_on_one_machine_it_listens_on_loopback_alone() -> None:
    for host in ("127.0.0.1", "localhost"):
        assert listeners(serve(world(0, 0, host), 5.0).port) == ["0100007F"]


def test_strangers_do_not_disturb_it() -> None:
    """One speaks TLS, one HTTP, one says nothing."""
    store = serve(world(0, 0), 5.0)
    strangers = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(3)]
    for stranger, said in zip(strangers, (HELLO, b"GET / HTTP/1.0\r\n\r\n", b""), strict=True):
        stranger.sendall(said)
    rank = TCPStore(
        "127.0.0.1", store.port, timeout=datetime.timedelta(seconds=60), wait_for_workers=False
    )
    rank.set("here", "1")
    assert store.get("here") == b"1"
    for stranger in strangers:
        stranger.close()


def joining(envs: list[RankEnv]) -> tuple[list[Heartbeat], dict[int, Store]]:
    """All ranks, connected; rank 0, which holds the store, comes last."""
    beats = [Heartbeat(env, lambda failure, trace: None) for env in envs]
    stores: dict[int, Store] = {}

    def come(rank: int) -> None:
        stores[rank] = connect(envs[rank], beats[rank], PATIENCE)

    ranks = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in (1, 0)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE)
    return beats, stores


def test_who_waits_is_woken_by_a_failure() -> None:
    """Of rank 0, before it has joined; the others are told to wait for it for hours."""
    port = free_port()
    envs = [world(rank, port) for rank in range(2)]
    beats, stores = joining(envs)
    ended = []

    def wait() -> None:
        with pytest.raises(RemoteRankError):
            meet(envs[1], beats[1], stores[1], 9999.0, {"run": {"steps": 1}})
        ended.append(True)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    beats[0].claim(Failure(0, "n", "no such shard", "FATAL", 2))
    waiting.join(PATIENCE)
    assert ended
    for beat in reversed(beats):
        beat.leave()


@pytest.mark.parametrize(
    "theirs, told",
    [
        ({}, None),
        ({"optim": {"lr": 2e-3}}, r"from rank 0 on n0: optim\.lr: 0\.001 against 0\.002 here"),
        (
            {"data": {}, "optim": {"lr": 1e-3, "x": 2}},
            r"data\.aug_scale: \[0\.9, 1\.0\] against None; optim\.x: None against 2 here",
        ),
    ],
)
def test_a_rank_that_differs_learns_in_what(monkeypatch, theirs, told) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    recipe = {"run": {"seed": 0}, "optim": {"lr": 1e-3}, "data": {"aug_scale": (0.9, 1.0)}}
    port = free_port()
    envs = [world(rank, port) for rank in range(2)]
    beats, stores = joining(envs)
    other = threading.Thread(
        target=meet, args=(envs[0], beats[0], stores[0], PATIENCE, recipe), daemon=True
    )
    other.start()
    with contextlib.nullcontext() if told is None else pytest.raises(UserError, match=told):
        meet(envs[1], beats[1], stores[1], PATIENCE, {**recipe, **theirs})
    other.join(PATIENCE)
    for beat in reversed(beats):
        beat.leave()


@pytest.mark.parametrize("gpus", [("GPU-a", "GPU-b"), ("GPU-a", "GPU-a"), ("", "")])
def test_two_ranks_on_one_gpu_are_refused(monkeypatch, gpus) -> None:
    """Whatever launcher has given both the same one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    port = free_port()
    envs = [world(rank, port) for rank in range(2)]
    beats, stores = joining(envs)
    errors: dict[int, UserError] = {}

    def come(rank: int) -> None:
        try:
            meet(envs[rank], beats[rank], stores[rank], PATIENCE, {}, gpus[rank])
        except RemoteRankError:
            pass
        except UserError as e:
            errors[rank] = e
            beats[rank].claim(Failure(rank, "n", str(e)))

    ranks = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE)
    assert len(errors) == (gpus == ("GPU-a", "GPU-a"))
    for error in errors.values():
        assert "have the same GPU (GPU-a)" in str(error) and "CUDA_VISIBLE_DEVICES is 0" in str(
            error
        )
    for beat in reversed(beats):
        beat.leave()


def test_nodes_that_count_other_ranks_are_refused() -> None:
    """As two commands with `--nodes 2` and their own `--ranks`: each waits for ranks that nobody starts."""
    port = free_port()
    envs = [world(0, port), replace(world(1, port), world_size=3)]
    beats, stores = joining(envs)
    stores[0].compare_set("world", "", "2")
    with pytest.raises(UserError, match=r"counts 3 ranks in all, and a node .* before it 2: start"):
        meet(envs[1], beats[1], stores[1], PATIENCE)
    beats[1].claim(Failure(1, "n", "another count"))
    for beat in reversed(beats):
        beat.leave()


@pytest.mark.parametrize("pod", [False, True])
def test_the_name_of_a_pod_may_come_late(monkeypatch, pod) -> None:
    """Kubernetes knows it once the pod has a node. Elsewhere a wrong name is an error soon."""
    seconds = itertools.count(0.0, 7.0)
    lookups: list[str] = []

    def look_up(host: str, *others) -> list:
        lookups.append(host)
        if len(lookups) < 9:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    env = replace(world(1, free_port()), master_addr="run-nodes-0-0.run")
    monkeypatch.setattr("socket.getaddrinfo", look_up)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    wrong = pytest.raises(RendezvousError, match="cannot resolve MASTER_ADDR")
    with contextlib.nullcontext() if pod else wrong:
        resolve(env, 60.0)
    assert (len(lookups) == 9) is pod


def job(rank: int) -> RankEnv:
    """A task of a Slurm step on one machine, to which no port was given."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "4711"}
    return detect({**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})


def test_the_store_of_another_job_stays_as_it_was() -> None:
    """Where both jobs have the same port: this one's rank 0 says so, and its rank 1 changes nothing."""
    other = TCPStore("127.0.0.1", job(0).master_port, is_master=True, wait_for_workers=False)
    with pytest.raises(RendezvousError, match="cannot listen at MASTER_PORT"):
        connect(job(0), Heartbeat(job(0)), PATIENCE)
    beat = Heartbeat(job(1))
    connect(job(1), beat, PATIENCE).set("here", "1")
    beat.claim(Failure(1, "n", "lost"))
    assert not other.check(["here"]) and not other.check(["abort"])
    beat.leave()
