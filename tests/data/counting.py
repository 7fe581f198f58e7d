"""A remote store that is a folder, and writes down what is read of it, by any process."""

from __future__ import annotations

import os
from pathlib import Path

from clip_train.storage.fsspec_store import FsspecStorage
from clip_train.storage.remote import Pace

SCHEME = "tests.data.counting.Counting://"


class Counting(FsspecStorage):
    """`SCHEME` and an absolute path. Each range is a line of `log`."""

    def __init__(self, url: str, **limits: float) -> None:
        super().__init__(url.replace(SCHEME, "file://"), **limits)

    async def get(
        self, key: str, begin: int, end: int | None, tag: str | None, pace: Pace
    ) -> bytes:
        data = await super().get(key, begin, end, tag, pace)
        with log(Path(key)).open("a") as file:
            file.write(f"{os.getpid()} {begin} {begin + len(data)}\n")
        return data


def log(path: Path) -> Path:
    return path.with_suffix(".reads")


def bytes_read(folder: Path) -> int:
    """Of all shards in a folder."""
    lines = "".join(path.read_text() for path in folder.glob("*.reads")).splitlines()
    return sum(int(end) - int(begin) for _, begin, end in map(str.split, lines))
