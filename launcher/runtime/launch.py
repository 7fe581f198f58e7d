"""Start one rank for each device of this machine or of several, where no launcher has started this
process as one.

Each rank is a process that gets every signal once. Ranks end each other (`heartbeat`); the process
that started them only waits.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from clip_train.errors import Preempted, UserError
from clip_train.processes import state_of
from clip_train.recipe.recipe import Recipe, needs_samples, with_samples
from clip_train.stop import SIGNALS, StopRequest
from launcher.cli.process import Process
from launcher.runtime.environment import LAUNCHER, candidates, detect, free_port, this_rank
from launcher.runtime.heartbeat import Heartbeat, end_ranks_that_wait
from launcher.runtime.hosts import Host, RemoteHost, address_of
from launcher.runtime.verdict import OURS, SAFE_PATH, Failure
from launcher.runtime.watchdog import CLOSE_SECONDS, Watchdog


class Started(Protocol):
    """A rank's process, or the ranks of another host."""

    pid: int

    def poll(self) -> int | None: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True)
class Node:
    """This machine among those of a run, which all have the same number of ranks."""

    rank: int
    nodes: int
    address: str  # of node 0, where rank 0 listens
    port: int


# Limit for all ranks to end after one has, in addition to `checkpoint.grace_seconds`.
TOGETHER_SECONDS = CLOSE_SECONDS + 30


def counted(config: Recipe, process: Process) -> Recipe:
    """`with_samples`, during which a stop request and a store that hangs end the process, as they
    do later."""
    if not needs_samples(config):
        return config
    heartbeat = Heartbeat(this_rank(), process.outcome.publish)
    watchdog = Watchdog(config.launch, process.stop, heartbeat)
    watchdog.start()
    try:
        return with_samples(config)
    finally:
        watchdog.end()


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as a rank."""
    return detect(environ).world_size > 1 or "RANK" in environ


def local_ranks(asked: int | None, environ: Mapping[str, str]) -> int:
    """The number of ranks to start here, or 1 if a launcher has started this process as a rank."""
    if asked is not None and asked < 1:
        raise UserError(f"--ranks ({asked}) must be at least 1; leave it out for one rank per GPU")
    if is_rank(environ):
        return 1
    if asked is not None:
        return asked
    import torch

    return max(1, torch.cuda.device_count())


def place(nodes: int | None, node_rank: int | None, master: str | None) -> Node | None:
    """The options --nodes, --node-rank and --master, which belong together. UserError."""
    if nodes is None and node_rank is None and master is None:
        return None
    if nodes is None or node_rank is None or master is None:
        raise UserError("--nodes, --node-rank and --master must be given together")
    if not 0 <= node_rank < nodes:
        raise UserError(f"--node-rank ({node_rank}) must be at least 0 and below --nodes ({nodes})")
    address, _, port = master.rpartition(":")
    address = address.removeprefix("[").removesuffix("]")  # of an IPv6 address
    if not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(
            f"--master ({master}) must be HOST:PORT of node 0, such as node0:29500; a port is at "
            "most 65535"
        )
    return Node(node_rank, nodes, address, int(port))


def launch_hosts(
    hosts: Sequence[Host],
    ranks: int,
    arguments: Sequence[str],
    stop: StopRequest,
    *,
    save_seconds: float,
) -> int:
    """`launch_local` on all hosts, `ranks` on each. The first host is this machine."""
    address = address_of(hosts[0].name)
    port = free_port(candidates(f"{address} {os.getpid()}"))
    master = f"{address}:{port}"

    def start_others() -> list[Started]:
        others: list[Started] = []
        for number, host in enumerate(hosts[1:], 1):
            options = [f"--ranks={ranks}", f"--nodes={len(hosts)}", f"--node-rank={number}"]
            line = [*arguments, *options, f"--master={master}"]
            others.append(RemoteHost(host.name, line, import_path_of_ranks(os.environ)))
        return others

    return launch_local(
        ranks,
        arguments,
        stop,
        save_seconds=save_seconds,
        node=Node(0, len(hosts), address, port),
        start_others=start_others,
    )


def launch_local(
    ranks: int,
    arguments: Sequence[str],
    stop: StopRequest,
    *,
    save_seconds: float = 0.0,
    node: Node | None = None,
    start_others: Callable[[], Sequence[Started]] | None = None,
) -> int:
    """Run `python -m launcher ARGUMENTS` as `ranks` ranks; their exit status. Preempted where
    `stop` was asked before.

    node: where other machines have ranks too. start_others: starts these, if not they themselves.

    stop: has caught signals since the process started. A signal from now on goes to each rank,
    once. save_seconds: for the other ranks' pending save once a rank has failed.
    """
    # nohup ignores HUP
    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    # the ranks begin with them blocked too, until they listen
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    if node is None:
        node = Node(0, 1, "127.0.0.1", free_port(candidates(str(os.getpid()))))
    world = {
        **import_path_of_ranks(os.environ),
        LAUNCHER: str(os.getpid()),
        "MASTER_ADDR": node.address,
        "MASTER_PORT": str(node.port),
        "WORLD_SIZE": str(node.nodes * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    line = [sys.executable, "-m", "launcher", *arguments]
    processes: list[Started] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    try:
        if stop.look() is not None:
            raise Preempted(
                f"stopped by {stop.reason} before the first step; run the same command to start"
            )
        for local_rank in range(ranks):
            rank = node.rank * ranks + local_rank
            environ = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            # in their own sessions: a terminal's Ctrl-C reaches only this process
            processes.append(subprocess.Popen(line, env=environ, start_new_session=True))
        if start_others is not None:
            processes += start_others()
        for number in handled:
            signal.signal(number, forward)
        if stop.look() is not None:  # a thread of some library has taken it
            forward(signal.SIGTERM, None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        return wait(processes, save_seconds + TOGETHER_SECONDS, node, ranks)
    finally:
        stop.ignore()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        for process in processes:
            process.kill()


def import_path_of_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with which `python -m launcher` imports from where this process does.

    `-m` puts the working directory first, where a user's random.py or launcher/ would be taken for
    Python's or ours.
    """
    variables = {SAFE_PATH: environ.get(SAFE_PATH) or OURS}
    by_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    if by_module and not getattr(sys.flags, "safe_path", False):  # as `python -m launcher`, too
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [sys.path[0], environ.get("PYTHONPATH")])
        )
    return variables


