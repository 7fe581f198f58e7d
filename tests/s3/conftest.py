"""One S3 server for all tests of this folder, and for each a bucket and a proxy in front of it."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from clip_train.storage.s3 import S3Storage
from tests.s3.bucket import Bucket
from tests.s3.proxy import FaultyProxy
from tests.s3.runs import RUNS
from tests.s3.server import Server, chosen


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/s3/" in item.nodeid]
    for item in here:
        item.add_marker(pytest.mark.s3)
        # What s3fs, when it renews a session, leaves of the old one to the garbage collector.
        item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
    if here and (missing := chosen().missing()):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    try:
        up = chosen()().start()
    except RuntimeError:  # another process may have taken the port in the meantime
        up = chosen()().start()
    yield up
    up.stop()


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """The proxy; whatever opens s3:// in the test goes through it."""
    with FaultyProxy(server.port, server.sign) as proxy:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in server.environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy
        forget_file_systems()


def forget_file_systems() -> None:
    """fsspec keeps them by their arguments, and the endpoint is not among those."""
    import s3fs
    from fsspec.asyn import sync

    # also those that are not kept, as a storage's: what is still held by a test that has ended is in no cache
    for fs in [each for each in gc.get_objects() if type(each) is s3fs.S3FileSystem]:
        if fs._s3 is not None:  # left to the collector, it would have a tenth of a second, and on any thread's loop
            sync(fs.loop, fs._s3creator.__aexit__, None, None, None, timeout=120)
    s3fs.S3FileSystem.clear_instance_cache()
    gc.collect()


@pytest.fixture
def new_workers(proxy: FaultyProxy) -> Iterator[None]:
    """Loader workers that know the proxy: the fork server keeps the environment of the test that started it."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture
def bucket(server: Server) -> str:
    """An empty bucket of this test's own."""
    name = f"b{uuid.uuid4().hex[:12]}"
    server.put(name)
    return name


@pytest.fixture
def view(server: Server, bucket: str) -> Bucket:
    return Bucket(server, bucket)


@pytest.fixture
def url(view: Bucket, proxy: FaultyProxy) -> str:
    """Where a run's checkpoints go, through the proxy."""
    return f"{view.url}/run"


@pytest.fixture
def answers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, however short the patience: an answer that comes late is no other answer."""
    monkeypatch.setitem(S3Storage.__init__.__kwdefaults__, "request_seconds", 240.0)


@pytest.fixture
def runs(proxy: FaultyProxy, answers_are_waited_for: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One operation's patience is a second, in the savers' processes too; no saver outlives its test."""
    monkeypatch.setenv("CLIP_TRAIN_S3_PATIENCE_SECONDS", "1")
    yield
    while RUNS:
        RUNS.pop().manager.close()
