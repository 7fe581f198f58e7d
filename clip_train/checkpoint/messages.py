"""What a rank and its saver say to each other: length, then JSON, over a socket; a file descriptor may go with it."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any


def encoded(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return len(data).to_bytes(4, "little") + data


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and the file descriptors that came with it. ConnectionError at the end."""
    head = b""
    fds: list[int] = []
    while len(head) < 4:
        data, new, _, _ = socket.recv_fds(connection, 4 - len(head), 1)
        if not data:
            raise ConnectionResetError("the other side has gone")
        head, fds = head + data, fds + list(new)
    size = int.from_bytes(head, "little")
    body = bytearray()
    while len(body) < size:
        data = connection.recv(size - len(body))
        if not data:
            raise ConnectionResetError("the other side has gone")
        body += data
    return json.loads(bytes(body)), fds


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end of a Unix socket: anyone on this machine can reach an abstract one."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[:2]
