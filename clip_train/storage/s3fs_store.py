"""S3 through s3fs: `fsspec+s3://`, and `s3://` with `storage.client: fsspec`.

s3fs finds the settings, signs and sends; botocore behind it knows profiles, SSO, assumed roles and
requester pays. Retries, time limits and the parts of an upload are ours, as with obstore.
"""

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from aiohttp import ClientError
from botocore.exceptions import BotoCoreError

from clip_train.errors import UserError
from clip_train.storage.base import Entry
from clip_train.storage.errors import ChangedError, StorageError, TransferError
from clip_train.storage.object_store import (
    MAX_PARTS,
    PARALLEL,
    ObjectStorage,
    refused_endpoint,
    servers,
)
from clip_train.storage.remote import PATIENCE_SECONDS, Pace, collected

_CHUNK_BYTES = 1 << 18
_NO_LIMIT = 24 * 3600  # seconds: each request has a time limit of its own
_CONNECT_SECONDS = 10
_CONNECTIONS = 64  # of one client: botocore's ten would make ranges that are read ahead wait


class S3fsStorage(ObjectStorage):
    """`Storage` over `s3://bucket/prefix` by s3fs, opened anew if its credentials are refused."""

    def __init__(self, url: str, **limits: Any) -> None:
        super().__init__(url, **limits)
        self.bucket = f"fsspec+s3://{self.host}"  # its clients are not those of obstore

    def open(self, **_: Any) -> Any:
        """An s3fs file system with its client. UserError if s3fs is not installed; ValueError, or an
        error of botocore, for invalid settings."""
        options = s3fs_options()
        try:
            system = fsspec.filesystem("s3", skip_instance_cache=True, **options)
        except ImportError as e:
            raise UserError(f"{self.url}: {e}; pip install s3fs, or storage.client=obstore") from e
        system.retries = 1  # ours: see `RemoteStorage`
        try:
            system.connect()
        except ValueError as e:
            found, endpoint = str(e).partition("Invalid endpoint: ")[1:]
            raise refused_endpoint(endpoint) if found else e from None
        servers[self.bucket] = system.s3.meta.endpoint_url
        return system

    async def _ask(self, pace: Pace, operation: str, **arguments: Any) -> Any:
        """The answer to one request. arguments: botocore's."""
        body = arguments.get("Body", b"")
        with _explained():
            request = self._client._call_s3(operation, Bucket=self.host, **arguments)
            return await pace.hold(request, len(body))

    async def head(self, key: str, pace: Pace) -> Entry:
        try:
            meta = await self._ask(pace, "head_object", Key=key)
        except TransferError:
            raise
        except Exception:  # the answer to a HEAD has no body with the reason
            await self._ask(pace, "get_object", Key=key, Range="bytes=0-0")
            raise
        return Entry(key, meta["ContentLength"], tag=meta.get("ETag"))

    async def get(
        self, key: str, begin: int, end: int | None, tag: str | None, pace: Pace
    ) -> bytes:
        options: dict[str, str] = {}
        if end is not None or begin:
            options["Range"] = f"bytes={begin}-{'' if end is None else end - 1}"
        answer = await self._ask(pace, "get_object", Key=key, **options)
        body = answer["Body"]
        try:
            e_tag = answer.get("ETag")
            if tag not in (None, e_tag):
                raise ChangedError(f"its ETag was {tag} when it was opened and is {e_tag}")
            num_bytes = answer["ContentLength"] if end is None else end - begin
            return await collected(_chunks(body, num_bytes), num_bytes, pace)
        finally:
            body.close()

    async def pages(self, folder: str) -> AsyncIterator[list[Entry]]:
        """All objects whose keys begin with `folder`. Consoles make objects for folders, whose keys
        end in "/": they are no files."""
        options: dict[str, str] = {"Prefix": folder}
        while True:
            with _explained():
                page = await self._client._call_s3("list_objects_v2", Bucket=self.host, **options)
            yield [
                Entry(meta["Key"], meta["Size"], meta["LastModified"].timestamp())
                for meta in page.get("Contents", [])
                if not meta["Key"].endswith("/")
            ]
            if not page.get("IsTruncated"):
                return
            options["ContinuationToken"] = page["NextContinuationToken"]

    async def put(self, key: str, source: bytes | Path, if_absent: bool, pace: Pace) -> object:
        if isinstance(source, bytes):
            condition = {"IfNoneMatch": "*"} if if_absent else {}
            return await self._ask(pace, "put_object", Key=key, Body=source, **condition)
        size = source.stat().st_size
        part_bytes = max(self.part_bytes, math.ceil(size / MAX_PARTS))
        if size <= part_bytes:
            data = await asyncio.to_thread(source.read_bytes)
            return await self._ask(pace, "put_object", Key=key, Body=data)
        upload = await self._ask(pace, "create_multipart_upload", Key=key)
        target = {"Key": key, "UploadId": upload["UploadId"]}
        try:
            parts = await self._put_parts(source, size, part_bytes, target, pace)
            return await self._ask(
                pace, "complete_multipart_upload", MultipartUpload={"Parts": parts}, **target
            )
        except BaseException:
            with contextlib.suppress(Exception):
                await self._ask(pace, "abort_multipart_upload", **target)
            raise

    async def _put_parts(
        self, source: Path, size: int, part_bytes: int, target: dict[str, str], pace: Pace
    ) -> list[dict[str, Any]]:
        """Upload the parts of a file, `PARALLEL` at a time; each is repeated by itself. Their
        numbers and ETags."""
        # all parts share the link; after a minute, the outer retry logs the error
        rate = pace.rate / PARALLEL
        patience = min(self.patience, PATIENCE_SECONDS)
        part_pace = replace(pace, rate=rate, total_seconds=patience)
        turns = asyncio.Semaphore(PARALLEL)

        async def put_part(number: int) -> dict[str, Any]:
            async with turns:
                data = await asyncio.to_thread(_read_part, source, number, part_bytes)
                request = partial(_put_part, self, number, data, target)
                try:
                    answer = await self._repeat(f"part {number}", request, part_pace)
                except StorageError as e:
                    # the outer retry describes the error itself, with its own cause
                    raise e.__cause__ or e  # noqa: B904
            return {"PartNumber": number, "ETag": answer["ETag"]}

        tasks = [
            asyncio.create_task(put_part(number))
            for number in range(1, math.ceil(size / part_bytes) + 1)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def remove(self, keys: Sequence[str], pace: Pace) -> object:
        turns = asyncio.Semaphore(10)

        async def remove_one(key: str) -> None:
            async with turns:
                await self._ask(pace, "delete_object", Key=key)

        return await asyncio.gather(*(remove_one(key) for key in keys))


async def _chunks(body: Any, num_bytes: int) -> AsyncIterator[bytes]:
    """The body of an answer in pieces. TransferError; ChangedError if it is longer."""
    received = 0
    while True:
        try:
            chunk = await body.read(_CHUNK_BYTES)
        except (ClientError, BotoCoreError, ConnectionError) as e:
            cause = e.__cause__ or e
            reason = getattr(cause, "message", None) or cause
            # without the cause: it has a `code` that no server has sent
            raise TransferError(f"response body error: {reason}") from None
        if not chunk:
            return
        received += len(chunk)
        if received > num_bytes:
            raise ChangedError(
                f"the server sends more than the {num_bytes} bytes asked for: it ignores ranges"
            )
        yield chunk


def s3fs_options() -> dict[str, Any]:
    """Options of `s3fs.S3FileSystem`, besides those that fsspec finds in `FSSPEC_S3_*` or its own
    files. They make it obey the same environment as obstore."""
    given = fsspec.config.conf.get("s3", {})
    options: dict[str, Any] = {"use_listings_cache": False}
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):  # a public bucket
        options["anon"] = True
    config = dict(given.get("config_kwargs") or {})
    config.setdefault("max_pool_connections", _CONNECTIONS)
    config.setdefault("connect_timeout", _CONNECT_SECONDS)
    config["read_timeout"] = _NO_LIMIT
    config["retries"] = {"max_attempts": 0}
    return {**options, "config_kwargs": config}


def _read_part(source: Path, number: int, part_bytes: int) -> bytes:
    with source.open("rb") as file:
        file.seek((number - 1) * part_bytes)
        return file.read(part_bytes)


async def _put_part(
    store: S3fsStorage, number: int, data: bytes, target: dict[str, str], pace: Pace
) -> Any:
    return await store._ask(pace, "upload_part", PartNumber=number, Body=data, **target)


@contextlib.contextmanager
def _explained() -> Any:
    """An error of botocore without an answer names its cause: a refused connection, for example."""
    try:
        yield
    except BotoCoreError as e:
        cause = e.kwargs.get("error")
        if e.__cause__ is None and isinstance(cause, BaseException):
            raise e from cause
        raise
