"""Stores of all kinds, each with a server of its own: where benchmarks and tests let runs save."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.clouds.azure import Azurite
from tests.clouds.gcs import GoogleCloud
from tests.clouds.sshd import Sshd
from tests.s3.bucket import Bucket
from tests.s3.folder import Folder, Watch
from tests.s3.proxy import FaultyProxy
from tests.s3.server import Server, chosen


@dataclass(frozen=True)
class Place:
    """Where a run's checkpoints go."""

    bucket: Bucket
    requests: list[str]  # what was asked of it, or what happened there

    @property
    def tells_reads(self) -> bool:
        return not isinstance(self.bucket, Folder)


SERVERS: dict[str, Callable[[], type[Server]]] = {
    "s3": chosen,
    "fsspec+s3": chosen,
    "az": lambda: Azurite,
    "gs": lambda: GoogleCloud,
}
STORES = ["local", *SERVERS, "sftp"]


def missing(store: str) -> str | None:
    """What to do before the store's server can be started."""
    if store == "sftp":
        return Sshd.missing()
    return None if store == "local" else SERVERS[store]().missing()


@contextmanager
def place(store: str, folder: Path) -> Iterator[Place]:
    """A new place at that store."""
    name = f"storm-{uuid.uuid4().hex[:8]}"
    if store == "local":
        with Watch(Folder(folder / name, str(folder / name))) as watch:
            yield Place(watch.folder, watch.requests)
        return
    if store == "sftp":
        with (
            Sshd() as sshd,
            Watch(Folder(folder / name, sshd.url(folder / name))) as watch,
        ):
            os.environ |= sshd.environment()
            yield Place(watch.folder, watch.requests)
        return
    server = SERVERS[store]()().start()
    try:
        with FaultyProxy(server.port, server.sign, server.dialect) as proxy:
            os.environ |= server.environment(proxy.url)
            bucket = server.bucket(name)
            bucket.scheme = store
            yield Place(bucket, proxy.requests)
    finally:
        server.stop()
