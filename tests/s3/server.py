"""A real S3 server for the tests, behind one interface: `tests/s3/localstack.py` or `tests/s3/ceph.py`.

CLIP_TRAIN_S3_SERVER says which: `localstack` (the default) or `ceph` (`make acceptance`).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import http.client
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tests.s3.proxy import Dialect

if TYPE_CHECKING:
    from tests.s3.bucket import Bucket

ROOT = Path(__file__).parents[2]
REGION = "us-east-1"
# Its standard input is a pipe from us: it closes when we are gone, killed or not, and then all of the group goes;
# and so it does when the server itself ends.
ENDS_WITH_US = '{ "$@" </dev/null; kill -9 -$$; } & read nothing; kill -9 -$$'


class Server(ABC):
    """Up between `start` and `stop`; everything it writes lies in a temporary folder."""

    name: ClassVar[str]
    start_seconds: ClassVar[float]  # at most, on a busy machine
    access_key: ClassVar[str]
    secret_key: ClassVar[str]
    dialect: ClassVar[Dialect] = Dialect()

    def __init__(self, host: str = "127.0.0.1") -> None:
        """host: the address at which it is asked, and the only one at which LocalStack listens."""
        self.port = self._free_port(host)
        self.address = f"{host}:{self.port}"
        self.url = f"http://{self.address}"
        self.folder = Path(tempfile.mkdtemp(prefix="s3-server-"))
        self._process: subprocess.Popen | None = None

    # -- what a server must say of itself

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """What to do before it can be started here; None where it can."""

    @abstractmethod
    def command(self) -> tuple[list[str], dict[str, str]]:
        """What runs it in the foreground, and in which environment."""

    @abstractmethod
    def add_key(self, access_key: str, secret_key: str) -> None:
        """From now on requests may be signed with this pair as well."""

    @abstractmethod
    def remove_key(self, access_key: str) -> None:
        """And no longer with this one, where the server looks."""

    def is_up(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=60).close()
        except OSError:
            return False
        return True

    def answers(self) -> bool:
        """Whether it answers at all, if only to refuse."""
        try:
            urllib.request.urlopen(self.url, timeout=60).close()
        except urllib.error.HTTPError as e:
            e.close()
        except OSError:
            return False
        return True

    # -- its life

    def start(self) -> Server:
        assert self.missing() is None, self.missing()
        command, environment = self.command()
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
            **environment,
        }
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", ENDS_WITH_US, "sh", *command],
                cwd=self.folder, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            if self.is_up():
                return
            time.sleep(0.1)
        log = (self.folder / "log").read_text(errors="replace")
        raise RuntimeError(f"{self.name} did not start\n{log[-3000:]}")

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # nothing in it is worth a tidy end
            self._process.communicate()
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)

    @classmethod
    def _free_port(cls, host: str) -> int:
        return free_ports(1, host)

    # -- its use

    def environment(self, url: str | None = None) -> dict[str, str]:
        """What a process needs to find it, or a proxy at `url`."""
        return {
            "AWS_ENDPOINT_URL": url or self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def bucket(self, name: str) -> Bucket:
        from tests.s3.bucket import Bucket

        return Bucket(self, name)

    def put(self, path: str, data: bytes = b"") -> None:
        """`path` is "bucket" or "bucket/key"."""
        self.request("PUT", path, data=data)

    def make_public(self, path: str) -> None:
        """Anyone may read the object, or list the bucket."""
        self.request("PUT", path, {"acl": ""}, headers={"x-amz-acl": "public-read"})

    def delete(self, path: str) -> None:
        self.request("DELETE", path)

    def get(self, path: str, query: dict[str, str] | None = None) -> bytes:
        return self.request("GET", path, query or {})

    def request(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        data: bytes = b"",
        headers: dict[str, str] | None = None,
        tries: int = 5,
    ) -> bytes:
        """Plain HTTP, signed by hand: no code of the package under test, nor of its S3 client.

        Asked again where a busy server cuts an answer short or has an error: that says nothing about what is stored.
        """
        asked = urllib.parse.urlencode(sorted((query or {}).items()), quote_via=urllib.parse.quote)
        path = "/" + urllib.parse.quote(path)
        target = f"{path}{'?' * bool(asked)}{asked}"
        for left in reversed(range(tries)):
            signed = self.sign(method, self.url, target, data, headers or {})
            request = urllib.request.Request(
                self.url + target, data=data or None, method=method, headers=signed
            )
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    return answer.read()
            except (http.client.HTTPException, OSError) as e:
                if not left or (isinstance(e, urllib.error.HTTPError) and e.code < 500):
                    raise
                time.sleep(0.5)
        raise AssertionError("unreachable")

    def sign(
        self, method: str, url: str, target: str, data: bytes, headers: dict[str, str]
    ) -> dict[str, str]:
        """The headers of a request to `url`, with these among them; target: the path, and the query if any."""
        path, _, query = target.partition("?")
        query = "&".join(each if "=" in each else f"{each}=" for each in query.split("&") if each)
        return signature(method, url, path, query, data, headers, self.access_key, self.secret_key)


def signature(
    method: str,
    url: str,
    path: str,
    query: str,
    data: bytes,
    headers: dict[str, str],
    access_key: str,
    secret: str,
) -> dict[str, str]:
    """The headers of a request in AWS's signature, version 4, with these `headers` among them."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(data).hexdigest()
    headers = {
        "host": url.partition("://")[2],
        "x-amz-content-sha256": digest,
        "x-amz-date": now,
        **headers,
    }
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    asked = hashlib.sha256(
        "\n".join([method, path, query, lines, names, digest]).encode()
    ).hexdigest()
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    key = f"AWS4{secret}".encode()
    for part in [*scope.split("/"), f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{asked}"]:
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    told = f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
    return {**headers, "Authorization": told}


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of so many free ones in a row."""
    while True:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
            first = 0
            for i in range(count):
                each = held.enter_context(socket.socket())
                each.bind((host, first + i if first else 0))
                first = first or each.getsockname()[1]
            return first


def chosen() -> type[Server]:
    """The kind of server that CLIP_TRAIN_S3_SERVER names."""
    from tests.s3.ceph import Ceph
    from tests.s3.localstack import LocalStack

    kinds: dict[str, type[Server]] = {"localstack": LocalStack, "ceph": Ceph}
    name = os.environ.get("CLIP_TRAIN_S3_SERVER", "localstack")
    assert name in kinds, f"CLIP_TRAIN_S3_SERVER={name}: one of {', '.join(kinds)}"
    return kinds[name]
