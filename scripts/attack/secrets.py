"""A planted secret, in each place that may hold one, and each way to fail: it is printed and kept nowhere."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from scripts.attack import lab
from scripts.attack.case import REFUSED, SAME, SECRET, Case
from tests.launcher.conftest import (
    ROOT,
    clean_environment,
    finish,
    kill,
    start,
    wait_for_commit,
    wait_for_step,
)
from tests.launcher.test_secrets import kept
from tests.warm import Command

ENCODED = "hunter2%70lanted"  # the same, as a URL may spell it
IMPATIENT = ("storage.patience_seconds=2", "run.steps=4")
CLOSED = "127.0.0.1:1"


def nowhere(out: str, folder: Path) -> str:
    """Not in what was printed, nor in any file there; a recipe that the case has written aside."""
    for secret in (SECRET, ENCODED):
        assert secret not in out, out
        where = [path for path, content in kept(folder) if secret.encode() in content]
        assert not where, where
    return REFUSED


URLS = {
    "a user and a password": f"http://me:{SECRET}@{CLOSED}/a.tar",
    "a password, percent-encoded": f"http://me:{ENCODED}@{CLOSED}/a.tar",
    "a password with a slash": f"http://me:a/{SECRET}@{CLOSED}/a.tar",
    "a password with an at": f"http://me:a@{SECRET}@{CLOSED}/a.tar",
    "a token for a user": f"https://{SECRET}@{CLOSED}/a.tar",
    "capitals": f"HTTP://me:{SECRET}@{CLOSED}/a.tar",
    "a token in the query": f"http://{CLOSED}/a.tar?token={SECRET}",
    "an access token in the query": f"http://{CLOSED}/a.tar?x=1&access_token={SECRET}",
    "a signature of S3": f"http://{CLOSED}/a.tar?X-Amz-Signature={SECRET}&X-Amz-Expires=9",
    "a signature of Azure": f"http://{CLOSED}/a.tar?sv=2024&sig={SECRET}%3D",
    "an encoded signature": f"http://{CLOSED}/a.tar?sig={ENCODED}",
    "a token in the fragment": f"http://{CLOSED}/a.tar#token={SECRET}",
    "keys for a bucket's user": f"s3://AKIA:{SECRET}@bucket/a.tar",
    "a password of ftp": f"ftp://me:{SECRET}@{CLOSED}/a.tar",
    "a password of sftp": f"sftp://me:{SECRET}@{CLOSED}/a.tar",
    "a chain of URLs": f"simplecache::http://me:{SECRET}@{CLOSED}/a.tar",
    "two sources": f"/x/a.tar::http://me:{SECRET}@{CLOSED}/a.tar",
    "braces": f"http://me:{SECRET}@{CLOSED}/{{00..02}}.tar",
    "a pattern": f"http://me:{SECRET}@{CLOSED}/*.tar",
    "a newline": f"http://me:{SECRET}@{CLOSED}/a\n.tar",
}
KEYS = (
    "data.val", "checkpoint.remote", "checkpoint.resume", "model.init_from", "model.teacher", "model.name",
    "evaluate.zero_shot_data", "evaluate.zero_shot_classes", "data.stages", "optim.name", "loss.kind", "run.dir",
    "log.callbacks", "run.unknown_key",
)  # fmt: skip
VERBS = ("plan", "doctor", "index", "export", "evaluate", "checkpoints", "embed", "report")


def in_train(url: str, *more: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        status, out = lab.run(
            lab.recipe(folder), *lab.SMALL, *IMPATIENT, f"data.train={url!r}", *more
        )
        assert status in (1, 2), out
        return nowhere(out, folder)

    return attack


def in_key(key: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        url = f"http://me:{SECRET}@{CLOSED}/a.tar"
        status, out = lab.run(lab.recipe(folder), *lab.SMALL, *IMPATIENT, f"{key}={url}")
        return nowhere(out, folder)

    return attack


def in_verb(verb: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        url, file = f"http://me:{SECRET}@{CLOSED}/a.tar", str(lab.recipe(folder))
        line = [file, f"data.train={url}"] if verb in ("plan", "doctor") else [url]
        env = clean_environment() | {"PYTHONPATH": str(ROOT)}
        _, out = finish(Command([verb, *line], env=env, cwd=folder), timeout=50)
        return nowhere(out, folder)

    return attack


# -- servers that answer with it


class Telling(BaseHTTPRequestHandler):
    """An answer that repeats what was asked, with the secret, where `place` says."""

    place = ""

    def do_GET(self) -> None:
        told = f"key {SECRET} of {self.path} {self.headers['Authorization']}"
        moved = self.place == "a redirect"
        self.send_response(302 if moved else 403, told if self.place == "the reason" else None)
        if moved:
            self.send_header("Location", f"http://{CLOSED}/b.tar?X-Amz-Signature={SECRET}")
        body = f"<Error><Code>X</Code><Message>token={SECRET}</Message></Error>".encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def telling(place: str) -> Iterator[str]:
    handler = type("Handler", (Telling,), {"place": place})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def from_a_server(place: str) -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        with telling(place) as host:
            return in_train(f"http://me:{SECRET}@{host}/a.tar?token={SECRET}")(folder)

    return attack


# -- the environment, and a run that works


ENVIRONMENT = dict.fromkeys(
    ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN"),
    SECRET,
) | {"http_proxy": f"http://me:{SECRET}@{CLOSED}", "AWS_ACCESS_KEY_ID": "AKIA"}
ENVIRONMENT |= {"AWS_ENDPOINT_URL": f"http://{CLOSED}", "AWS_ALLOW_HTTP": "true"}


def environment(*overrides: str, fault: str = "") -> Callable[[Path], str]:
    def attack(folder: Path) -> str:
        file = lab.recipe(folder)
        line = (*lab.SMALL, *IMPATIENT, "data.workers=1", *overrides)
        status, out = finish(start(file, *line, environ=ENVIRONMENT, fault=fault))
        return nowhere(out, folder)

    return attack


def killed(folder: Path) -> str:
    """Killed in mid-step, then its own files are read by each verb that reads a run."""
    notify = f"log.notify=\"curl -H 'Authorization: Bearer {SECRET}' http://x?token={SECRET}\""
    run = start(lab.recipe(folder), *lab.SMALL, "run.steps=100000", notify, environ=ENVIRONMENT)
    wait_for_commit(folder / "run", run)
    kill(run)
    out = "".join(
        lab.run(folder / "run", verb=verb)[1] for verb in ("report", "checkpoints", "plan")
    )
    return nowhere(out, folder)


def notified(command: str) -> Callable[[Path], str]:
    """`log.notify` with a secret, and a command that fails."""

    def attack(folder: Path) -> str:
        line = (*lab.SMALL, "run.steps=4", f"log.notify={command!r}")
        status, out = lab.run(lab.recipe(folder), *line)
        return nowhere(out, folder)

    return attack


# -- permissions and names


def modes(umask: int, file_mode: int, folder_mode: int) -> Callable[[Path], str]:
    """With this umask, each file and folder of a run is as any other file of that user."""

    def attack(folder: Path) -> str:
        line = [sys.executable, "-m", "launcher", "train", str(lab.recipe(folder)), *lab.SMALL]
        env = clean_environment() | {"PYTHONPATH": str(ROOT)}
        subprocess.run(line, env=env, cwd=folder, check=True, capture_output=True, umask=umask)
        for path in (folder / "run").rglob("*"):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (folder_mode if path.is_dir() else file_mode), (path, oct(mode))
        return SAME

    return attack


def temporary_names(folder: Path) -> str:
    """What a run has in the temporary folder: for its user alone, under names that nobody guesses."""
    seen: list[set[str]] = []
    for number in range(2):
        temporary = folder / f"tmp{number}"
        temporary.mkdir()
        file = lab.recipe(folder, name=f"run{number}")
        run = start(
            file,
            *lab.SMALL,
            "run.steps=100000",
            "data.workers=1",
            environ={"TMPDIR": str(temporary)},
        )
        wait_for_step(folder / f"run{number}", 3, run, 50)
        names = {path.name for path in temporary.iterdir()}
        assert all(not stat.S_IMODE(path.stat().st_mode) & 0o077 for path in temporary.iterdir()), (
            names
        )
        run.terminate()
        finish(run)
        assert not list(temporary.iterdir()), list(temporary.iterdir())
        seen.append(names)
    assert not seen[0] & seen[1], seen
    return SAME


def shared_memory_names(folder: Path) -> str:
    """The same of `/dev/shm`."""
    before = set(os.listdir("/dev/shm"))
    run = start(lab.recipe(folder), *lab.SMALL, "run.steps=100000", "data.workers=1")
    wait_for_step(folder / "run", 3, run, 50)
    new = [Path("/dev/shm", name) for name in set(os.listdir("/dev/shm")) - before]
    open_to_all = [path for path in new if path.exists() and path.stat().st_mode & 0o077]
    assert not open_to_all, open_to_all
    run.terminate()
    finish(run)
    return SAME


CASES = [
    *(Case(f"data.train with {name}", in_train(url), cheap=name == "a password, percent-encoded")
      for name, url in URLS.items()),
    *(
        Case(
            f"a password in {key}",
            in_key(key),
            waits="CLIP_TRAIN_S3_PATIENCE_SECONDS" if key == "checkpoint.remote" else "",
        )
        for key in KEYS
    ),
    *(Case(f"a password given to {verb}", in_verb(verb)) for verb in VERBS),
    *(Case(f"a server that repeats it in {place}", from_a_server(place))
      for place in ("the reason", "the body", "a redirect")),
    Case("keys in the environment, a run that works", environment()),
    Case("keys in the environment, a step that fails", environment(fault="raise:0")),
    Case("keys in the environment, a save that fails", environment("checkpoint.every_steps=1", fault="snapshot:0:2")),
    Case("keys in the environment, a loader that fails", environment(fault="loader:0")),
    Case(
        "keys in the environment, no bucket",
        environment("checkpoint.remote=s3://nobody/x"),
        waits="CLIP_TRAIN_S3_PATIENCE_SECONDS",
    ),
    Case("keys in the environment, shards in no bucket", environment("data.train=s3://nobody/x.tar")),
    Case("a run that is killed, and those that read it", killed),
    Case("a header in log.notify", notified(f"curl -H 'Authorization: Bearer {SECRET}' http://{CLOSED}")),
    Case("a query in log.notify", notified(f"curl http://{CLOSED}/?token={SECRET}")),
    Case("a variable in log.notify", notified(f"TOKEN={SECRET} false")),
    Case("an option in log.notify", notified(f"curl --oauth2-bearer {SECRET} http://{CLOSED}")),
    Case("umask 077", modes(0o077, 0o600, 0o700)),
    Case("umask 000", modes(0o000, 0o666, 0o777)),
    Case("umask 022", modes(0o022, 0o644, 0o755)),
    Case("umask 002", modes(0o002, 0o664, 0o775)),
    Case("names in the temporary folder", temporary_names),
    Case("names in /dev/shm", shared_memory_names),
]  # fmt: skip
