"""An S3 bucket as a `Storage`: bounded memory, own retries, conditional puts, no cached listings.

s3fs gives the session (the default credential chain, `AWS_ENDPOINT_URL`) and the event loop; the requests are
made on its client directly, because s3fs retries neither a cut range nor an expired token, writes what it
has when an exception leaves a `with` block, and has no put-if-absent.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import errno
import io
import os
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from clip_train.storage.base import Entry
from clip_train.storage.s3.body import Body, Sums
from clip_train.storage.s3.requests import Limits, Requests, S3Error, TakenError
from clip_train.storage.s3.upload import Upload

Entries = list[Entry]  # `list` is a method below

PART_BYTES = 8 << 20  # of an upload, and of what is read at a time
PARALLEL = 5  # requests at a time, of all files together: so PARALLEL parts are in memory
MIN_RATE = 256 << 10  # bytes per second
REQUEST_SECONDS = 20.0
PATIENCE_SECONDS = 60.0


class S3Storage:
    """`Storage` over `s3://bucket/prefix`. Safe to use from several threads.

    url: names no secret; credentials come from the default chain (environment, profile, role) and are
    asked for again when they have expired. patience_seconds: of one operation, with all its retries (default:
    `CLIP_TRAIN_S3_PATIENCE_SECONDS`, or a minute).
    """

    def __init__(
        self,
        url: str,
        *,
        part_bytes: int = PART_BYTES,
        parallel: int = PARALLEL,
        min_rate: int = MIN_RATE,
        request_seconds: float = REQUEST_SECONDS,
        patience_seconds: float | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        path = self.url.split("://", 1)[1]
        self.bucket, _, self._root = path.partition("/")
        self.part_bytes = part_bytes
        told = os.environ.get("CLIP_TRAIN_S3_PATIENCE_SECONDS", PATIENCE_SECONDS)
        patience = float(told) if patience_seconds is None else patience_seconds
        self._requests = Requests(self.url, Limits(parallel, min_rate, request_seconds, patience))
        self._run = self._requests.run

    def __repr__(self) -> str:
        return f"S3Storage({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return S3Storage, (self.url,)

    # -- reading

    def open_read(self, name: str) -> BinaryIO:
        return io.BufferedReader(_RangedReader(self, name, self.size(name)), buffer_size=self.part_bytes)

    def read_bytes(self, name: str) -> bytes:
        return self._run(self._get(name, None))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        if start >= end:
            return b""
        return self._run(self._get(name, (start, end)))

    async def _get(self, name: str, span: tuple[int, int] | None) -> bytes:
        where: dict[str, Any] = {"Bucket": self.bucket, "Key": self._key(name)}
        if span is not None:
            where["Range"] = f"bytes={span[0]}-{span[1] - 1}"

        async def get(client: Any) -> bytes:
            answer = await client.get_object(**where)
            async with answer["Body"] as body:
                data = await body.read()
            wanted = span[1] - span[0] if span is not None else int(answer["ContentLength"])
            if len(data) != wanted:
                raise S3Error(errno.EIO, f"{len(data)} bytes came instead of {wanted}")
            return data

        return await self._requests.until_done(
            f"reading {name}", get, num_bytes=span[1] - span[0] if span else self.part_bytes
        )

    def list(self, prefix: str = "") -> Entries:
        return self._run(self._list(prefix))

    async def _list(self, prefix: str) -> Entries:
        folder, cut = self._folder(prefix)
        entries: Entries = []
        more: dict[str, Any] = {}
        while True:
            page = dict(more)

            async def ask(client: Any, page: dict[str, Any] = page) -> Any:
                return await client.list_objects_v2(Bucket=self.bucket, Prefix=folder, **page)

            answer = await self._requests.until_done(f"listing {prefix or '/'}", ask)
            entries += [
                Entry(item["Key"][cut:], int(item["Size"]), item["LastModified"].timestamp())
                for item in answer.get("Contents", [])
            ]
            if not answer.get("IsTruncated"):
                return sorted(entries)
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def size(self, name: str) -> int:
        return self._run(self._size(name))

    async def _size(self, name: str) -> int:
        async def head(client: Any) -> int:
            return int((await client.head_object(Bucket=self.bucket, Key=self._key(name)))["ContentLength"])

        async def first_byte(client: Any) -> None:
            await client.get_object(Bucket=self.bucket, Key=self._key(name), Range="bytes=0-0")

        try:
            return await self._requests.until_done(f"looking at {name}", head)
        except (FileNotFoundError, PermissionError):
            # a HEAD has no body to say why: a bucket that is gone, or a token that has expired
            await self._requests.until_done(f"looking at {name}", first_byte)
            raise

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def clock(self) -> float:
        """The server's time, in seconds since the epoch. OSError."""

        async def ask(client: Any) -> float:
            answer = await client.list_objects_v2(Bucket=self.bucket, Prefix=self._root, MaxKeys=1)
            date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
            return email.utils.parsedate_to_datetime(date).timestamp() if date else time.time()

        return self._run(self._requests.until_done("asking for the time", ask))

    # -- writing

    def put_bytes(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        return self._run(self._put(name, data, if_absent))

    async def _put(self, name: str, data: bytes, if_absent: bool) -> bool:
        sums = Sums(data)
        how = {"ChecksumCRC32": sums.crc32, **({"IfNoneMatch": "*"} if if_absent else {})}

        async def put(client: Any) -> None:
            await client.put_object(Bucket=self.bucket, Key=self._key(name), Body=Body(data, sums), **how)

        try:
            await self._requests.until_done(f"writing {name}", put, num_bytes=len(data))
        except TakenError:
            # perhaps by ourselves: an earlier try whose answer was lost, which the HTTP client may repeat unasked
            return await self._get(name, None) == data
        return True

    def put_file(self, local_path: str | os.PathLike[str], name: str, *, move: bool = False) -> None:
        size = os.stat(local_path).st_size
        self._run(self._put_file(local_path, name, size))
        if move:
            os.unlink(local_path)

    async def _put_file(self, local_path: str | os.PathLike[str], name: str, size: int) -> None:
        if size <= self.part_bytes:
            with open(local_path, "rb") as f:
                await self._put(name, f.read(), False)
        else:
            where = {"Bucket": self.bucket, "Key": self._key(name)}
            await Upload(self._requests, name, where, size, self.part_bytes).send(local_path)
        if (stored := await self._size(name)) != size:
            raise S3Error(errno.EIO, f"{self.url}/{name}: {stored} bytes are stored instead of {size}")

    def delete(self, name: str) -> None:
        self._run(self._delete(name))

    async def _delete(self, name: str) -> None:
        async def delete(client: Any) -> None:
            await client.delete_object(Bucket=self.bucket, Key=self._key(name))

        await self._requests.until_done(f"deleting {name}", delete)

    def delete_tree(self, prefix: str) -> None:
        if not prefix.strip("/"):
            raise ValueError("delete_tree needs a folder below the root")

        async def delete_all() -> None:
            await asyncio.gather(*[self._delete(entry.name) for entry in await self._list(prefix)])

        self._run(delete_all())

    def sweep(self, older_than: float, spare: Callable[[str], bool] = lambda name: False, prefix: str = "") -> int:
        return self._run(self._sweep(older_than, spare, prefix))

    async def _sweep(self, older_than: float, spare: Callable[[str], bool], prefix: str) -> int:
        """Give up multipart uploads that were begun before `older_than` (their parts cost, and are not listed)."""
        folder, cut = self._folder(prefix)

        async def ask(client: Any) -> Any:
            return await client.list_multipart_uploads(Bucket=self.bucket, Prefix=folder)

        found = (await self._requests.until_done("listing unfinished uploads", ask)).get("Uploads", [])
        old = [item for item in found if item["Initiated"].timestamp() < older_than and not spare(item["Key"][cut:])]
        with contextlib.suppress(OSError):  # the next one finds what is left
            for item in old:
                await self._give_up({"Bucket": self.bucket, "Key": item["Key"], "UploadId": item["UploadId"]})
        return len(old)

    async def _give_up(self, upload: dict[str, Any]) -> None:
        async def give_up(client: Any) -> None:
            await client.abort_multipart_upload(**upload)

        with contextlib.suppress(FileNotFoundError):  # another one did
            await self._requests.until_done(f"giving up the upload of {upload['Key']}", give_up)

    def _folder(self, prefix: str) -> tuple[str, int]:
        """How the keys in it begin, and how much of a key is not part of a name."""
        folder = self._key(prefix)
        return folder.rstrip("/") + "/" if folder else "", len(self._root) + 1 if self._root else 0

    def _key(self, name: str) -> str:
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"storage name must be relative and without '..': {name!r}")
        return "/".join(part for part in (self._root, name) if part)


class _RangedReader(io.RawIOBase):
    """A seekable stream of ranged reads, each retried on its own."""

    def __init__(self, storage: S3Storage, name: str, size: int) -> None:
        self._storage, self._name, self._size, self._at = storage, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readall(self) -> bytes:
        step = self._storage.part_bytes
        spans = [(at, min(at + step, self._size)) for at in range(self._at, self._size, step)]
        self._at = self._size
        return b"".join(self._storage.read_range(self._name, *span) for span in spans)

    def readinto(self, buffer: Any) -> int:
        end = min(self._size, self._at + len(buffer))
        data = self._storage.read_range(self._name, self._at, end)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
