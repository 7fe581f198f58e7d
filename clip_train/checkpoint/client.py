"""A rank's end of the saver: starts the node's process, hands snapshots over, hears what became of them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from clip_train import dist
from clip_train.checkpoint.messages import encoded, peer_of, receive
from clip_train.checkpoint.order import Settings
from clip_train.errors import CheckpointError

_CONNECT_SECONDS = 180.0  # a busy machine, and Python on a network file system that is cold, take their time
_LEADER_SECONDS = 2.0  # that the node's other ranks leave its first one to start the saver anew
_MOST_STARTS = 3
_EXIT_SECONDS = 10.0  # for a saver whose sockets are closed to be gone
_LEFT: list[subprocess.Popen] = []  # savers that other ranks still use: the interpreter warns of those it forgets


class SaverClient:
    """Made on all ranks together: the first rank of each node starts the process, the others find it."""

    def __init__(self, settings: Settings) -> None:
        """CheckpointError, on all ranks, where one cannot reach its saver."""
        self._settings = settings
        own = (_node(), f"clip-train-saver-{uuid.uuid4().hex}")
        everyone = dist.gather_objects(own)
        leader = next(rank for rank, (node, _) in enumerate(everyone) if node == own[0])
        self._address = everyone[leader][1]
        self._leads = leader == dist.rank()
        self._process: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        self._unread: list[dict[str, Any]] = []  # told before it went
        self._unreported = False  # it has gone, and `news` has not said so yet
        self._gone: int | None = None  # process id of the last one that has
        self._kept: dict[str, tuple[dict[str, Any], int | None]] = {}  # what each new saver is told first
        dist.agreed(lambda: self.connect(_CONNECT_SECONDS))

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def connect(self, patience: float = _LEADER_SECONDS) -> None:
        """Also after the saver has died and `news` has said so: then a new one is started. CheckpointError.

        The node's first rank starts it. Another one does after `patience` seconds: the first may not have noticed
        that it must, and wait for this one in a collective.
        """
        assert not self._unreported, "what is under way must be known for lost before the next saver has work"
        now = time.monotonic()
        end, own_turn = now + _CONNECT_SECONDS, now + (0.0 if self._leads else patience)
        starts = 0
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect("\0" + self._address)
                process, user = peer_of(connection)
                if process == self._gone:  # it closes what it holds one by one
                    raise ConnectionRefusedError("the last one is still about to end")
                if user != os.getuid():  # weights are not for whoever was quicker to take the name
                    raise PermissionError(f"process {process} of another user ({user}) listens in its place")
                break
            except OSError as e:
                connection.close()
                now = time.monotonic()
                if starts and self._process is not None and self._process.poll() == 0:
                    # another rank's was faster, and may not have come to listen yet
                    self._forget_process()
                    own_turn, starts = now + _LEADER_SECONDS, 0
                ended = self._process is None or self._process.poll() is not None
                if now > end or (ended and starts == _MOST_STARTS):
                    raise CheckpointError(f"the process that writes checkpoints cannot be reached: {e}") from e
                if ended and now >= own_turn:
                    self._forget_process()
                    self._process, starts = _start(self._address), starts + 1
            time.sleep(0.02)
        self._connection = connection
        self.send({"do": "settings", **self._settings.to_json()})
        for body, fd in self._kept.values():
            self.send(body, fd)

    def keep(self, name: str, body: dict[str, Any], fd: int | None = None) -> None:
        """Tell the saver, and every one that takes its place, until it says that `name` is noted or it is replaced.

        A saver that has gone is told when it is there again.
        """
        self._kept[name] = ({**body, "name": name}, fd)
        if self.connected:
            with contextlib.suppress(CheckpointError):
                self.send(*self._kept[name])

    def forget(self, name: str) -> None:
        self._kept.pop(name, None)

    def send(self, body: dict[str, Any], fd: int | None = None) -> None:
        """CheckpointError if the saver has gone."""
        try:
            if self._connection is None:
                raise ConnectionResetError("not connected")
            data = encoded(body)
            if fd is not None:
                sent = socket.send_fds(self._connection, [data], [fd])
                data = data[sent:]
            self._connection.sendall(data)
        except OSError as e:
            self._lost()
            raise CheckpointError(f"the process that writes checkpoints has ended: {e}") from e

    def news(self, timeout: float = 0.0) -> list[dict[str, Any]]:
        """What the saver has told since; waits up to `timeout` seconds for the first. `gone` if it has ended."""
        told: list[dict[str, Any]] = []
        while self._connection is not None:
            waiting = select.poll()  # not select, which takes no descriptor past 1023
            waiting.register(self._connection, select.POLLIN)
            if not waiting.poll(0.0 if told else 1000 * timeout):
                break
            try:
                told.append(receive(self._connection)[0])
            except OSError:
                self._lost()
        if self._unreported:
            told += [*self._unread, {"told": "gone", "why": self._why_gone(), "leads": self._leads}]
            self._unread, self._unreported = [], False
        for body in told:
            if body["told"] == "noted":
                self.forget(body["name"])
        return [body for body in told if body["told"] != "noted"]

    def _lost(self) -> None:
        """The other end is closed; what it has told before still counts."""
        if self._connection is None:
            return
        self._gone = peer_of(self._connection)[0] or None  # 0: in a process namespace of its own
        self._connection.settimeout(1.0)
        with contextlib.suppress(OSError):
            while True:
                self._unread.append(receive(self._connection)[0])
        self._connection.close()
        self._connection, self._unreported = None, True

    def _why_gone(self) -> str:
        status = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(_EXIT_SECONDS)  # its sockets close before it can be waited for
        how = "" if status is None else f" (signal {-status})" if status < 0 else f" (exit status {status})"
        return f"the process that writes checkpoints has ended{how}"

    def _forget_process(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None

    def close(self) -> None:
        """The saver ends with its last rank."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:  # other ranks of the node still use it; it is theirs then
                _LEFT.append(self._process)
            self._process = None


def _start(address: str) -> subprocess.Popen:
    # the same import path as here, whatever it came from
    code = f"import sys; sys.path[:] = {sys.path!r}; from clip_train.checkpoint.saver import main; main({address!r})"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, close_fds=True
    )


def _node() -> tuple[str, str, int]:
    """Equal for processes that can reach each other's abstract sockets."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        boot, network = "", 0
    return socket.gethostname(), boot, network