def wait(processes: Sequence[Started], together_seconds: float, node: Node, ranks: int) -> int:
    """0, or the exit status of the first rank that failed. The others are killed `together_seconds`
    later. A stopped process is killed at once, because no other signal reaches it.

    node, ranks: of this machine, where rank 0 is if `processes` has other hosts.
    """
    failed, end = 0, float("inf")
    others_know = False
    while time.monotonic() < end:
        statuses = [process.poll() for process in processes]
        if not failed and any(statuses):
            failed = next(filter(None, statuses))
            end = time.monotonic() + together_seconds
        if None not in statuses:
            break
        if failed:
            for process in processes:
                if state_of(process.pid) == "T":
                    process.kill()
        if failed and not others_know:
            others_know = report_lost_host(processes, node, ranks)
        time.sleep(0.1)
    if failed > 0:
        return failed
    if failed or None in statuses:  # killed by a signal, or given up
        return 1
    return 0


def report_lost_host(processes: Sequence[Started], node: Node, ranks: int) -> bool:
    """If another host has failed before its ranks had joined, end the ranks that wait for it. False:
    rank 0 does not answer yet."""
    hosts = [process for process in processes if isinstance(process, RemoteHost)]
    for number, host in enumerate(hosts, 1):
        if host.poll():
            failure = Failure(number * ranks, host.name, host.why_it_ended(), node_suspect=True)
            return end_ranks_that_wait(node.address, node.port, failure, ranks)
    return True
