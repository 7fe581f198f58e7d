"""Open a file or a storage by the path or URL that a user writes."""

import glob as local_glob
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast, get_args
from urllib.parse import unquote

from clip_train.errors import UserError
from clip_train.places import CACHES
from clip_train.settings import import_path
from clip_train.storage.base import Storage
from clip_train.storage.blocks import BlockCache, Checksums
from clip_train.storage.config import Client, StorageConfig
from clip_train.storage.local import LocalStorage

if TYPE_CHECKING:
    from clip_train.storage.remote import RemoteStorage

# A store is a subclass of `remote.RemoteStorage` that takes a URL. A scheme may be its dotted path
# as well: `my_package.MyStore://bucket/prefix`, or `my_package.stores:MyStore://bucket/prefix`.
STORES = {
    "s3": "clip_train.storage.object_store.S3Storage",
    "s3a": "clip_train.storage.object_store.S3Storage",
    "gs": "clip_train.storage.object_store.GoogleStorage",
    "az": "clip_train.storage.object_store.AzureStorage",
    "sftp": "clip_train.storage.sftp_store.SftpStorage",
    "fsspec+s3": "clip_train.storage.s3fs_store.S3fsStorage",
    "fsspec+s3a": "clip_train.storage.s3fs_store.S3fsStorage",
}
_ANY_OTHER = "clip_train.storage.fsspec_store.FsspecStorage"
CLIENT = "CLIP_TRAIN_STORAGE_CLIENT"  # environment: what `auto` means, in child processes too
# what `use_client` has set in the environment, and what was there before
_replaced: list[tuple[str, str | None]] = []
_SCHEME = re.compile(r"^([A-Za-z_][A-Za-z0-9+._:-]*?)(?:://|::)")


def _scheme(url: str) -> str:
    match = _SCHEME.match(url)
    return "" if match is None else match[1]


def is_remote(url: str) -> bool:
    """Whether `url` needs more than the local file system."""
    return _scheme(url).lower() not in ("", "file")


def local_path(url: str) -> Path:
    """The path of a local file, as `/a/b`, `~/b` or `file:///a/b`. ValueError if it is remote."""
    if is_remote(url):
        raise ValueError(f"not a local path: {url}")
    if url[:7].lower() == "file://":
        return Path(unquote(url[7:].removeprefix("localhost")))
    return Path(url).expanduser()


def use_client(client: Client) -> None:
    """From now on, `storage.client: auto` means this client, in this process and in those that it
    starts. auto: what the environment says."""
    if _replaced:
        ours, before = _replaced.pop()
        if os.environ.get(CLIENT) == ours:
            os.environ.pop(CLIENT)
            os.environ.update({} if before is None else {CLIENT: before})
    if client != "auto":
        _replaced.append((client, os.environ.get(CLIENT)))
        os.environ[CLIENT] = client


def client_in_use(client: Client = "auto") -> Client:
    """`obstore` or `fsspec`. UserError for another value in the environment."""
    if client != "auto":
        return client
    value = os.environ.get(CLIENT, "auto")
    if value not in get_args(Client):
        raise UserError(f"{CLIENT} ({value}) must be auto, obstore or fsspec; correct or unset it")
    return "fsspec" if value == "fsspec" else "obstore"


def open_storage(
    url: str | os.PathLike[str], *, patience_seconds: float | None = None, client: Client = "auto"
) -> Storage:
    """Return the storage rooted at a local folder or a remote URL. Sends no request yet.

    patience_seconds: how long a remote operation is retried (None: see `RemoteStorage`).
    client: `storage.client` (auto: see `use_client`).
    UserError for a URL without a bucket or with credentials in it, an unknown protocol, or a store
    class that lacks a method.
    """
    url = os.fspath(url)
    if not is_remote(url):
        return LocalStorage(local_path(url))
    scheme = _scheme(url).replace(":", ".")
    name = scheme.lower()
    if name in CACHES and "::" in url:
        from clip_train.storage.cached import CachedStorage

        target = url.partition("::")[2]
        behind = open_storage(target, patience_seconds=patience_seconds, client=client)
        return CachedStorage(url, behind, patience_seconds=patience_seconds)
    if name in ("s3", "s3a", "gs", "az") and client_in_use(client) == "fsspec":
        name = f"fsspec+{name}"
    path = STORES.get(name, scheme if "." in scheme else _ANY_OTHER)
    store = import_path(url, path, Storage, remedy="correct the URL, or PYTHONPATH")
    missing = sorted(store.__abstractmethods__)
    if missing:
        raise UserError(f"{url}: {path} has no {', '.join(missing)}; define what is missing")
    return store(url, patience_seconds=patience_seconds)


def open_read(
    url: str | os.PathLike[str],
    config: StorageConfig | None = None,
    checksums: Checksums | None = None,
    cache: BlockCache | None = None,
) -> BinaryIO:
    """Open a seekable stream over a local file or a remote object.

    checksums: a remote object is compared with them (`clip-train index --check` compares local
    files). cache: shares a remote object's blocks with other processes.
    FileNotFoundError; another OSError (a `StorageError` has been retried already); UserError for an
    unknown protocol.
    """
    url = os.fspath(url)
    if is_remote(url):
        from clip_train.storage.reader import RangedFile

        config = config or StorageConfig()
        remote = cast("RemoteStorage", open_storage(url, client=config.client))
        return io.BufferedReader(RangedFile(remote, config, checksums, cache))
    return local_path(url).open("rb")


def expand_glob(url: str | os.PathLike[str]) -> list[str]:
    """Return the files that a pattern (`*`, `**`, `?`, `[...]`) matches, sorted.

    Without a pattern, `url` itself. In `http(s)://` a `?` is a query, not a pattern.
    UserError when a pattern matches nothing; OSError if a folder cannot be listed.
    """
    url = os.fspath(url)
    magic = "*[" if url.lower().startswith(("http://", "https://")) else "*?["
    path = re.sub("(?i)^https?://[^/]*", "", url)  # an IPv6 host has brackets
    plain = url.removesuffix(path) + re.split(f"[{re.escape(magic)}]", path)[0]
    if plain == url:
        return [url]
    if is_remote(url):
        folder = plain.rpartition("/")[0]
        files = cast("RemoteStorage", open_storage(f"{folder}/")).glob(url[len(folder) + 1 :])
    else:
        pattern = local_path(url)
        files = [url]  # a file whose name has a bracket
        if not pattern.exists():
            files = sorted(local_glob.glob(str(pattern), recursive=True))
        files = [path for path in files if not os.path.isdir(path)]
    if not files:
        raise UserError(f"no file matches {url}: check the path, and that it can be read from here")
    return files
