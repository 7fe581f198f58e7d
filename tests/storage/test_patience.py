"""A store that never answers is given up within the patience that is configured."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from clip_train.storage.config import StorageConfig
from clip_train.storage.errors import RefusedError, StorageError
from clip_train.storage.object_store import S3Storage
from clip_train.storage.urls import open_read, open_storage


def test_a_store_that_never_answers(monkeypatch):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:  # accepts, says nothing
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        store = open_storage("s3://bucket/run", patience_seconds=1)
        for ask in (lambda: store.read_bytes("x"), lambda: store.list("x")):
            with pytest.raises(StorageError) as caught:
                ask()
            seconds = [float(word) for word in words_before_s(str(caught.value))]
            assert all(each <= 1 for each in seconds), caught.value


def words_before_s(message: str) -> list[str]:
    """Numbers of seconds in it: `no answer within 1.5 s`."""
    words = message.split()
    return [a for a, b in itertools.pairwise(words) if b.strip(",;:)") == "s" and a[0].isdigit()]


def test_a_wait_on_purpose_names_its_key(monkeypatch):
    config = StorageConfig(attempts=2, patience_seconds=0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        host = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StorageError, match=r"2 of 2: no answer .*; storage\.attempts limits"):
            open_read(f"{host}/a.tar", config)
        monkeypatch.setenv("AWS_ENDPOINT_URL", host)
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        monkeypatch.setenv("CLIP_TRAIN_S3_PATIENCE_SECONDS", "1")
        with pytest.raises(StorageError, match="; CLIP_TRAIN_S3_PATIENCE_SECONDS limits"):
            open_storage("s3://bucket/run").list()


class Hasty(S3Storage):
    listing_seconds = 1
    listed_per_second = 1_000_000


class Pages(BaseHTTPRequestHandler):
    """A listing of S3: each page has one of `names` many times, and comes after `pause` seconds."""

    names: Iterator[str]
    pause = 0.0

    def do_GET(self) -> None:
        time.sleep(self.pause)
        name = next(self.names, None)
        page = f"<IsTruncated>{str(name is not None).lower()}</IsTruncated>"
        if name is not None:
            page += "<NextContinuationToken>t</NextContinuationToken>" + 1000 * (
                f"<Contents><Key>{name}</Key><Size>1</Size><ETag>e</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        body = f"<ListBucketResult>{page}</ListBucketResult>".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("names", "pause", "error", "words"),
    [
        (["run/a"] * 40, 0.2, StorageError, r"only \d,000 objects were listed in"),
        (["run/a&#10;b"] * 40, 0.0, RefusedError, "invalid path.*; rename or remove that object"),
    ],
    ids=["it is slow", "a name with a newline"],
)
def test_a_listing_that_cannot_be_used(monkeypatch, names, pause, error, words):
    """The slow listing here ends after 8 s. Its limit is one second."""
    handler = type("Handler", (Pages,), {"names": iter(names), "pause": pause})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        with pytest.raises(error, match=words):
            Hasty(f"s3://{uuid.uuid4().hex}/run", patience_seconds=1).list()
        server.shutdown()


class Endless(BaseHTTPRequestHandler):
    """Says that a file has 1 MiB, and sends 64 MiB for each range of it."""

    def do_GET(self) -> None:
        self.send_response(206 if self.command == "GET" else 200)
        self.send_header("Content-Length", str(1 << (26 if self.command == "GET" else 20)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(bytes(1 << 26))

    do_HEAD = do_GET  # noqa: N815

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the reader hangs up
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_an_answer_longer_than_its_range_is_not_read():
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        file = open_read(f"http://127.0.0.1:{server.server_port}/a.tar", StorageConfig(attempts=1))
        with pytest.raises(StorageError, match="sends more than the 1048576 bytes asked for"):
            file.read(10)
        file.close()
        server.shutdown()
