"""The twelve mistakes of docs/troubleshooting.md: each command is typed, and what it prints is what the page shows."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from launcher.cli.main import entry
from tests.data.shards import jpeg, write_shard
from tests.documents import ROOT
from tests.launcher.conftest import MODEL, RECIPE, clean_environment, finish, planted, wait_for_step
from tests.warm import Command

pytestmark = pytest.mark.engine

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Twelve mistakes")[2]
SHOWN = {
    name: (command, output)
    for name, command, output in re.findall(
        r"^### ([^`\n]+)\n.*?```console\n\$ (.*?)\n(.*?)```", PAGE, re.M | re.S
    )
}
STATUS = {"A full disk": 1, "Ctrl-C": 75, "Ctrl-C twice": 130}  # of all others 2


@pytest.fixture
def home(tmp_path, data, model) -> Path:
    """A folder with `my.yaml`, which trains until it is stopped, and what the mistakes are made with."""
    recipe = yaml.safe_load(RECIPE.format(run_dir="runs/my-run", train=data.train, model=model))
    recipe["run"]["steps"] = 100_000
    recipe["checkpoint"] = {"every_steps": 2}
    recipe["log"]["progress"] = False
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(recipe))
    with (tmp_path / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("filepath", "title"), ("0.jpg", "a picture")])
    (tmp_path / "no_captions").mkdir()
    write_shard(
        tmp_path / "no_captions" / "00000.tar",
        [("0.jpg", jpeg(0)), ("0.json", b'{"alt": "a picture"}')],
    )
    odd = {**MODEL, "vision_cfg": {**MODEL["vision_cfg"], "image_size": 30}}
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    return tmp_path


def start(name: str, home: Path, **more) -> Command:
    environ = clean_environment() | {"PYTHONPATH": str(ROOT)} | more.pop("environ", {})
    arguments = shlex.split(SHOWN[name][0], comments=True)
    assert arguments[0] == "clip-train"
    return Command(arguments[1:], env=environ, cwd=home, **more)


def assert_shown(name: str, process: Command) -> None:
    """The page's words in what is printed, `…` for anything; line ends are the page's own."""
    status, out = finish(process)
    assert status == STATUS.get(name, 2) and "Traceback" not in out, out
    pattern = ".*".join(re.escape(" ".join(part.split())) for part in SHOWN[name][1].split("…"))
    assert re.search(pattern, " ".join(out.split())), (
        f"the page shows\n{SHOWN[name][1]}\nand printed was\n{out}"
    )


def test_the_page_has_twelve():
    assert len(SHOWN) == 12, list(SHOWN)


@pytest.mark.parametrize(
    "name",
    [
        "A wrong path",
        "A table instead of shards",
        "No captions",
        "A typo in a key",
        "A model that does not exist",
        "A wrong image size",
    ],
)
def test_of_the_recipe(name, home):
    assert_shown(name, start(name, home))


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed here")
def test_no_wandb(home):
    assert_shown("No wandb", start("No wandb", home))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """30 MiB at `folder`; the test is skipped where this process may not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a full disk needs the right to mount a small one")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(home):
    with small_disk(home / "small"):
        assert_shown("A full disk", start("A full disk", home))


def entry_without_rights() -> None:
    """As a user to whom permissions apply, which they do not to root."""
    if os.geteuid() == 0:
        version_3, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None).capset(version_3, none) == 0
    entry()


def test_no_right_to_write(home):
    (home / "shared").mkdir(mode=0o555)
    assert_shown("No right to write", start("No right to write", home, target=entry_without_rights))


class Refusing(BaseHTTPRequestHandler):
    """As S3 answers to a key that it does not know."""

    def do_GET(self) -> None:
        body = b"<Error><Code>InvalidAccessKeyId</Code><Message>The AWS Access Key Id you provided does not exist in "
        body += b"our records.</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


for method in ("HEAD", "PUT", "POST", "DELETE"):
    setattr(Refusing, f"do_{method}", Refusing.do_GET)


def test_a_wrong_s3_key(home):
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environ = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "AKIAMISTYPED", "AWS_SECRET_ACCESS_KEY": "secret",
        }  # fmt: skip
        assert_shown("A wrong S3 key", start("A wrong S3 key", home, environ=environ))
        server.shutdown()


def test_ctrl_c(home):
    process = start("Ctrl-C", home)
    wait_for_step(home / "runs" / "my-run", 3, process)
    process.send_signal(signal.SIGINT)
    assert_shown("Ctrl-C", process)


def test_ctrl_c_twice(home):
    process = start("Ctrl-C twice", home, environ=planted("slow:0", home))  # its saves take 13 s
    wait_for_step(home / "runs" / "my-run", 1, process)
    process.send_signal(signal.SIGINT)
    time.sleep(2)  # two at once would be one; by now it saves
    process.send_signal(signal.SIGINT)
    assert_shown("Ctrl-C twice", process)
