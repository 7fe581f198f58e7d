"""An S3 bucket as a `Storage`: bounded memory, whole files or none, conditional writes, listings as of now.

obstore makes the requests and sends large files in parts, each verified by the server; what it lets through is tried
again here.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import errno
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import obstore

from clip_train.storage.base import Entry, Storage, checked
from clip_train.storage.bucket import Bucket, Stores, longer
from clip_train.storage.errors import ChangedError, TakenError, TransferError, is_timeout, meaning
from clip_train.storage.retry import Retry, run, within

T = TypeVar("T")

PART_BYTES = 8 << 20  # of an upload
PARALLEL = 5  # parts of a file at a time: so many are in memory
MIN_RATE = 256 << 10  # bytes per second, of all parts together
REQUEST_SECONDS = 20.0
PATIENCE_SECONDS = 60.0
_MAX_PARTS = 9000  # S3 allows 10,000: a file of more gets larger ones
_MIN_ATTEMPTS = 3  # even where each took long, unless no answer came
MOST_LISTED = 1_000_000  # objects: a listing that has no end must not fill the memory


class ObjectStorage(Storage):
    """`Storage` over `s3://bucket/prefix`. Safe to use from several threads.

    url: names no secret; credentials come from the default chain (environment, profile, role) and are asked for again
    when they are refused. min_rate: bytes per second that a request gets through at least. request_seconds: what it may
    take besides. patience_seconds: of one operation, with all its retries (default: `CLIP_TRAIN_S3_PATIENCE_SECONDS`,
    or a minute).
    """

    def __init__(
        self,
        url: str,
        *,
        part_bytes: int = PART_BYTES,
        min_rate: int = MIN_RATE,
        request_seconds: float = REQUEST_SECONDS,
        patience_seconds: float | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        bucket, _, self._root = self.url.split("://", 1)[1].partition("/")
        self._part_bytes, self._min_rate = part_bytes, min_rate
        default = os.environ.get("CLIP_TRAIN_S3_PATIENCE_SECONDS", PATIENCE_SECONDS)
        patience = float(default if patience_seconds is None else patience_seconds)
        self._patience_seconds = patience
        self._request_seconds = min(request_seconds, max(1.0, patience / _MIN_ATTEMPTS))
        upload_seconds = self._seconds(part_bytes * PARALLEL)
        self._bucket = Bucket(bucket, upload_seconds=upload_seconds, patience_seconds=patience)
        self._retry = Retry(self.url, _MIN_ATTEMPTS, patience)

    def _seconds(self, num_bytes: int) -> float:
        """What a request may take that moves so much."""
        return self._request_seconds + num_bytes / self._min_rate

    def _ask(self, what: str, call: Callable[[Stores], Awaitable[T]], seconds: float | None) -> T:
        end = time.monotonic() + self._patience_seconds

        async def ask() -> T:
            nonlocal seconds
            try:
                return await within(seconds, call(await self._bucket.stores()))
            except TransferError:  # the link may be slow, as far as the patience goes
                left = end - time.monotonic()
                seconds = None if seconds is None else max(seconds, min(longer(seconds), left))
                raise

        return run(self._retry(what, ask, self._bucket))

    def _ask_botocore(self, what: str, call: Callable[[Any], T]) -> T:
        async def ask() -> T:
            return await asyncio.to_thread(lambda: call(self._bucket.client()))

        return run(self._retry(what, ask, self._bucket))

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self._root, checked(name)) if part)

    def _folder(self, prefix: str) -> tuple[str, int]:
        """How the keys in it begin, and how much of a key is not part of a name."""
        folder = self._key(prefix)
        return folder.rstrip("/") + "/" if folder else "", len(self._root) + 1 if self._root else 0

    # -- reading

    def read_bytes(self, name: str) -> bytes:
        key = self._key(name)

        async def read(stores: Stores) -> bytes:
            asked = obstore.get_async(stores.single, key)
            answer = await within(self._request_seconds, asked)
            return whole(bytes(await answer.bytes_async()), answer.meta["size"])

        return self._ask(f"reading {name}", read, self._seconds(self._part_bytes))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        key = self._key(name)

        async def read(stores: Stores) -> bytes:
            answer = await obstore.get_range_async(stores.single, key, start=start, end=end)
            return whole(bytes(answer), end - start)

        return (
            self._ask(f"reading {name}", read, self._seconds(end - start)) if start < end else b""
        )

    def list(self, prefix: str = "") -> list[Entry]:
        folder, cut = self._folder(prefix)
        found: list[Entry] = []
        last: str | None = None

        async def listing(stores: Stores) -> None:
            nonlocal last  # a repeated attempt goes on after the pages that have come
            chunks = aiter(
                obstore.list(stores.single, folder or None, offset=last, chunk_size=1000)
            )
            while chunk := await within(self._request_seconds, anext(chunks, None)):
                found.extend(
                    Entry(each["path"][cut:], each["size"], each["last_modified"].timestamp())
                    for each in chunk
                )
                last = chunk[-1]["path"]
                if len(found) > MOST_LISTED:
                    raise ChangedError(
                        f"more than {MOST_LISTED:,} objects are listed there: name a folder with fewer, or check "
                        "the server, whose listing may have no end"
                    )

        self._ask(f"listing {prefix or '/'}", listing, None)
        return sorted(found)

    def size(self, name: str) -> int:
        key = self._key(name)
        head = self._ask(
            f"looking at {name}",
            lambda stores: head_object(stores.single, key),
            self._request_seconds,
        )
        return head["size"]

    def clock(self) -> float:
        """The server's time, in seconds since the epoch. OSError."""

        def ask(client: Any) -> float:
            answer = client.list_objects_v2(Bucket=self._bucket.name, Prefix=self._root, MaxKeys=1)
            date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
            return email.utils.parsedate_to_datetime(date).timestamp() if date else time.time()

        return self._ask_botocore("asking for the time", ask)

    # -- writing

    def put_bytes(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        key = self._key(name)
        mode: Literal["create", "overwrite"] = "create" if if_absent else "overwrite"

        def put(stores: Stores) -> Awaitable[object]:
            return obstore.put_async(stores.single, key, data, mode=mode, use_multipart=False)

        try:
            self._ask(f"writing {name}", put, self._seconds(len(data)))
        except TakenError:
            return self.read_bytes(name) == data  # by an attempt of ours whose answer was lost
        return True

    def put_file(
        self, local_path: str | os.PathLike[str], name: str, *, move: bool = False
    ) -> None:
        key, size = self._key(name), os.stat(local_path).st_size
        part_bytes = max(self._part_bytes, math.ceil(size / _MAX_PARTS))

        async def put(stores: Stores) -> object:
            uploads, file = stores.uploads, Path(local_path)
            try:
                return await obstore.put_async(
                    uploads, key, file, chunk_size=part_bytes, max_concurrency=PARALLEL
                )
            except Exception as e:
                if is_timeout(e):
                    self._bucket.give_more_time()
                raise

        self._ask(f"writing {name}", put, None)
        if (stored := self.size(name)) != size:
            raise OSError(
                errno.EIO, f"{self.url}/{name}: {stored} bytes are stored instead of {size}"
            )
        if move:
            os.unlink(local_path)

    def delete(self, name: str) -> None:
        self._delete(name, [self._key(name)])

    def delete_tree(self, prefix: str) -> None:
        if not prefix.strip("/"):
            raise ValueError("delete_tree needs a folder below the root")
        self._delete(prefix, [self._key(entry.name) for entry in self.list(prefix)])

    def _delete(self, name: str, keys: Sequence[str]) -> None:
        seconds = self._request_seconds * (1 + len(keys) / 10)  # ten at a time
        self._ask(
            f"deleting {name}", lambda stores: obstore.delete_async(stores.single, keys), seconds
        )

    def sweep(
        self, older_than: float, spare: Callable[[str], bool] = lambda name: False, prefix: str = ""
    ) -> int:
        """Abort multipart uploads that were started before `older_than` (their parts cost, and are not listed)."""
        folder, cut = self._folder(prefix)
        where = {"Bucket": self._bucket.name}

        def sweep(client: Any) -> int:
            pages = client.get_paginator("list_multipart_uploads").paginate(**where, Prefix=folder)
            found = [(each["Key"], each) for page in pages for each in page.get("Uploads", [])]
            old = [
                {"Key": key, "UploadId": each["UploadId"]}
                for key, each in found
                if each["Initiated"].timestamp() < older_than and not spare(key[cut:])
            ]
            for upload in old:
                with contextlib.suppress(client.exceptions.NoSuchUpload):  # it has ended since
                    client.abort_multipart_upload(**where, **upload)
            return len(old)

        return self._ask_botocore("listing unfinished uploads", sweep)


async def head_object(store: Any, key: str) -> Any:
    """obstore's ObjectMeta. What was refused is asked in another way: a HEAD's answer has no body with a reason."""
    try:
        return await obstore.head_async(store, key)
    except Exception as e:
        if meaning(e) in ("missing", "denied", "expired"):
            await obstore.get_range_async(store, key, start=0, length=1)
        raise


def whole(data: bytes, num_bytes: int) -> bytes:
    if len(data) != num_bytes:
        raise TransferError(f"{len(data)} bytes came instead of {num_bytes}")
    return data
