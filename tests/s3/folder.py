"""A folder in the place of a bucket: checkpoints on another disk, or what an sftp server serves."""

from __future__ import annotations

import re
import threading
import urllib.error
from email.message import Message
from pathlib import Path

from tests.s3.bucket import Bucket


class Folder(Bucket):
    """The files below `path`, as a bucket's objects. url: how the code under test names it."""

    def __init__(self, path: Path, url: str) -> None:
        self.path, self._url = path, url
        path.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return self._url

    def keys(self, prefix: str = "") -> list[str]:
        files = [path for path in self.path.rglob("*") if path.is_file()]
        names = [path.relative_to(self.path).as_posix() for path in files]
        # what a killed write leaves beside the markers is hidden: it has some hundred bytes, and stays
        markers = re.compile(r".*(commit|lease)/\.[^/]*\.part")
        return sorted(n for n in names if n.startswith(prefix) and not markers.fullmatch(n))

    def get(self, key: str) -> bytes:
        try:
            return (self.path / key).read_bytes()
        except FileNotFoundError:
            raise urllib.error.HTTPError(key, 404, "missing", Message(), None) from None

    def put(self, key: str, data: bytes) -> None:
        (self.path / key).parent.mkdir(parents=True, exist_ok=True)
        (self.path / key).write_bytes(data)

    def delete(self, key: str) -> None:
        (self.path / key).unlink(missing_ok=True)

    def unfinished_uploads(self) -> list[str]:
        return []


class Watch:
    """What happens in a folder, told as a proxy tells requests: "PUT /run/..." and "DELETE /run/..."."""

    def __init__(self, folder: Folder) -> None:
        self.requests: list[str] = []
        self.folder, self._over = folder, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        before: set[str] = set()
        while not self._over.wait(0.002):
            try:
                keys = self.folder.keys()
                now = {_final_name(key) for key in keys}
            except OSError:  # a folder that was removed meanwhile
                continue
            self.requests += [f"PUT /folder/{key}" for key in sorted(now - before)]
            self.requests += [f"DELETE /folder/{key}" for key in sorted(before - now)]
            before = now


def _final_name(key: str) -> str:
    """The name that a file will have: it is written as `NAME.RANDOM.part`, perhaps hidden."""
    folder, _, name = key.rpartition("/")
    if name.endswith(".part"):
        name = name.removeprefix(".").rsplit(".", 2)[0]
    return f"{folder}/{name}"
