"""Shards behind a password or a signature: the run trains, and nothing that it prints or keeps holds the secret."""

from __future__ import annotations

import base64
import json
import re
import shutil
import threading
import urllib.parse
import zlib
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.launcher.conftest import finish, metrics, run, start

pytestmark = pytest.mark.engine

PASSWORD, SIGNATURE, AGAIN = "hunter2secret", "5ec4e7deadbeef", "a9a1dfeedc0ffee"
FAILURES = 3  # of each file that is opened: from the third on, a retry is a warning
QUICK = ("run.steps=7", "data.verify=off", "data.workers=1")


class Locked(ThreadingHTTPServer):
    """Files of a folder by ranges, for who gives the password or a signature. The first answers are a 503."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.is_open = folder, True
        self.asked: Counter[str] = Counter()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Locked

    def do_HEAD(self) -> None:
        self.answer(content=False)

    def do_GET(self) -> None:
        self.answer(content=True)

    def answer(self, content: bool) -> None:
        path, _, query = self.path.partition("?")
        given = urllib.parse.parse_qs(query).get("X-Amz-Signature", [""])[0]
        user = base64.b64encode(f"reader:{PASSWORD}".encode()).decode()
        right = given in (SIGNATURE, AGAIN) or self.headers["Authorization"] == f"Basic {user}"
        file = self.server.folder / path.lstrip("/")
        self.server.asked[path] += content
        if not self.server.is_open or not right:
            self.send_error(403)
        elif not file.is_file():
            self.send_error(404)
        elif self.server.asked[path] <= FAILURES:
            self.send_error(503)
        else:
            data = file.read_bytes()
            found = re.match(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
            part = data[int(found[1]) : int(found[2]) + 1] if found else data
            self.send_response(206 if found else 200)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if content:
                self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def locked(data) -> Iterator[Locked]:
    with Locked(Path(data.train).parent) as server:
        yield server
        server.shutdown()


def by_password(server: Locked, folder: Path) -> str:
    names = sorted(file.name for file in server.folder.glob("*.tar"))
    return f"http://reader:{PASSWORD}@{server.host}/{{{','.join(names)}}}"


def by_signature(server: Locked, signature: str, date: str) -> str:
    names = sorted(file.name for file in server.folder.glob("*.tar"))
    query = f"X-Amz-Date={date}&X-Amz-Expires=3600&X-Amz-Signature={signature}"
    return f"http://{server.host}/{{{','.join(names)}}}?{query}"


def kept(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file of a run; of a checkpoint's manifest also the list of shards, which is packed."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()
        if path.name == "_MANIFEST.json":
            packed = json.loads(path.read_text())["state"]["shards"]
            yield path, zlib.decompress(base64.b64decode(packed))


def assert_nowhere(secrets: tuple[str, ...], out: str, folder: Path) -> None:
    files = [*kept(folder)]
    assert {"recipe.yaml", "attempts.jsonl"} <= {path.name for path, _ in files}
    for secret in secrets:
        assert secret not in out
        assert [path for path, content in files if secret.encode() in content] == []


def test_a_password_is_neither_printed_nor_kept(tmp_path, recipe, locked):
    override = f"data.train={by_password(locked, tmp_path)}"
    status, out = run(recipe, override, *QUICK)
    assert status == 0, out
    assert "503" in out and "trying again" in out and "REDACTED@127.0.0.1" in out
    assert_nowhere((PASSWORD,), out, tmp_path / "run")
    _, out = run(recipe, override, *QUICK, verb="plan")
    assert PASSWORD not in out

    own = tmp_path / "run" / "recipe.yaml"  # what was removed is missed where it is needed alone
    assert "REDACTED" in yaml.safe_load(own.read_text())["data"]["train"]
    status, out = run(own, "run.steps=8")
    assert status == 2 and "data.train=<URL>" in out and "was removed" in out, out
    status, out = run(own, "run.steps=8", override)
    assert status == 0 and "resuming from step 7" in out, out
    status, out = finish(start(own, f"--output={tmp_path / 'export'}", verb="export"))
    assert status == 0, out

    locked.is_open = False
    status, out = run(own, "run.steps=9", override)
    assert status != 0 and "403" in out, out
    assert_nowhere((PASSWORD,), out, tmp_path / "run")


def test_a_url_that_was_signed_again_is_the_same(tmp_path, recipe, locked):
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    first = by_signature(locked, SIGNATURE, "20261101T000000Z")
    status, out = run(recipe, f"data.train={first}", *QUICK)
    assert status == 0, out
    second = by_signature(locked, AGAIN, "20261102T000000Z")
    status, again = run(recipe, f"data.train={second}", *QUICK, "run.steps=9")
    assert status == 0 and "resuming from step 7" in again, again
    assert "data.train was" not in again and "counting samples" not in again
    assert [line["step"] for line in metrics(tmp_path / "run")] == [*range(1, 10)]
    assert_nowhere((SIGNATURE, AGAIN), out + again, tmp_path / "run")
