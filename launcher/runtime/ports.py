"""The port where the ranks meet: below the kernel's own, and free on the first node."""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import time
import zlib
from collections.abc import Sequence

FIRST, COUNT = 20000, 12000  # Linux hands out 32768 and above, unless a site has changed it
TRIES = 8
JOB = "job"  # key in rank 0's store, by which the other ranks recognize it
PROBE_SECONDS = 5.0  # for one port to answer


def candidates(job: str) -> tuple[int, ...]:
    """Ports to try in this order: the same for all who know `job`, different for another job."""
    start = zlib.crc32(job.encode())
    return tuple(FIRST + (start + 1009 * number) % COUNT for number in range(TRIES))


def free_port(ports: Sequence[int]) -> int:
    """The first port on which nobody listens on this machine; if none is free, the first."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    for port in ports:
        with contextlib.suppress(OSError):
            socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
            return port
    return ports[0]


def agree_on_port(
    host: str, ports: Sequence[int], job: str, seconds: float, *, serves: bool
) -> int:
    """A given port; of several, whoever `serves` takes the first one that is free, and the others
    find it by `job`.

    The first of all where nobody serves within `seconds`.
    """
    if serves or len(ports) == 1:
        return ports[0] if len(ports) == 1 else free_port(ports)
    from torch.distributed import TCPStore

    found: list[int] = []
    timeout = datetime.timedelta(seconds=PROBE_SECONDS)

    def look(port: int) -> None:
        # a stranger may listen there: it refuses, serves another job, or says nothing, for which
        # torch waits forever
        with contextlib.suppress(RuntimeError):
            store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
            if store.check([JOB]) and store.get(JOB).decode() == job:
                found.append(port)

    looks: dict[int, threading.Thread] = {}
    end = time.monotonic() + seconds
    while not found and time.monotonic() < end:
        for port in ports:
            if port not in looks or not looks[port].is_alive():
                looks[port] = threading.Thread(target=look, args=(port,), daemon=True)
                looks[port].start()
        time.sleep(0.2)
    return found[0] if found else ports[0]
