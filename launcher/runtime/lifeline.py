"""A line from every rank to rank 0, held by the kernel: who dies lets go of it, and all others know within seconds.

gloo fails when a peer dies, NCCL waits for its timeout; torchrun ends the ranks of its own node, other
launchers one after another, and ranks that were started by hand have nobody. A socket is closed when its process is
gone, however it went, and stays open while the process is merely slow; a node that is off answers no keep-alive.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
import time
from dataclasses import dataclass
from typing import Literal

from clip_train import dist
from clip_train.errors import RemoteRankError
from launcher.runtime.error_reports import node_name
from launcher.runtime.rendezvous import LOOPBACK

HELLO_SECONDS = 60.0  # for all ranks to connect; one may be held up meanwhile
# A silent node is given up after 5 + 3 x 3 seconds.
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3))
USER_TIMEOUT = 14_000  # milliseconds, the same for what has been sent and not been acknowledged

# How a rank ends: in order; with an error that it has told; asked to stop, before the first step; without a word.
How = Literal["bye", "told", "stopped", "gone"]


@dataclass(frozen=True)
class Loss:
    """The first rank that has ended otherwise than in order."""

    rank: int
    node: str
    how: How

    def __str__(self) -> str:
        if self.how == "told":
            return f"rank {self.rank} on {self.node} has ended with an error of its own"
        if self.how == "stopped":
            return f"rank {self.rank} on {self.node} was asked to stop before the first step"
        return f"rank {self.rank} on {self.node} has died without a word: killed (out of memory?), or its node is gone"


class LostRankError(RemoteRankError):
    """Another rank has ended; told by whoever is to tell it."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(str(loss))
        self.loss = loss


class Lifeline:
    """`open` on all ranks together, `leave` when this one ends."""

    def __init__(self, host: str) -> None:
        """host: of rank 0, as the others reach it."""
        self._host, self._rank = host, 0
        self.loss: Loss | None = None
        self.lost_at = 0.0  # seconds, monotonic
        self._lines: dict[int, socket.socket] = {}  # by the rank at the other end
        self._nodes: list[str] = []
        self._closed = threading.Event()
        self._said = threading.Lock()  # taken for good by who says what became of another rank

    def open(self) -> str | None:
        """Collective. None, or on all ranks why there are no lines: what kept some from reaching rank 0."""
        self._rank = dist.rank()
        if dist.world_size() == 1:
            return None
        server, address = None, None
        if dist.is_main():
            here = "127.0.0.1" if self._host in LOOPBACK else ""
            server = socket.create_server((here, 0), backlog=dist.world_size())
            address = (server.getsockname()[1], secrets.token_hex(8))
        port, token = dist.broadcast_object(address)  # type: ignore[misc]
        failed = None
        try:
            if server is not None:
                self._accept(server, token)
            else:
                self._connect(port, token)
        except OSError as e:
            failed = f"rank {self._rank} on {node_name()}: {e}"
        finally:
            if server is not None:
                server.close()
        gathered = dist.gather_objects((node_name(), failed))
        self._nodes = [node for node, _ in gathered]
        failures = [told for _, told in gathered if told is not None]
        if failures:
            self._hang_up()
            return "; ".join(failures[:2])  # of rank 0, which may only have waited, and of the first that did not come
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()
        return None

    def leave(self, how: How) -> None:
        """This rank ends, in order or with an error that it has told. Again does nothing."""
        self._closed.set()
        self._tell(self._rank, how)
        self._hang_up()

    def tells(self, loss: Loss) -> bool:
        """Whether it is for this rank to say what nobody else says: the lowest that is left."""
        return loss.how == "gone" and self._rank == (1 if loss.rank == 0 else 0)

    def is_to_say(self, loss: Loss) -> bool:
        """The same, once: the main thread and the one beside it may both come to say it."""
        return self.tells(loss) and self._said.acquire(blocking=False)

    def wait(self, seconds: float) -> Loss | None:
        """What has become of another rank; a collective fails before the kernel has told."""
        end = time.monotonic() + seconds
        while self.loss is None and self._lines and time.monotonic() < end:
            time.sleep(0.02)
        return self.loss

    def _accept(self, server: socket.socket, token: str) -> None:
        end = time.monotonic() + HELLO_SECONDS
        while len(self._lines) < dist.world_size() - 1:
            server.settimeout(max(0.01, end - time.monotonic()))
            line, _ = server.accept()
            line.settimeout(5)  # a rank sends its line at once; a stranger may send anything, or nothing
            try:
                said, _, rank = line.makefile("rb").readline(100).partition(b" ")
            except OSError:
                said = b""
            if said == token.encode():
                self._keep(int(rank), line)
            else:
                line.close()

    def _connect(self, port: int, token: str) -> None:
        line = socket.create_connection((self._host, port), timeout=HELLO_SECONDS)
        line.sendall(f"{token} {dist.rank()}\n".encode())
        self._keep(0, line)

    def _keep(self, rank: int, line: socket.socket) -> None:
        line.settimeout(5)  # of a send; they are tiny
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT)
        for option, value in KEEP_ALIVE:
            line.setsockopt(socket.IPPROTO_TCP, option, value)
        self._lines[rank] = line

    def _listen(self) -> None:
        """Until all have left, or one has died."""
        waiting = select.poll()
        ranks = {line.fileno(): rank for rank, line in self._lines.items()}
        for number in ranks:
            waiting.register(number, select.POLLIN)
        while ranks and not self._closed.is_set():
            for number, _ in waiting.poll(500):
                rank, how = self._hear(ranks[number])
                if how == "bye":
                    waiting.unregister(number)
                    del ranks[number]
                elif not self._closed.is_set():
                    self._tell(rank, how)  # rank 0 to the others
                    self.lost_at, self.loss = time.monotonic(), Loss(rank, self._nodes[rank], how)
                    return

    def _hear(self, rank: int) -> tuple[int, How]:
        """From the line of this rank: which rank ends, and how."""
        try:
            number, _, how = self._lines[rank].recv(64).decode().partition("\n")[0].partition(" ")
        except (OSError, KeyError):
            return rank, "gone"
        return (int(number), how) if number else (rank, "gone")  # type: ignore[return-value]

    def _tell(self, rank: int, how: How) -> None:
        for line in list(self._lines.values()):
            with contextlib.suppress(OSError):  # gone already
                line.sendall(f"{rank} {how}\n".encode())

    def _hang_up(self) -> None:
        lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close()
