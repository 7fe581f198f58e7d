"""A store that never answers is given up within the patience that is configured."""

from __future__ import annotations

import itertools
import socket

import pytest

from clip_train.storage.errors import StorageError
from clip_train.storage.urls import open_storage


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
