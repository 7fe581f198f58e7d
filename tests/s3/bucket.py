"""A bucket as seen by code that is not the package's: plain HTTP, json and hashlib."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.error
import xml.etree.ElementTree as ET
from typing import Any

from tests.checkpoint.eyes import damage, orphans_in
from tests.s3.server import Server


class Bucket:
    """Made when it is first named."""

    scheme = "s3"

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name = server, name
        server.put(name)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}"

    def _query(self, **query: str) -> ET.Element:
        return ET.fromstring(re.sub(rb' xmlns="[^"]*"', b"", self.server.get(self.name, query)))

    def keys(self, prefix: str = "") -> list[str]:
        found: list[str] = []
        after = ""
        while True:
            page = self._query(**{"list-type": "2", "prefix": prefix, "start-after": after})
            found += [key.text or "" for key in page.iter("Key")]
            if page.findtext("IsTruncated") != "true":
                return found
            after = found[-1]

    def unfinished_uploads(self) -> list[str]:
        return [upload.findtext("Key") or "" for upload in self._query(uploads="").iter("Upload")]

    def get(self, key: str) -> bytes:
        return self.server.get(f"{self.name}/{key}")

    def put(self, key: str, data: bytes) -> None:
        self.server.put(f"{self.name}/{key}", data)

    def flip(self, key: str) -> None:
        """One bit of the object, where it is stored."""
        content = self.get(key)
        self.put(key, content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])

    def delete(self, key: str) -> None:
        self.server.delete(f"{self.name}/{key}")

    def commits(self, root: str) -> dict[str, dict[str, Any]]:
        """marker's key -> its content, newest last."""
        found = {}
        for key in sorted(self.keys(f"{root}/commit/")):
            try:
                found[key] = json.loads(self.get(key))
            except urllib.error.HTTPError as e:
                if e.code != 404:  # removed since
                    raise
        return found

    def newest_step(self, root: str) -> int | None:
        commits = list(self.commits(root).values())
        return commits[-1]["step"] if commits else None

    def incomplete(self, root: str) -> list[str]:
        """What is wrong with any committed checkpoint."""

        def read(name: str) -> bytes:
            try:
                return self.get(f"{root}/{name}")
            except urllib.error.HTTPError as e:
                raise LookupError(f"{name} ({e.code})") from e

        wrong = []
        for key in self.keys(f"{root}/commit/"):
            with contextlib.suppress(urllib.error.HTTPError):  # removed since, its data after it
                why = damage(self.get(key), read)
                if why is not None and self.get(key):
                    wrong.append(f"{key}: {why}")
        return wrong

    def orphans(self, root: str) -> list[str]:
        """Keys that belong to no commit."""
        names = [key.removeprefix(f"{root}/") for key in self.keys(f"{root}/")]
        return orphans_in(
            names, [json.dumps(marker).encode() for marker in self.commits(root).values()]
        )
