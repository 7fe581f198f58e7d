"""Google Cloud Storage: no package registry has a server of it that honors the conditions of its XML API.

fake-gcs-server and gcp-storage-emulator answer the JSON API, and neither lists, deletes nor uploads in parts by XML,
which obstore does. So this one is our own (gcs_server.py): it shows what the package does with the answers that
Google's documentation promises, not that Google gives them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from tests.s3.bucket import Bucket
from tests.s3.proxy import Dialect
from tests.s3.server import Server


class GoogleCloud(Server):
    name = "a server of our own for Google Cloud Storage's XML API"
    start_seconds = 120
    access_key, secret_key = "", "a-token"
    dialect: ClassVar[Dialect] = Dialect(condition="x-goog-if-generation-match")

    @classmethod
    def missing(cls) -> str | None:
        return None

    def command(self) -> tuple[list[str], dict[str, str]]:
        host, _, port = self.address.partition(":")
        server = Path(__file__).with_name("gcs_server.py")
        return [sys.executable, "-S", str(server), host, port, self.secret_key], {}

    def is_up(self) -> bool:
        return self.answers()

    def environment(self, url: str | None = None) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": url or self.url, "GOOGLE_BEARER_TOKEN": self.secret_key}

    def sign(
        self, method: str, url: str, target: str, data: bytes, headers: dict[str, str]
    ) -> dict[str, str]:
        return {**headers, "Authorization": f"Bearer {self.secret_key}"}

    def bucket(self, name: str) -> Bucket:
        return GoogleBucket(self, name)

    def add_key(self, access_key: str, secret_key: str) -> None:
        raise NotImplementedError("this server has one token: tests of several keys are S3's")

    def remove_key(self, access_key: str) -> None:
        raise NotImplementedError("this server has one token: tests of several keys are S3's")


class GoogleBucket(Bucket):
    scheme = "gs"
