"""One S3 server for all tests of this folder, and for each a bucket and a proxy in front of it."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from clip_train.storage.base import Storage
from clip_train.storage.object_store import ObjectStorage, S3Storage, clients
from clip_train.storage.s3fs_store import S3fsStorage
from clip_train.storage.urls import CLIENT
from tests.s3.bucket import Bucket
from tests.s3.proxy import FaultyProxy
from tests.s3.runs import RUNS
from tests.s3.server import Server, chosen

PART = 5 << 20  # S3's least
DATA = random.Random(1).randbytes(2 * PART + 12345)
# What `make test` runs through s3fs as well; `make acceptance` runs everything through both clients.
THROUGH_S3FS = (
    "test_put_read_list_delete",
    "test_a_listing_of_several_pages",
    "test_an_upload_that_fails_publishes_nothing",
    "test_of_racing_writers_one_wins",
    "test_a_missing_bucket_is_never_an_empty_one",
    "test_expired_credentials_are_asked_for_again",
    "test_a_zombie_cannot_commit_over_its_successor",
    "test_the_answer_to_the_commit_is_lost",
    "test_an_object_replaced_while_it_is_read",
    "test_a_profile_gives_endpoint_region_and_keys",
    "test_a_cache_copies_a_shard_once_for_all_who_read_it",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/s3/" in item.nodeid]
    for item in here:
        item.add_marker(pytest.mark.s3)
        is_s3fs = isinstance(item, pytest.Function) and "s3fs" in item.name.partition("[")[2]
        if is_s3fs and item.originalname not in THROUGH_S3FS:
            item.add_marker(pytest.mark.acceptance)
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


@pytest.fixture(params=["obstore", "s3fs"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What s3:// means in the test, in its processes too."""
    monkeypatch.setenv(CLIENT, {"s3fs": "fsspec"}.get(request.param, request.param))
    return request.param


@pytest.fixture
def proxy(server: Server, client: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """The proxy; whatever opens s3:// in the test goes through it."""
    with FaultyProxy(server.port, server.sign) as proxy:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in server.environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy
        forget_buckets()


def forget_buckets() -> None:
    """They are kept by their names, and the endpoint is not among those."""
    clients.clear()


@pytest.fixture
def bucket(server: Server) -> str:
    """An empty bucket of this test's own."""
    name = f"b{uuid.uuid4().hex[:12]}"
    server.put(name)
    return name


@pytest.fixture
def view(server: Server, bucket: str, proxy: FaultyProxy) -> Bucket:
    return Bucket(server, bucket)


@pytest.fixture
def url(view: Bucket) -> str:
    """Where a run's checkpoints go, through the proxy."""
    return f"{view.url}/run"


# The three below are all that these tests know of how a store on S3 is made.


@pytest.fixture
def kind(client: str) -> type[ObjectStorage]:
    return {"obstore": S3Storage, "s3fs": S3fsStorage}[client]


@pytest.fixture
def storage(url: str, kind: type[ObjectStorage]) -> Storage:
    """It waits for every answer, and asks again for as long as it takes."""
    return kind(url, part_bytes=PART, request_seconds=240, patience_seconds=600)


@pytest.fixture
def hasty(url: str, kind: type[ObjectStorage]) -> Storage:
    """It soon gives up a request, and asks again for as long as it takes."""
    return kind(url, part_bytes=PART, request_seconds=1, min_rate=8 << 20, patience_seconds=600)


@pytest.fixture
def impatient(url: str, kind: type[ObjectStorage]) -> Storage:
    """It waits for every answer, and soon asks no more."""
    return kind(url, part_bytes=PART, request_seconds=240, patience_seconds=0.5)


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A file that is uploaded in three parts."""
    path = tmp_path / "big"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def runs(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One operation's patience is a second, in the checkpoint writers too; none of those outlives its test."""
    monkeypatch.setenv("CLIP_TRAIN_S3_PATIENCE_SECONDS", "1")
    yield
    while RUNS:
        RUNS.pop().manager.close()
