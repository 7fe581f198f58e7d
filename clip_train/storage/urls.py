"""From a path or URL, as a user writes it, to an open file or a storage."""

from __future__ import annotations

import glob as local_glob
import os
import re
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import unquote

from clip_train.errors import UserError
from clip_train.storage.base import Storage
from clip_train.storage.blocks import Checksums, LocalBlocks
from clip_train.storage.config import StorageConfig
from clip_train.storage.local import LocalStorage

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)(?:://|::)")


def is_remote(url: str) -> bool:
    """Whether `url` needs more than the local file system."""
    scheme = _SCHEME.match(url)
    return scheme is not None and scheme[1].lower() != "file"


def local_path(url: str) -> Path:
    """The path of a local file, as `/a/b`, `~/b` or `file:///a/b`. ValueError if it is remote."""
    if is_remote(url):
        raise ValueError(f"not a local path: {url}")
    if url[:7].lower() == "file://":
        return Path(unquote(url[7:].removeprefix("localhost")))
    return Path(url).expanduser()


def open_storage(url: str | os.PathLike[str], *, patience_seconds: float | None = None) -> Storage:
    """The storage rooted at a local folder or at a remote URL (S3 can be written to). Touches nothing yet.

    patience_seconds: how long S3 is asked again before an operation fails (null: as `S3Storage` has it).
    UserError for an S3 URL without a bucket, or with credentials in it.
    """
    url = os.fspath(url)
    if not is_remote(url):
        return LocalStorage(local_path(url))
    if url.lower().startswith(("s3://", "s3a://")):
        from clip_train.storage.s3 import S3Storage

        bucket = url.split("://", 1)[1].split("/")[0]
        if not bucket or "@" in bucket:
            shown = f"s3://...{bucket[bucket.rfind('@') :]}" if "@" in bucket else url
            raise UserError(f"{shown}: write s3://bucket/prefix; credentials come from the environment or a profile")
        return S3Storage(url, patience_seconds=patience_seconds)
    from clip_train.storage.remote import RemoteStorage

    return RemoteStorage(url)


def open_read(
    url: str | os.PathLike[str], config: StorageConfig | None = None, checksums: Checksums | None = None
) -> BinaryIO:
    """A seekable stream over a local file or a remote object, held against `checksums` where they are given.

    FileNotFoundError; another OSError where it cannot be told: a `ReadError` has been retried enough already;
    UserError for a protocol that is not known.
    """
    url = os.fspath(url)
    if not is_remote(url):
        path = local_path(url)
        return path.open("rb") if checksums is None else cast(BinaryIO, LocalBlocks(path, checksums))
    from clip_train.storage import remote

    return remote.open_read(url, config or StorageConfig(), checksums)


def write_bytes(url: str | os.PathLike[str], data: bytes) -> None:
    """A small file, local or remote: it appears whole or not at all, replacing what was there. OSError."""
    url = os.fspath(url)
    if not is_remote(url):
        path = local_path(url)
        LocalStorage(path.parent).put_bytes(path.name, data)
        return
    from clip_train.storage import remote

    remote.write_bytes(url, data)


def expand_glob(url: str | os.PathLike[str]) -> list[str]:
    """The files that a pattern (`*`, `**`, `?`, `[...]`) matches, sorted; without a pattern, `url` itself.

    UserError when a pattern matches nothing. In `http(s)://` a `?` is a query, not a pattern.
    """
    url = os.fspath(url)
    magic = "*[" if url.lower().startswith(("http://", "https://")) else "*?["
    if not any(c in url for c in magic):
        return [url]
    if is_remote(url):
        from clip_train.storage import remote

        found = remote.glob(url)
    else:
        pattern = local_path(url)
        found = [url] if pattern.exists() else sorted(local_glob.glob(str(pattern), recursive=True))
        found = [each for each in found if not os.path.isdir(each)]
    if not found:
        raise UserError(f"no file matches {url}: check the path, and that it can be read from here")
    return found
