"""The saver: one process per node that takes snapshots from its ranks and brings them to disk and bucket.

It imports neither torch nor an engine, listens on a socket in the abstract namespace (which leaves no file
behind), and ends at once when its last rank has gone: whatever was under way is then an attempt without a
commit. Messages are JSON; a snapshot's memory is handed over once, as a file descriptor.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
from typing import Any

from clip_train.checkpoint.layout import CommitRef
from clip_train.checkpoint.messages import encoded, peer_of, receive
from clip_train.checkpoint.order import Order, Settings, explain
from clip_train.checkpoint.pipeline import Pipeline


class Server:
    """Serves every rank of this node, each in a thread of its own."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + address)
        self._listener.listen(64)
        self._ranks = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        threading.Thread(target=self._outlive_nobody, daemon=True).start()
        while True:
            connection, _ = self._listener.accept()
            if peer_of(connection)[1] != os.getuid():
                connection.close()
                continue
            with self._lock:
                self._ranks += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _outlive_nobody(self) -> None:
        """The process that started this one holds the other end of stdin, even before it has connected."""
        sys.stdin.buffer.read()
        with self._lock:
            if self._ranks == 0:
                os._exit(0)

    def _serve(self, connection: socket.socket) -> None:
        try:
            _Rank(connection).serve()
        except (ConnectionError, OSError):
            pass
        finally:
            with self._lock:
                self._ranks -= 1
                if self._ranks == 0:
                    os._exit(0)  # not sys.exit: uploads must not go on for a run that has ended


class _Rank:
    """One rank at the other end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._pipeline: Pipeline | None = None

    def serve(self) -> None:
        while True:
            body, fds = receive(self._connection)
            try:
                self._obey(body, fds)
            except Exception as e:
                self._tell({"told": "note", "text": f"the saver: {explain(e)}"})

    def _obey(self, body: dict[str, Any], fds: list[int]) -> None:
        match body.pop("do"):
            case "settings":
                self._pipeline = Pipeline(Settings.from_json(body), self._tell)
            case "buffer":
                assert self._pipeline is not None
                self._pipeline.set_buffer(fds[0])
            case "save":
                assert self._pipeline is not None
                self._pipeline.save(Order(**body))
            case "cancel":
                assert self._pipeline is not None
                self._pipeline.cancel(body["prefix"], body["why"])
            case "metric":
                assert self._pipeline is not None
                ref = CommitRef(body["epoch"], body["step"])
                # In a thread: a store that answers slowly must not hold up the next save.
                threading.Thread(
                    target=self._note_metric, args=(body["name"], ref, body["values"]), daemon=True
                ).start()

    def _note_metric(self, name: str, ref: CommitRef, values: dict[str, float]) -> None:
        assert self._pipeline is not None
        try:
            self._pipeline.note_metric(name, ref, values)
        except Exception as e:
            self._tell({"told": "note", "text": f"the saver: {explain(e)}"})

    def _tell(self, body: dict[str, Any]) -> None:
        with self._sending:
            try:
                self._connection.sendall(encoded(body))
            except OSError:
                return  # the rank has gone; `serve` sees it


def main(address: str) -> None:
    """Until the last rank has gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the ranks: they decide when this ends
    os.nice(5)  # training comes first
    try:
        server = Server(address)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            return  # another rank of the node was faster, and its saver serves this one's too
        raise
    server.run()
