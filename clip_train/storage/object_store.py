"""Object stores through obstore: S3 (s3://), Google Cloud (gs://) and Azure (az://).

obstore uploads large files in parts and repeats each part by itself. For S3, botocore adds what
obstore lacks: profiles, SSO and refreshed credentials.
"""

import asyncio
import contextlib
import math
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Literal

import obstore
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.exceptions import NoCredentialsError
from botocore.session import Session
from obstore.store import S3Store

from clip_train.errors import UserError
from clip_train.storage.base import Entry
from clip_train.storage.errors import (
    ChangedError,
    Meaning,
    SettingsError,
    TransferError,
    meaning,
)
from clip_train.storage.remote import PATIENCE_SECONDS, Pace, RemoteStorage, collected, reached

PARALLEL = 5  # parts of a file at a time: as many are in memory
MAX_PARTS = 9000  # S3 allows 10,000: larger files get larger parts
_LONGEST_REQUEST_SECONDS = 900.0
_FIRST_BACKOFF_SECONDS = 0.1  # obstore's
MOST_CHUNK_BYTES = 1 << 20  # of an answer, passed on at a time
_CLIENT = {"allow_http": True, "connect_timeout": timedelta(seconds=10)}

clients: dict[str, Any] = {}  # by bucket: all storages of this process share them
servers: dict[str, str] = {}  # by bucket: where its client sends requests, if that is known
_opening = threading.Lock()
_inherited: list[dict[str, Any]] = []  # clients of the process that this one was forked from


def _leave_clients() -> None:
    """In a forked process: open clients anew, since the old ones need threads of the parent. They
    are kept, or their finalizers would wait for such a thread."""
    global _opening  # noqa: PLW0603
    _opening = threading.Lock()  # another thread may have held it
    _inherited.append(dict(clients))
    clients.clear()


os.register_at_fork(after_in_child=_leave_clients)


