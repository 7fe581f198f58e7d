"""`clip-train doctor` at Azure and Google Cloud: each mistake is named with that cloud's settings."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.s3.bucket import Bucket
from tests.s3.conftest import forget_buckets
from tests.s3.proxy import Fault, FaultyProxy
from tests.s3.server import Server
from tests.s3.test_doctor import EVERY, config, found, look, test_a_healthy_bucket

__all__ = ["test_a_healthy_bucket"]
KEY = {"az": "AZURE_STORAGE_ACCOUNT_KEY", "gs": "GOOGLE_BEARER_TOKEN"}
ENDPOINT = {"az": "AZURE_STORAGE_ENDPOINT", "gs": "GOOGLE_BASE_URL"}
WRONG = {"az": "AZURE_STORAGE_ACCOUNT_KEY or the token", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}


def complaint(url: str) -> str:
    forget_buckets()
    (line,) = found(look(config(url)), "error")
    assert not re.search(r"AWS_|s3:|S3", line), line
    return line


def test_a_missing_bucket(view: Bucket) -> None:
    line = complaint(f"{view.scheme}://nowhere-at-all/run")
    assert re.search(r"cannot be listed: .*-> create the (bucket|container), or correct the", line)


def test_a_wrong_key(view: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY[view.scheme], "d3Jvbmc=")
    line = complaint(f"{view.url}/run")
    assert WRONG[view.scheme] in line.split("->")[1], line


def test_settings_that_are_not_there(view: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY[view.scheme])
    if view.scheme == "az":
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    else:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    line = complaint(f"{view.url}/run")
    wanted = {"az": "set AZURE_STORAGE_ACCOUNT_NAME", "gs": "auth application-default login"}
    assert wanted[view.scheme] in line, line


def test_a_key_that_is_none(view: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is refused before any request."""
    if view.scheme == "az":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not base64!")
    else:
        (tmp_path / "key.json").write_text("{}")
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "key.json"))
    line = complaint(f"{view.url}/run")
    wanted = {"az": "AZURE_STORAGE_ACCOUNT_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}
    assert wanted[view.scheme] in line.split("->")[1], line


def test_nothing_listens(view: Bucket, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # and not listened on
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for name, value in server.environment(f"http://127.0.0.1:{port}").items():
            monkeypatch.setenv(name, value)
        line = complaint(f"{view.url}/run")
    assert f"Connection refused (the server is 127.0.0.1:{port}" in line, line
    assert ENDPOINT[view.scheme] in line.split("->")[1], line


def test_an_unknown_host(view: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, or a mistake in the account's name."""
    monkeypatch.setenv(ENDPOINT[view.scheme], "http://nowhere.invalid")
    line = complaint(f"{view.url}/run")
    assert "(the server is nowhere.invalid" in line and ENDPOINT[view.scheme] in line, line


def test_a_right_that_is_missing(view: Bucket, proxy: FaultyProxy) -> None:
    denied = {"code": 403, "key": "preflight"}
    code = {"az": "AuthorizationPermissionMismatch", "gs": "AccessDenied"}[view.scheme]
    proxy.faults = [Fault("status", method="PUT", s3code=code, **denied)]
    line = complaint(f"{view.url}/run")
    right = {"az": "Storage Blob Data Contributor", "gs": "storage.objects.create"}
    assert f"the right to do it ({right[view.scheme]})" in line, line


def test_a_store_that_ignores_conditions(view: Bucket, proxy: FaultyProxy) -> None:
    proxy.faults = [Fault("unconditional", method="PUT", key="preflight")]
    (line,) = found(look(config(f"{view.url}/run")), "warning")
    assert "Checkpoints are still complete" in line


def test_a_busy_store(view: Bucket, proxy: FaultyProxy) -> None:
    proxy.faults = [Fault("status", method=EVERY, key="", s3code="ServerBusy")]
    assert "ServerBusy" in complaint(f"{view.url}/run")
