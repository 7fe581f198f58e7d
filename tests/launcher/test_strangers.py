"""Files, checkpoints, servers and shells from somebody else: refused in words, and nothing is written elsewhere."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from clip_train.checkpoint.manifest import FileEntry, Manifest, add_checksum, sha256_of
from clip_train.errors import UserError
from clip_train.metrics.jsonl import JsonlSink
from clip_train.models.config import load_architecture, parse_architecture
from clip_train.recipe.recipe import read_recipe
from launcher.cli.main import main
from launcher.runtime.verdict import read_verdict
from launcher.slurm.attempts import History
from tests.launcher.conftest import MODEL, clean_environment, run
from tests.launcher.saved import save_run

pytestmark = pytest.mark.engine
PRECIOUS = b"mine\n"


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "attempts.jsonl"])
def test_a_link_among_a_runs_files_is_refused(tmp_path, recipe, name):
    victim, run_dir = tmp_path / "victim", tmp_path / "run"
    victim.write_bytes(PRECIOUS)
    run_dir.mkdir()
    (run_dir / name).symlink_to(victim)
    status, out = run(recipe, "run.steps=6")
    assert status == 2 and f"{run_dir / name} is a symbolic link" in out, out
    assert victim.read_bytes() == PRECIOUS


def test_links_are_replaced_where_files_are(tmp_path, recipe):
    victim, run_dir, elsewhere = tmp_path / "victim", tmp_path / "run", tmp_path / "elsewhere"
    victim.write_bytes(PRECIOUS)
    elsewhere.mkdir()
    run_dir.symlink_to(elsewhere)  # the folder itself may lie on another disk
    names = ["recipe.yaml", "VERDICT", "report.html", "PROGRESS", "ds_config.json"]
    for name in names:
        (elsewhere / name).symlink_to(victim)
    status, out = run(recipe, "run.steps=6")
    assert status == 0, out
    assert victim.read_bytes() == PRECIOUS
    assert (elsewhere / "recipe.yaml").is_file() and (elsewhere / "metrics.jsonl").is_file()
    assert not any((elsewhere / name).is_symlink() for name in names[:3])


@pytest.mark.parametrize("make, kind", [(os.mkfifo, "a pipe"), (os.mkdir, "a folder")])
def test_nobody_waits_for_what_is_no_file(tmp_path, make, kind):
    """In a run's folder from somebody else: nobody reads from the pipes there."""
    for name in ("metrics.jsonl", "attempts.jsonl", "VERDICT"):
        make(tmp_path / name)
    assert read_verdict(tmp_path) is None and History(tmp_path).lines == []
    for opened in (
        partial(JsonlSink, tmp_path / "metrics.jsonl"),
        partial(History(tmp_path).append, "x"),
    ):
        with pytest.raises(UserError, match=f"is {kind}, and .* to plain files; remove it"):
            opened()


@pytest.mark.parametrize(
    "content, said",
    [
        ("run:".encode("utf-16"), "is not UTF-8"),
        (b"z: " + b"[" * 10_000, "is not YAML"),
        (b"#" * (1 << 22) + b"\n", "has more than 4194304 characters"),
    ],
    ids=["another encoding", "deep", "large"],
)
def test_a_recipe_that_is_none_is_an_error_in_words(tmp_path, content, said):
    (tmp_path / "odd.yaml").write_bytes(content)
    with pytest.raises(UserError, match=f"odd.yaml {said}"):
        read_recipe(str(tmp_path / "odd.yaml"))


