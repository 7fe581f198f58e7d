"""Object stores through obstore: S3 (s3://), Google Cloud (gs://) and Azure (az://).

obstore uploads large files in parts and repeats each part by itself. For S3, botocore finds what
obstore cannot: profiles, SSO, refreshed credentials and a bucket's region.
"""

import asyncio
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Literal, cast

import obstore
from botocore import UNSIGNED
from botocore.config import Config
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.exceptions import ClientError, NoCredentialsError
from botocore.session import Session
from obstore.store import S3Store

from clip_train.errors import UserError
from clip_train.storage.base import Entry
from clip_train.storage.errors import ChangedError, Meaning, TransferError, meaning
from clip_train.storage.remote import Connection, Pace, RemoteStorage, whole

PARALLEL = 5  # parts of a file at a time: as many are in memory
_MAX_PARTS = 9000  # S3 allows 10,000: larger files get larger parts
_LONGEST_REQUEST_SECONDS = 900.0
_FIRST_BACKOFF_SECONDS = 0.1  # obstore's
_CHUNK_BYTES = 1 << 18


class Bucket(Connection):
    """A bucket, with the credentials that obstore finds by itself."""

    def __init__(self, url: str) -> None:
        """url: `scheme://bucket`."""
        self.url, self.name = url, url.partition("://")[2]
        self._store: Any = None
        self._opening = threading.Lock()

    def open(self, client: dict[str, Any], retries: dict[str, Any]) -> Any:
        """Return an obstore client with these options. Blocks."""
        return obstore.store.from_url(
            self.url, client_options=cast(Any, client), retry_config=cast(Any, retries)
        )

    def store(self, seconds: float | None = None, retries: int = 0) -> Any:
        """Return the client that all requests share: each is limited where it is made.

        seconds: a client of its own instead, which gives its requests up by itself.
        """
        client: dict[str, Any] = {"allow_http": True, "connect_timeout": timedelta(seconds=10)}
        if seconds is not None:
            longest = timedelta(seconds=1.5 * seconds)  # a silent request is repeated once
            client["timeout"] = timedelta(seconds=seconds)
            return self.open(client, {"max_retries": retries, "retry_timeout": longest})
        with self._opening:
            if self._store is None:
                client["timeout"] = timedelta(days=1)
                self._store = self.open(client, {"max_retries": 0})
            return self._store

    def renew(self, kind: Meaning, again: bool) -> bool:
        """Fetch credentials (or the region) anew. Return whether another attempt may then succeed.

        kind: what the error meant. again: it has been done for this operation already.
        """
        self._store = None
        return kind != "elsewhere" and not again


class S3Bucket(Bucket):
    """A bucket of S3, opened anew if its credentials are refused or it is in another region."""

    _region: str | None = None  # if it is not the configured one

    def open(self, client: dict[str, Any], retries: dict[str, Any]) -> S3Store:
        """ValueError, or an error of botocore, if the settings make no sense."""
        session = Session()  # with files and environment as they are now
        scoped = session.get_scoped_config()
        region = self._region or session.get_config_variable("region") or "us-east-1"
        endpoint = ConfiguredEndpointProvider(session.full_config, scoped, "s3").provide()
        if endpoint is None and region.startswith("cn-"):  # obstore does not know these
            endpoint = f"https://s3.{region}.amazonaws.com.cn"
        virtual = (scoped.get("s3") or {}).get("addressing_style") == "virtual"
        options: dict[str, Any] = {"virtual_hosted_style_request": virtual}
        if endpoint is not None:
            scheme, _, host = endpoint.partition("://")
            if not host or scheme not in ("http", "https"):
                raise ValueError(
                    f"AWS_ENDPOINT_URL or endpoint_url is {endpoint!r}: write https://host, "
                    "or http://host"
                )
            options["endpoint"] = f"{scheme}://{self.name}.{host}" if virtual else endpoint
        if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):  # a public bucket
            options["skip_signature"] = True
        else:
            options["credential_provider"] = _credentials(session)
        bundle = session.get_config_variable("ca_bundle")  # AWS_CA_BUNDLE
        if bundle:
            client = {**client, "root_certificate": Path(bundle).read_bytes()}
        return S3Store(
            self.name,
            region=region,
            disable_bulk_delete=True,  # which other servers may not know
            checksum_algorithm="sha256",
            client_options=client,  # type: ignore[arg-type]
            retry_config=retries,  # type: ignore[arg-type]
            **options,
        )

    def renew(self, kind: Meaning, again: bool) -> bool:
        if kind == "elsewhere":
            if again or self._region is not None:
                return False
            self._region = self._find_region()
        elif again and not (self.worked and (kind == "expired" or self._store is None)):
            return False
        # whoever renews credentials may be late, or just writing the file
        self._store = None
        return True

    def _find_region(self) -> str | None:
        """Ask S3, without a signature: its refusals name the region as well."""
        limits = {"connect_timeout": 10, "read_timeout": 10, "retries": {"total_max_attempts": 1}}
        client = Session().create_client("s3", config=Config(signature_version=UNSIGNED, **limits))
        try:
            answer = client.head_bucket(Bucket=self.name)
        except ClientError as e:
            answer = e.response
        return answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")


