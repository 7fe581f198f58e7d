"""Ceph's S3 gateway with a cluster of one behind it (scripts/setup_ceph.sh, scripts/run_ceph.sh).

A server with another ancestry than LocalStack's: signatures are checked for real, what it says of errors is its own.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.s3.server import ROOT, Server, free_ports

SCRIPT = str(ROOT / "scripts" / "run_ceph.sh")


class Ceph(Server):
    name = "Ceph radosgw"
    start_seconds = 600  # 15 on a quiet machine
    access_key, secret_key = "acceptance", "the-secret-of-acceptance"

    @classmethod
    def missing(cls) -> str | None:
        return (
            None
            if (cls._unpacked() / ".ready").exists()
            else "Ceph is not set up: run scripts/setup_ceph.sh"
        )

    @staticmethod
    def _unpacked() -> Path:
        return Path(os.environ.get("CLIP_TRAIN_CEPH", ROOT / ".ceph")).absolute()

    @classmethod
    def _free_port(cls, host: str) -> int:
        assert host == "127.0.0.1", "scripts/run_ceph.sh serves the loopback only"
        return free_ports(3, host)

    @property
    def _cluster(self) -> str:
        return str(self.folder / "cluster")

    def command(self) -> tuple[list[str], dict[str, str]]:
        return ["bash", SCRIPT, "serve", str(self._unpacked()), self._cluster, str(self.port)], {}

    def is_up(self) -> bool:
        if not super().is_up():
            return False
        self.add_key(self.access_key, self.secret_key)
        return True

    def add_key(self, access_key: str, secret_key: str) -> None:
        self._admin("key", access_key, secret_key)

    def remove_key(self, access_key: str) -> None:
        self._admin("nokey", access_key)

    def _admin(self, verb: str, *arguments: str) -> None:
        line = ["bash", SCRIPT, verb, str(self._unpacked()), self._cluster, *arguments]
        subprocess.run(line, check=True, capture_output=True, timeout=600)