class ObjectStorage(RemoteStorage):
    """`Storage` over `scheme://bucket/prefix`; obstore finds the credentials by itself."""

    most_listed = 1_000_000  # objects: an endless listing must not fill the memory
    listing_seconds = PATIENCE_SECONDS  # a listing may take as long, or as the storage's patience
    listed_per_second = 2_000  # objects: the least average rate of a longer listing

    def __init__(self, url: str, **limits: Any) -> None:
        scheme, _, path = url.partition("://")
        bucket, _, root = path.partition("/")
        if not bucket or set(bucket) & set("@*?["):
            shown = f"{scheme}://...{bucket[bucket.rfind('@') :]}" if "@" in bucket else url
            raise UserError(
                f"{shown}: write {scheme}://bucket/prefix, and name the bucket without a pattern; "
                "credentials come from the environment or a profile"
            )
        if "//" in path.rstrip("/"):  # obstore would write to another key than it lists
            parts = "/".join(part for part in path.split("/") if part)
            raise UserError(
                f"{url} has an empty part (//), which no client of object stores keeps: write "
                f"{scheme}://{parts}, and rename objects whose keys have one"
            )
        super().__init__(url, root, **limits)
        self.bucket = f"{scheme}://{bucket}"
        self._client: Any = None

    def open(self, **options: Any) -> Any:
        """Return an obstore client with these options of obstore. Blocks."""
        return obstore.store.from_url(self.bucket, **options)

    async def connect(self) -> None:
        self._client = await asyncio.to_thread(self._shared_client)

    def _shared_client(self) -> Any:
        """The client of all requests to this bucket. Each request has its own time limit, so the
        client has none."""
        with _opening:
            if self.bucket not in clients:
                options = {**_CLIENT, "timeout": timedelta(days=1)}
                clients[self.bucket] = self.open(
                    client_options=options, retry_config={"max_retries": 0}
                )
            return clients[self.bucket]

    @property
    def server(self) -> str:
        return servers.get(self.bucket, super().server)

    def renew(self, kind: Meaning, again: bool) -> bool:
        # another program may renew the credentials too late, or be writing their file now
        may_come = self.host in reached and (kind == "expired" or self.bucket not in clients)
        clients.pop(self.bucket, None)
        return may_come or not again

    async def head(self, key: str, pace: Pace) -> Entry:
        try:
            meta = await pace.hold(obstore.head_async(self._client, key))
        except TransferError:
            raise
        except Exception:  # the answer to a HEAD has no body with the reason
            request = obstore.get_range_async(self._client, key, start=0, length=1)
            await pace.hold(request)
            raise
        return Entry(key, meta["size"], tag=meta["e_tag"])

    async def get(
        self, key: str, begin: int, end: int | None, tag: str | None, pace: Pace
    ) -> bytes:
        options: Any = {}
        if end is not None:
            options["range"] = (begin, end)
        elif begin:
            options["range"] = {"offset": begin}
        request = obstore.get_async(self._client, key, options=options)
        answer = await pace.hold(request)
        e_tag = answer.meta["e_tag"]
        if tag not in (None, e_tag):
            raise ChangedError(f"its ETag was {tag} when it was opened and is {e_tag}")
        num_bytes = (answer.meta["size"] if end is None else end) - begin
        # large chunks cost less; but at the least rate two come before the time is over
        chunk_bytes = min(max(1, int(pace.rate * pace.seconds / 2)), MOST_CHUNK_BYTES)
        return await collected(aiter(answer.stream(chunk_bytes)), num_bytes, pace)

    async def listing(self, folder: str, pace: Pace) -> list[Entry]:
        """A server may send names forever, so after a minute the average rate is checked."""
        entries: list[Entry] = []
        start = time.monotonic()
        pages = aiter(self.pages(folder))
        while True:
            elapsed = time.monotonic() - start
            due = max(self.listing_seconds, self.patience) + len(entries) / self.listed_per_second
            if elapsed > due:
                raise TransferError(f"only {len(entries):,} objects were listed in {elapsed:.3g} s")
            page = await pace.hold(anext(pages, None))
            if page is None:
                return entries
            entries += page
            if len(entries) > self.most_listed:
                raise ChangedError(
                    f"more than {self.most_listed:,} objects are listed there: name a folder with "
                    "fewer, or check the server, whose listing may have no end"
                )

    async def pages(self, folder: str) -> AsyncIterator[list[Entry]]:
        """All objects whose keys begin with `folder`, by request."""
        async for page in obstore.list(self._client, folder or None, chunk_size=1000):
            yield [
                Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for meta in page
            ]

    async def put(self, key: str, source: bytes | Path, if_absent: bool, pace: Pace) -> object:
        if isinstance(source, bytes):
            mode: Literal["create", "overwrite"] = "create" if if_absent else "overwrite"
            request = obstore.put_async(self._client, key, source, mode=mode, use_multipart=False)
            return await pace.hold(request, len(source))
        # a separate client, which repeats each part by itself
        part_bytes = max(self.part_bytes, math.ceil(source.stat().st_size / MAX_PARTS))
        limit = _LONGEST_REQUEST_SECONDS
        if pace.rate:
            limit = min(limit, pace.seconds + part_bytes * PARALLEL / pace.rate)
        patience = min(self.patience, PATIENCE_SECONDS)  # then the outer retry logs the error
        retries = {
            "max_retries": int(math.log2(1 + patience / _FIRST_BACKOFF_SECONDS)),
            "retry_timeout": timedelta(seconds=1.5 * limit),  # a silent request is repeated once
        }
        client = await asyncio.to_thread(
            self.open,
            client_options={**_CLIENT, "timeout": timedelta(seconds=limit)},
            retry_config=retries,
        )
        return await obstore.put_async(
            client, key, source, chunk_size=part_bytes, max_concurrency=PARALLEL
        )

    async def remove(self, keys: Sequence[str], pace: Pace) -> object:
        # obstore deletes ten at a time
        longer = replace(pace, seconds=pace.seconds * (1 + len(keys) / 10))
        try:
            return await longer.hold(obstore.delete_async(self._client, list(keys)))
        except FileNotFoundError as e:
            if meaning(e) != "missing":
                raise
        if len(keys) > 1:  # Azure and Google refuse a missing one, and obstore stops there
            for key in keys:
                await self.remove([key], pace)
        return None


