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
from clip_train.storage.blocks import Checksums
from clip_train.storage.config import StorageConfig
from clip_train.storage.local import LocalStorage

_MAGIC = re.compile(r"[*?[]")
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


def is_s3(url: str) -> bool:
    return url.lower().startswith(("s3://", "s3a://"))


def open_storage(url: str | os.PathLike[str], *, patience_seconds: float | None = None) -> Storage:
    """The storage rooted at a local folder or at a remote URL (S3 can be written to). Touches nothing yet.

    patience_seconds: how long S3 is asked again before an operation fails (null: as `ObjectStorage` has it).
    UserError for an S3 URL without a bucket, or with credentials in it.
    """
    url = os.fspath(url)
    if not is_remote(url):
        return LocalStorage(local_path(url))
    if not is_s3(url):
        from clip_train.storage.other import ReadOnlyStorage

        return ReadOnlyStorage(url)
    from clip_train.storage.object_store import ObjectStorage

    bucket, _ = _split(url)
    if not bucket or "@" in bucket:
        shown = f"s3://...{bucket[bucket.rfind('@') :]}" if "@" in bucket else url
        raise UserError(
            f"{shown}: write s3://bucket/prefix; credentials come from the environment or a profile"
        )
    return ObjectStorage(url, patience_seconds=patience_seconds)


def open_read(
    url: str | os.PathLike[str],
    config: StorageConfig | None = None,
    checksums: Checksums | None = None,
) -> BinaryIO:
    """A seekable stream over a local file or a remote object, which is compared with `checksums` if they are given.

    FileNotFoundError; another OSError where it cannot be known: a `StorageError` has been retried enough already;
    UserError for a protocol that is not known.
    """
    url, config = os.fspath(url), config or StorageConfig()
    if not is_remote(url):
        return local_path(url).open("rb")
    from clip_train.storage.bucket import shared_bucket
    from clip_train.storage.reader import FsspecObject, RangedFile, S3Object

    bucket, key = _split(url)
    remote = (
        S3Object(shared_bucket(bucket), key, config) if is_s3(url) else FsspecObject(url, config)
    )
    return cast(BinaryIO, RangedFile(url, remote, config, checksums))


def write_bytes(url: str | os.PathLike[str], data: bytes) -> None:
    """A small file, local or remote: it appears whole or not at all, replacing what was there. OSError."""
    url = os.fspath(url)
    if is_remote(url) and not is_s3(url):
        from clip_train.storage import other

        other.write_bytes(url, data)
        return
    folder, name = (url.rpartition("/")[::2]) if is_s3(url) else os.path.split(local_path(url))
    open_storage(folder).put_bytes(name, data)


def expand_glob(url: str | os.PathLike[str]) -> list[str]:
    """The files that a pattern (`*`, `**`, `?`, `[...]`) matches, sorted; without a pattern, `url` itself.

    UserError when a pattern matches nothing; OSError where a folder cannot be listed. In `http(s)://` a `?` is a
    query, not a pattern.
    """
    url = os.fspath(url)
    magic = "*[" if url.lower().startswith(("http://", "https://")) else "*?["
    if not any(c in url for c in magic):
        return [url]
    if is_s3(url):
        found = _matching_objects(url)
    elif is_remote(url):
        from clip_train.storage import other

        found = other.glob(url)
    else:
        pattern = local_path(url)
        found = [url] if pattern.exists() else sorted(local_glob.glob(str(pattern), recursive=True))
        found = [each for each in found if not os.path.isdir(each)]
    if not found:
        raise UserError(f"no file matches {url}: check the path, and that it can be read from here")
    return found


def _matching_objects(url: str) -> list[str]:
    """By one listing of all below the pattern's last plain folder: fsspec's own search passes over what it may not
    list.
    """
    from fsspec.utils import glob_translate

    bucket, pattern = _split(url)
    if _MAGIC.search(bucket):
        raise UserError(f"{url}: name the bucket; patterns match the keys in it")
    like = re.compile(glob_translate(pattern))
    found = open_storage(f"s3://{bucket}").list(_MAGIC.split(pattern)[0].rpartition("/")[0])
    folders = {each.name.rpartition("/")[0] for each in found}  # consoles make objects for them
    return [
        f"s3://{bucket}/{each.name}"
        for each in found
        if like.match(each.name) and each.name not in folders
    ]


def _split(url: str) -> tuple[str, str]:
    """Bucket and key of an S3 URL."""
    bucket, _, key = url.partition("://")[2].partition("/")
    return bucket, key
