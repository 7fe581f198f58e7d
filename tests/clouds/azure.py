"""Azurite, Microsoft's own emulator of Azure's blobs, from npm (scripts/setup_clouds.sh).

It verifies signatures and honors If-None-Match, as Azure does.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import re
import shutil
import urllib.error
import urllib.parse
import xml.etree.ElementTree as ET
from email.utils import formatdate
from pathlib import Path
from typing import ClassVar

from tests.s3.bucket import Bucket
from tests.s3.proxy import Dialect
from tests.s3.server import ROOT, Server

# those that every Azurite has
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VERSION = "2021-12-02"


class Azurite(Server):
    name = "Azurite"
    start_seconds = 300  # 1 on a quiet machine
    access_key, secret_key = ACCOUNT, KEY
    dialect: ClassVar[Dialect] = Dialect(
        page="maxresults",
        entry="Blob",
        signed=r"x-ms-.*|content-(type|md5|encoding|language)|if-.*|range|date",
    )

    @classmethod
    def missing(cls) -> str | None:
        if shutil.which("node") is None:
            return "Azurite needs Node.js, which is not on this machine"
        if not (cls._folder() / ".ready").exists():
            return "Azurite is not set up: run scripts/setup_clouds.sh (`make test` does)"
        return None

    @staticmethod
    def _folder() -> Path:
        return Path(os.environ.get("CLIP_TRAIN_CLOUDS", ROOT / ".clouds")).absolute()

    def command(self) -> tuple[list[str], dict[str, str]]:
        host, _, port = self.address.partition(":")
        program = self._folder() / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
        options = ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent"]  # fmt: skip
        return ["node", str(program), "--blobHost", host, "--blobPort", port, *options], {}

    def is_up(self) -> bool:
        return self.answers()

    def environment(self, url: str | None = None) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ENDPOINT": f"{url or self.url}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        }

    def put(self, path: str, data: bytes = b"") -> None:
        if "/" in path:
            self.request("PUT", path, data=data, headers={"x-ms-blob-type": "BlockBlob"})
            return
        with contextlib.suppress(urllib.error.HTTPError):  # it exists
            self.request("PUT", path, {"restype": "container"})

    def request(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        data: bytes = b"",
        headers: dict[str, str] | None = None,
        tries: int = 5,
    ) -> bytes:
        if data:  # what urllib would add, and the signature must have
            headers = {"content-type": "application/octet-stream", **(headers or {})}
        return super().request(method, f"{ACCOUNT}/{path}", query, data, headers, tries)

    def sign(
        self, method: str, url: str, target: str, data: bytes, headers: dict[str, str]
    ) -> dict[str, str]:
        """The scheme "Shared Key" of Azure's documentation."""
        headers = {name.lower(): value for name, value in headers.items()}
        headers = {"x-ms-version": VERSION, "date": formatdate(usegmt=True), **headers}
        path, _, query = target.partition("?")
        own = "".join(f"{n}:{headers[n]}\n" for n in sorted(headers) if n.startswith("x-ms-"))
        asked = sorted(urllib.parse.parse_qsl(query, keep_blank_values=True))
        resource = f"/{ACCOUNT}{path}" + "".join(f"\n{n.lower()}:{v}" for n, v in asked)
        lines = [
            method, headers.get("content-encoding", ""), headers.get("content-language", ""),
            str(len(data) or ""), headers.get("content-md5", ""), headers.get("content-type", ""),
            headers["date"], headers.get("if-modified-since", ""), headers.get("if-match", ""),
            headers.get("if-none-match", ""), headers.get("if-unmodified-since", ""),
            headers.get("range", ""),
        ]  # fmt: skip
        text = "\n".join(lines) + f"\n{own}{resource}"
        digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
        signature = base64.b64encode(digest).decode()
        return {**headers, "authorization": f"SharedKey {ACCOUNT}:{signature}"}

    def bucket(self, name: str) -> Bucket:
        return AzureContainer(self, name)

    def add_key(self, access_key: str, secret_key: str) -> None:
        raise NotImplementedError(
            "Azurite has one account with one key: tests of several keys are S3's"
        )

    def remove_key(self, access_key: str) -> None:
        raise NotImplementedError(
            "Azurite has one account with one key: tests of several keys are S3's"
        )


class AzureContainer(Bucket):
    scheme = "az"

    def _blobs(self, prefix: str, include: str = "") -> list[ET.Element]:
        found: list[ET.Element] = []
        query = {"restype": "container", "comp": "list", "prefix": prefix}
        if include:
            query["include"] = include
        while True:
            page = ET.fromstring(re.sub(rb"^[^<]*", b"", self.server.get(self.name, query)))
            found += page.iter("Blob")
            query["marker"] = page.findtext("NextMarker") or ""
            if not query["marker"]:
                return found

    def keys(self, prefix: str = "") -> list[str]:
        return [blob.findtext("Name") or "" for blob in self._blobs(prefix)]

    def unfinished_uploads(self) -> list[str]:
        """Blobs that have blocks, and no content yet."""
        with_blocks = [b.findtext("Name") or "" for b in self._blobs("", "uncommittedblobs")]
        return sorted(set(with_blocks) - set(self.keys()))
