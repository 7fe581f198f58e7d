"""A real S3 server for the tests: LocalStack's S3 provider, in an environment of its own (scripts/setup_s3.sh).

It verifies checksums and honours conditional writes; it accepts any credentials, so the proxy plays that part.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_SECONDS = 90  # 5 on a quiet machine
# Its standard input is a pipe from us: it closes when we are gone, killed or not, and then all of the group goes.
ENDS_WITH_US = '"$@" </dev/null & read nothing; kill -9 -$$'


def python() -> Path | None:
    """The server's interpreter, or None where it has not been set up."""
    venv = Path(os.environ.get("CLIP_TRAIN_S3_VENV", ROOT / ".venv-s3"))
    found = venv / "bin" / "python"
    return found if (venv / ".ready").exists() and found.exists() else None


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as s:
        s.bind((host, 0))
        return s.getsockname()[1]


class Server:
    """Up between `start` and `stop`; everything it writes lies in a temporary folder."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """host: the address at which it listens, and no other."""
        self.port = free_port(host)
        self._address = f"{host}:{self.port}"
        self.url = f"http://{self._address}"
        self._folder = Path(tempfile.mkdtemp(prefix="s3-server-"))
        self._process: subprocess.Popen | None = None

    def start(self) -> Server:
        interpreter = python()
        assert interpreter is not None, "run scripts/setup_s3.sh"
        for name in ("root", "tmp", "cache"):
            (self._folder / name).mkdir()
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(self._folder),
            "XDG_CACHE_HOME": str(self._folder / "cache"),
            "TMPDIR": str(self._folder / "tmp"),
            "FILESYSTEM_ROOT": str(self._folder / "root"),
            "GATEWAY_LISTEN": self._address,
            "LOCALSTACK_HOST": self._address,
            "SERVICES": "s3",
            "EAGER_SERVICE_LOADING": "1",
            "STRICT_SERVICE_LOADING": "1",
            "DISABLE_EVENTS": "1",
            "SKIP_SSL_CERT_DOWNLOAD": "1",
            "DNS_ADDRESS": "0",
        }
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", ENDS_WITH_US, "sh", str(interpreter), "-m", "localstack.runtime.main"],
                cwd=self._folder, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # nothing in it is worth a tidy end
            self._process.communicate()
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def environment(self, url: str | None = None) -> dict[str, str]:
        """What a process needs to find it, or a proxy at `url`."""
        return {
            "AWS_ENDPOINT_URL": url or self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def put(self, path: str, data: bytes = b"") -> None:
        """`path` is "bucket" or "bucket/key". Plain HTTP: no code of the package under test."""
        request = urllib.request.Request(f"{self.url}/{path}", data=data, method="PUT")
        request.add_header("Authorization", SIGNED)
        urllib.request.urlopen(request, timeout=30).close()

    def delete(self, path: str) -> None:
        request = urllib.request.Request(f"{self.url}/{path}", method="DELETE", headers={"Authorization": SIGNED})
        urllib.request.urlopen(request, timeout=30).close()

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(f"{self.url}/{path}", headers={"Authorization": SIGNED})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{self.url}/_localstack/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.1)
        log = (self._folder / "log").read_text(errors="replace")
        raise RuntimeError(f"the S3 server did not start\n{log[-3000:]}")


# Tells the server that S3 is meant; it does not look closer.
SIGNED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
