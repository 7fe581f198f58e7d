"""URLs that no store keeps as they are, and servers behind a proxy that is down."""

from __future__ import annotations

import socket

import pytest

from clip_train.checkpoint.config import CheckpointConfig
from clip_train.errors import UserError
from clip_train.storage.urls import open_read, open_storage


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.mark.parametrize(
    "url, right",
    [
        ("s3://bucket//prefix", "s3://bucket/prefix"),
        ("s3://bucket/a//b", "s3://bucket/a/b"),
        ("gs://bucket//prefix", "gs://bucket/prefix"),
    ],
)
def test_an_empty_part_is_refused(url, right):
    with pytest.raises(UserError, match=rf"has an empty part .*write {right},"):
        open_storage(url)
    with pytest.raises(UserError, match="empty part"):
        open_read(f"{url}/0.tar")


def test_a_recipe_with_one_is_refused():
    with pytest.raises(
        ValueError, match=r"checkpoint\.remote: s3://bucket//prefix has an empty part"
    ):
        CheckpointConfig(remote="s3://bucket//prefix")
    assert CheckpointConfig(remote="s3://bucket/prefix/").remote == "s3://bucket/prefix/"


@pytest.mark.parametrize("proxy", [True, False])
def test_a_server_that_cannot_be_reached_is_named(monkeypatch, closed_port, proxy):
    """With the proxy that is in between, and without its password."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed_port}")
    if proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example:9000")
        monkeypatch.setenv("http_proxy", f"http://me:secret@127.0.0.1:{closed_port}")
    with pytest.raises(OSError) as caught:
        # all storages of a bucket share a client, and the system may give both cases one port
        bucket = f"{'proxied' if proxy else 'direct'}-{closed_port}"
        open_storage(f"s3://{bucket}/prefix", patience_seconds=0.5).list()
    message = str(caught.value)
    assert ("store.example:9000" if proxy else f"127.0.0.1:{closed_port}") in message, message
    assert (f"@127.0.0.1:{closed_port}" in message and "proxy" in message) == proxy, message
    assert "me:secret" not in message