def _credentials(session: Session) -> Callable[[], dict[str, Any]]:
    """A provider of the default chain's credentials, which botocore refreshes."""
    held = session.get_credentials()
    if held is None:
        raise NoCredentialsError

    def provide() -> dict[str, Any]:
        found = held.get_frozen_credentials()
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(timezone.utc),  # so botocore is asked again
        }

    return provide


@functools.lru_cache
def connect(kind: type[Bucket], url: str) -> Bucket:
    """Return the one connection of this process to a bucket."""
    return kind(url)


class ObjectStorage(RemoteStorage):
    """`Storage` over `scheme://bucket/prefix`. Credentials come from the environment."""

    bucket_type: type[Bucket] = Bucket

    def __init__(self, url: str, **limits: Any) -> None:
        scheme, _, path = url.partition("://")
        bucket, _, root = path.partition("/")
        if not bucket or "@" in bucket or set(bucket) & set("*?["):
            shown = f"{scheme}://...{bucket[bucket.rfind('@') :]}" if "@" in bucket else url
            raise UserError(
                f"{shown}: write {scheme}://bucket/prefix, and name the bucket without a pattern; "
                "credentials come from the environment or a profile"
            )
        kind: Any = self.bucket_type
        self.bucket = connect(kind, f"{scheme}://{bucket}")
        super().__init__(url, root, connection=self.bucket, **limits)

    async def head(self, key: str, pace: Pace) -> Entry:
        store = await asyncio.to_thread(self.bucket.store)
        try:
            found = await pace.hold(obstore.head_async(store, key), pace.seconds)
        except TransferError:
            raise
        except Exception:  # the answer to a HEAD has no body with the reason
            await pace.hold(obstore.get_range_async(store, key, start=0, length=1), pace.seconds)
            raise
        return Entry(key, found["size"], tag=found["e_tag"])

    async def get(
        self, key: str, begin: int, end: int | None, tag: str | None, pace: Pace
    ) -> bytes:
        """An idle timeout would not notice a drip, so the average rate is watched."""
        store = await asyncio.to_thread(self.bucket.store)
        options: Any = {} if end is None else {"range": (begin, end)}
        answer = await pace.hold(obstore.get_async(store, key, options=options), pace.seconds)
        found = answer.meta["e_tag"]
        if tag not in (None, found):
            raise ChangedError(f"its ETag was {tag} when it was opened and is {found}")
        chunks, data, start = aiter(answer.stream(_CHUNK_BYTES)), bytearray(), time.monotonic()
        while True:
            now = time.monotonic()
            limit = pace.limit(len(data))
            left = pace.seconds if limit is None else start + limit - now
            try:
                data += await pace.hold(anext(chunks), left, f"only {len(data)} bytes")
            except StopAsyncIteration:
                return whole(bytes(data), (answer.meta["size"] if end is None else end) - begin)

    async def listing(self, folder: str, found: list[Entry], pace: Pace) -> None:
        store = await asyncio.to_thread(self.bucket.store)
        last = found[-1].name if found else None
        pages = aiter(obstore.list(store, folder or None, offset=last, chunk_size=1000))
        while True:
            page = await pace.hold(anext(pages, None), pace.seconds)
            if not page:
                return
            for each in page:
                found.append(Entry(each["path"], each["size"], each["last_modified"].timestamp()))

    async def put(self, key: str, data: bytes, if_absent: bool, pace: Pace) -> object:
        store = await asyncio.to_thread(self.bucket.store)
        mode: Literal["create", "overwrite"] = "create" if if_absent else "overwrite"
        request = obstore.put_async(store, key, data, mode=mode, use_multipart=False)
        return await pace.hold(request, pace.limit(len(data)))

    async def upload(self, key: str, file: Path, pace: Pace) -> object:
        part_bytes = max(self.part_bytes, math.ceil(file.stat().st_size / _MAX_PARTS))
        limit = pace.limit(part_bytes * PARALLEL) or _LONGEST_REQUEST_SECONDS
        seconds = min(limit, _LONGEST_REQUEST_SECONDS)
        retries = int(math.log2(1 + self.patience / _FIRST_BACKOFF_SECONDS))  # waits double
        store = await asyncio.to_thread(self.bucket.store, seconds, retries)
        return await obstore.put_async(
            store, key, file, chunk_size=part_bytes, max_concurrency=PARALLEL
        )

    async def remove(self, keys: Sequence[str], pace: Pace) -> object:
        store = await asyncio.to_thread(self.bucket.store)
        seconds = pace.seconds * (1 + len(keys) / 10)  # obstore deletes ten at a time
        try:
            return await pace.hold(obstore.delete_async(store, list(keys)), seconds)
        except FileNotFoundError as e:
            if meaning(e) != "missing":
                raise
            return None


class S3Storage(ObjectStorage):
    """`Storage` over `s3://bucket/prefix`."""

    bucket_type = S3Bucket
