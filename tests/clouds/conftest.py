"""Azure and Google Cloud in place of S3: the fixtures of tests/s3, over another server."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from clip_train.storage.object_store import ObjectStorage
from tests.clouds.azure import Azurite
from tests.clouds.gcs import GoogleCloud
from tests.s3.bucket import Bucket
from tests.s3.conftest import (  # noqa: F401
    big,
    forget_buckets,
    hasty,
    impatient,
    runs,
    storage,
    url,
)
from tests.s3.proxy import FaultyProxy
from tests.s3.server import Server

CLOUDS: dict[str, type[Server]] = {"azure": Azurite, "gcs": GoogleCloud}


# Of the tests that write checkpoints, those that `make test` runs too: they take seconds.
QUICK = (
    "test_a_zombie_cannot_commit_over_its_successor[",
    "test_the_answer_to_the_commit_is_lost[",
    "test_damage_in_the_store_steps_back_and_says_why[azure-flipped",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/clouds/" not in item.nodeid:
            continue
        item.add_marker(pytest.mark.clouds)
        writes = "tests/clouds/test_protocol.py" in item.nodeid
        is_long = item.get_closest_marker("full") is not None
        if is_long or (writes and not item.name.startswith(QUICK)):
            item.add_marker(pytest.mark.acceptance)


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
def kind() -> type[ObjectStorage]:
    return ObjectStorage