def test_a_model_that_is_too_deep_is_an_error_in_words(tmp_path):
    (tmp_path / "odd.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="is not JSON"):
        load_architecture(str(tmp_path / "odd.json"))


def forged(folder: Path, change) -> None:
    """The checkpoint in `folder` with another layout or manifest, and every sum right."""
    marker = max((folder / "commit").glob("*.json"))
    body = json.loads(marker.read_text())
    attempt = folder / body["prefix"]
    manifest = json.loads((attempt / "_MANIFEST.json").read_text())
    packed = zlib.decompress((attempt / "_LAYOUT.bin").read_bytes())
    begin = 8 + int.from_bytes(packed[:8], "little")
    head, rows = json.loads(packed[8:begin]), bytearray(packed[begin:])
    change(manifest, head, rows)
    encoded = json.dumps(head).encode()
    layout = zlib.compress(len(encoded).to_bytes(8, "little") + encoded + rows)
    (attempt / "_LAYOUT.bin").write_bytes(layout)
    manifest["layout_sha256"] = sha256_of(layout)
    data = json.dumps(manifest).encode()
    (attempt / "_MANIFEST.json").write_bytes(data)
    kept = {key: value for key, value in body.items() if key not in ("sha256", "format")}
    marker.write_bytes(add_checksum({**kept, "manifest_sha256": sha256_of(data)}))


def cell(rows: bytearray, column: int, count: int, value: int) -> None:
    at = 8 * column * count
    rows[at : at + 8] = value.to_bytes(8, "little", signed=True)


FORGED = {
    "a file of -1": lambda m, head, rows: cell(rows, 3, head["rows"], -1),
    "a file that there is not": lambda m, head, rows: cell(rows, 3, head["rows"], 7),
    "a parameter of -1": lambda m, head, rows: cell(rows, 0, head["rows"], -1),
    "more than its parameter": lambda m, head, rows: cell(rows, 2, head["rows"], 2**60),
    "behind its file": lambda m, head, rows: cell(rows, 4, head["rows"], 2**60),
    "a list for the head": lambda m, head, rows: head.update(params=[["x", "y"]]),
    "no rows": lambda m, head, rows: head.update(rows=-1),
    "a shape of text": lambda m, head, rows: head["params"].__setitem__(0, ["x", ["a"]]),
    "a tensor of nothing": lambda m, head, rows: head.update(tensors=[{"@shared|x": 5}]),
    "a tensor of no type": lambda m, head, rows: head.update(
        tensors=[{"@shared|x": ["X9", [1], 0]}]
    ),
    "fewer tensors": lambda m, head, rows: head.update(tensors=[]),
    "a file of -5 bytes": lambda m, head, rows: m["files"][0].update(size=-5, blocks=[]),
    "a state of text": lambda m, head, rows: m.update(state="x"),
    "a step of text": lambda m, head, rows: m.update(step="x"),
    "a model of text": lambda m, head, rows: m["state"].update(architecture="x"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_checkpoint_is_an_error_in_words(tmp_path, name):
    save_run(tmp_path / "run", parse_architecture(MODEL, "test"), steps=(1,))
    forged(tmp_path / "run" / "checkpoints", FORGED[name])
    status, out = run(tmp_path / "run" / "checkpoints", f"--output={tmp_path / 'x'}", verb="export")
    assert status in (1, 2) and "Traceback" not in out and "error: " in out, out
    assert not (tmp_path / "x").exists()


def test_few_open_files_are_said_at_once(recipe):
    limited = subprocess.run(
        [sys.executable, "-m", "launcher", "train", str(recipe), "--ranks", "2"],
        env=clean_environment(),
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32)),
    )
    assert limited.returncode == 2 and "allows 32 open files (ulimit -n)" in limited.stderr
    assert limited.stderr.count("\n") == 1, limited.stderr


@pytest.mark.parametrize("limit", [8, 20])
def test_few_threads_are_said_at_once(recipe, limit):
    """Gloo aborted, or the message blamed the network; with 20, each save failed."""
    caps, line = "+dac_override", ["prlimit", "--nproc=1"]
    if os.getuid() == 0:  # root has no such limit
        user = ["--reuid=54321", "--clear-groups", f"--inh-caps={caps}", f"--ambient-caps={caps}"]
        line = ["setpriv", *user, "prlimit", f"--nproc={limit}"]
    limited = subprocess.run(
        [*line, sys.executable, "-m", "launcher", "train", str(recipe)],
        env=clean_environment(),
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
        text=True,
    )
    assert limited.returncode == 2 and "ulimit -u" in limited.stderr, limited
    assert limited.stderr.count("\n") == 1, limited.stderr


def test_one_more_ctrl_c_at_the_end_shows_no_traceback():
    code = "import launcher.cli.main as m; m.Outcome.close = lambda self: signal.raise_signal(2)"
    line = [sys.executable, "-c", f"import signal; {code}; m.entry()", "keys", "optim.lr"]
    done = subprocess.run(line, env=clean_environment(), check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (130, b""), done


# -- servers


class Answers(BaseHTTPRequestHandler):
    status, content_type = 400, "text/plain"

    def do_GET(self) -> None:
        self.send_response(self.status)
        body = b"<html><body>Welcome to our network: log in</body></html>"
        self.send_header("Content-Type", self.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(params=[(400, "text/plain", "HTTP 400"), (200, "text/html", "an HTML page")])
def portal(request) -> Iterator[tuple[str, str]]:
    status, content_type, said = request.param
    handler = type("Handler", (Answers,), {"status": status, "content_type": content_type})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/a.tar", said
        server.shutdown()


def test_a_portal_is_not_expired_credentials(recipe, portal):
    url, said = portal
    status, out = run(recipe, f"data.train={url}")
    assert status in (1, 2) and said in out, out
    assert "credentials" not in out and "AWS" not in out


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_refused_connection_is_said_so(recipe, scheme):
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"{scheme}://127.0.0.1:{taken.getsockname()[1]}/a.tar"
        status, out = run(recipe, f"data.train={url}")
    assert status in (1, 2) and "the connection is refused; check the URL" in out, out
    assert "FileNotFoundError" not in out and "attempt 4" not in out


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_unknown_host_is_said_so(recipe, scheme):
    status, out = run(recipe, f"data.train={scheme}://nowhere.invalid/a.tar")
    assert status in (1, 2) and "unknown host, or the connection" in out, out
    assert "check the URL" in out and "FileNotFoundError" not in out and "attempt 4" not in out


def test_a_manifest_names_no_negative_size():
    with pytest.raises(ValueError, match="-5"):
        FileEntry("a", -5, [])
    with pytest.raises(ValueError, match="-1"):
        Manifest(-1, 0, 1, [], "", {})


def test_a_recipe_with_a_mistake_does_not_run_its_optimizer(recipe, tmp_path, monkeypatch):
    """`optim.name` is imported last, and not at all beside another mistake."""
    marker = tmp_path / "imported"
    (tmp_path / "stranger.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nfrom torch.optim import SGD\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = ["optim.name=stranger.SGD", "optim.options={}"]
    assert main(["plan", str(recipe), *own, "loss.kind=sigmoid"]) == 2
    assert not marker.exists()
    main(["plan", str(recipe), *own])
    assert marker.exists()
