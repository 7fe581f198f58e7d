"""Azure and Google Cloud in place of S3: the fixtures of tests/s3, over another server."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from clip_train.storage.base import Storage
from clip_train.storage.object_store import ObjectStorage
from tests.clouds.azure import Azurite
from tests.clouds.gcs import GoogleCloud
from tests.s3.bucket import Bucket
from tests.s3.conftest import DATA, PART, forget_buckets, runs  # noqa: F401
from tests.s3.proxy import FaultyProxy
from tests.s3.server import Server

CLOUDS: dict[str, type[Server]] = {"azure": Azurite, "gcs": GoogleCloud}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/clouds/" in item.nodeid:
            item.add_marker(pytest.mark.clouds)


@pytest.fixture(scope="session", params=CLOUDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    kind = CLOUDS[request.param]
    if missing := kind.missing():
        pytest.skip(missing)
    try:
        up = kind().start()
    except RuntimeError:  # another process may have taken the port in the meantime
        up = kind().start()
    yield up
    up.stop()


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """The proxy; whatever opens a URL of this cloud in the test goes through it."""
    with FaultyProxy(server.port, server.sign, server.dialect) as proxy:
        for name in list(os.environ):
            if name.startswith(("AZURE_", "GOOGLE_", "AWS_")):
                monkeypatch.delenv(name)
        for name, value in server.environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy
        forget_buckets()


@pytest.fixture
def view(server: Server, proxy: FaultyProxy) -> Bucket:
    return server.bucket(f"b{uuid.uuid4().hex[:12]}")


@pytest.fixture
def url(view: Bucket) -> str:
    return f"{view.url}/run"


@pytest.fixture
def storage(url: str) -> Storage:
    """It waits for every answer, and asks again for as long as it takes."""
    return ObjectStorage(url, part_bytes=PART, request_seconds=240, patience_seconds=600)


@pytest.fixture
def hasty(url: str) -> Storage:
    """It soon gives up a request, and asks again for as long as it takes."""
    return ObjectStorage(
        url, part_bytes=PART, request_seconds=1, min_rate=8 << 20, patience_seconds=600
    )


@pytest.fixture
def impatient(url: str) -> Storage:
    """It waits for every answer, and soon asks no more."""
    return ObjectStorage(url, part_bytes=PART, request_seconds=240, patience_seconds=0.5)


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A file that is uploaded in three parts."""
    path = tmp_path / "big"
    path.write_bytes(DATA)
    return path
