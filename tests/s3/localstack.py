"""LocalStack's S3 provider, in an environment of its own (scripts/setup_s3.sh).

It verifies checksums and honours conditional writes; it accepts any credentials, so the proxy plays that part.
Without LISTEN_THERE it would listen at every address of this machine, whatever GATEWAY_LISTEN names.
Without OVERRIDE_IN_DOCKER it would, in a container, keep its certificate in /var/lib/localstack, where one server
reads what another is writing.
"""

from __future__ import annotations

import http.client
import os
from pathlib import Path

from tests.s3.server import ROOT, Server

LISTEN_THERE = """
import functools, runpy, sys
from twisted.internet import endpoints
endpoints.TCP4ServerEndpoint = functools.partial(endpoints.TCP4ServerEndpoint, interface=sys.argv[1])
runpy.run_module("localstack.runtime.main", run_name="__main__")
"""


class LocalStack(Server):
    name = "LocalStack"
    start_seconds = 600  # 5 on a quiet machine
    access_key = secret_key = "test"

    @classmethod
    def missing(cls) -> str | None:
        if not (cls._venv() / ".ready").exists() or not (cls._venv() / "bin" / "python").exists():
            return "the S3 server is not set up: run scripts/setup_s3.sh (`make test` does)"
        return None

    @staticmethod
    def _venv() -> Path:
        return Path(os.environ.get("CLIP_TRAIN_S3_VENV", ROOT / ".venv-s3")).absolute()

    def command(self) -> tuple[list[str], dict[str, str]]:
        for name in ("root", "tmp", "cache"):
            (self.folder / name).mkdir()
        host = self.address.partition(":")[0]
        return [str(self._venv() / "bin" / "python"), "-c", LISTEN_THERE, host], {
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "TMPDIR": str(self.folder / "tmp"),
            "FILESYSTEM_ROOT": str(self.folder / "root"),
            "OVERRIDE_IN_DOCKER": "0",
            "GATEWAY_LISTEN": self.address,
            "LOCALSTACK_HOST": self.address,
            "SERVICES": "s3",
            "EAGER_SERVICE_LOADING": "1",
            "STRICT_SERVICE_LOADING": "1",
            "DISABLE_EVENTS": "1",
            "SKIP_SSL_CERT_DOWNLOAD": "1",
            "DNS_ADDRESS": "0",
        }

    def is_up(self) -> bool:
        try:
            self.request("GET", "_localstack/health", tries=1)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def add_key(self, access_key: str, secret_key: str) -> None:
        pass

    def remove_key(self, access_key: str) -> None:
        pass