class AzureStorage(ObjectStorage):
    """`Storage` over `az://container/prefix`. obstore reads `AZURE_*`."""

    def open(self, **options: Any) -> Any:
        """SettingsError."""
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
        endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT")
        servers[self.bucket] = endpoint or f"{account}.blob.core.windows.net"
        with _refused_settings():
            return super().open(**options)


class GoogleStorage(ObjectStorage):
    """`Storage` over `gs://bucket/prefix`. obstore reads `GOOGLE_*`."""

    def open(self, **options: Any) -> Any:
        """SettingsError."""
        servers[self.bucket] = os.environ.get("GOOGLE_BASE_URL") or "storage.googleapis.com"
        with _refused_settings():
            return super().open(**options)


@contextlib.contextmanager
def _refused_settings() -> Iterator[None]:
    """Turn an error of obstore about its settings into a SettingsError."""
    try:
        yield
    except obstore.exceptions.BaseError as e:
        reason = str(e).partition("\n\nDebug source:")[0].strip()
        raise SettingsError(re.sub(r"^Generic \w+ error: ", "", reason)) from e


class S3Storage(ObjectStorage):
    """`Storage` over `s3://bucket/prefix`, opened anew if its credentials are refused."""

    def open(self, **options: Any) -> S3Store:
        """ValueError, or an error of botocore, for invalid settings."""
        session = Session()  # with files and environment as they are now
        scoped = session.get_scoped_config()
        region = session.get_config_variable("region") or "us-east-1"
        endpoint = ConfiguredEndpointProvider(session.full_config, scoped, "s3").provide()
        if endpoint is None and region.startswith("cn-"):  # obstore does not support these
            endpoint = f"https://s3.{region}.amazonaws.com.cn"
        servers[self.bucket] = endpoint or f"s3.{region}.amazonaws.com"
        virtual = (scoped.get("s3") or {}).get("addressing_style") == "virtual"
        options["virtual_hosted_style_request"] = virtual
        if endpoint is not None:
            scheme, _, host = endpoint.partition("://")
            if not host or scheme not in ("http", "https"):
                raise refused_endpoint(endpoint)
            options["endpoint"] = f"{scheme}://{self.host}.{host}" if virtual else endpoint
        if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):  # a public bucket
            options["skip_signature"] = True
        else:
            options["credential_provider"] = _credentials(session)
        bundle = session.get_config_variable("ca_bundle")  # AWS_CA_BUNDLE
        if bundle:
            options["client_options"]["root_certificate"] = Path(bundle).read_bytes()
        return S3Store(
            self.host,
            region=region,
            disable_bulk_delete=True,  # which other servers may not support
            checksum_algorithm="sha256",
            **options,
        )


def refused_endpoint(endpoint: str) -> ValueError:
    return ValueError(
        f"AWS_ENDPOINT_URL or endpoint_url is {endpoint!r}: write https://host, or http://host"
    )


def _credentials(session: Session) -> Callable[[], dict[str, Any]]:
    """A provider of the default chain's credentials, which botocore refreshes."""
    credentials = session.get_credentials()
    if credentials is None:
        raise NoCredentialsError

    def provide() -> dict[str, Any]:
        current = credentials.get_frozen_credentials()
        return {
            "access_key_id": current.access_key,
            "secret_access_key": current.secret_key,
            "token": current.token,
            "expires_at": datetime.now(timezone.utc),  # so that obstore calls this again
        }

    return provide
