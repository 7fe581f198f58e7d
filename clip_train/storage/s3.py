"""An S3 bucket as a `Storage`: bounded memory, own retries, conditional puts, no cached listings.

s3fs gives the session (the default credential chain, `AWS_ENDPOINT_URL`) and the event loop; the requests are
made on its client directly, because s3fs retries neither a cut range nor an expired token, writes what it
has when an exception leaves a `with` block, and has no put-if-absent.
"""

from __future__ import annotations

import asyncio
import email.utils
import errno
import io
import itertools
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from clip_train.storage.base import Entry

T = TypeVar("T")
Entries = list[Entry]  # `list` is a method below
Parts = list[dict[str, Any]]

PART_BYTES = 8 << 20  # of an upload; a file of more than MAX_PARTS of them gets larger ones
MAX_PARTS = 9000  # S3 allows 10,000
PARALLEL = 5  # requests at a time, of all files together: so PARALLEL parts are in memory
MIN_RATE = 256 << 10  # bytes per second; a slower request is given up and tried again
REQUEST_SECONDS = 20.0  # what a request may take beside moving its bytes
PATIENCE_SECONDS = 60.0  # how long one operation is tried before it fails
MIN_TRIES = 3  # even where each took long

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}
_AGAIN = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError", "OperationAborted", "RequestTimeout",
    "ServiceUnavailable", "SlowDown", "Throttling", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch",
}  # fmt: skip


class S3Error(OSError):
    """The store's refusal, or none of its answers, in words."""


class _TakenError(Exception):
    """412: there is something by that name."""


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
        self._min_rate = min_rate
        self._request_seconds = request_seconds
        told = os.environ.get("CLIP_TRAIN_S3_PATIENCE_SECONDS", PATIENCE_SECONDS)
        self._patience = float(told) if patience_seconds is None else patience_seconds
        self._slots = asyncio.Semaphore(parallel)
        self._parallel = parallel
        self._fs: Any = None

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

        return await self._retried(f"reading {name}", get, num_bytes=span[1] - span[0] if span else self.part_bytes)

    def list(self, prefix: str = "") -> Entries:
        return self._run(self._list(prefix))

    async def _list(self, prefix: str) -> Entries:
        folder = self._key(prefix)
        folder = folder.rstrip("/") + "/" if folder else ""
        cut = len(self._root) + 1 if self._root else 0
        entries: Entries = []
        more: dict[str, Any] = {}
        while True:
            page = dict(more)

            async def ask(client: Any, page: dict[str, Any] = page) -> Any:
                return await client.list_objects_v2(Bucket=self.bucket, Prefix=folder, **page)

            answer = await self._retried(f"listing {prefix or '/'}", ask)
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

        try:
            return await self._retried(f"looking at {name}", head)
        except FileNotFoundError:
            # a HEAD has no body: a bucket that is gone looks like a file that is not there
            await self._retried("looking at the bucket", self._one_listing)
            raise

    async def _one_listing(self, client: Any) -> Any:
        return await client.list_objects_v2(Bucket=self.bucket, Prefix=self._root, MaxKeys=1)

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

        return self._run(self._retried("asking for the time", ask))

    # -- writing

    def put_bytes(self, name: str, data: bytes, *, if_absent: bool = False) -> bool:
        return self._run(self._put(name, data, if_absent))

    async def _put(self, name: str, data: bytes, if_absent: bool) -> bool:
        condition = {"IfNoneMatch": "*"} if if_absent else {}

        async def put(client: Any) -> None:
            await client.put_object(Bucket=self.bucket, Key=self._key(name), Body=data, **condition)

        try:
            await self._retried(f"writing {name}", put, num_bytes=len(data))
        except _TakenError:
            # perhaps by ourselves: an earlier try whose answer was lost, which the HTTP client may repeat unasked
            return await self._get(name, None) == data
        return True

    def put_file(self, local_path: str | os.PathLike[str], name: str, *, move: bool = False) -> None:
        size = os.stat(local_path).st_size
        self._run(self._upload(local_path, name, size))
        if move:
            os.unlink(local_path)

    async def _upload(self, local_path: str | os.PathLike[str], name: str, size: int) -> None:
        if size <= self.part_bytes:
            with open(local_path, "rb") as f:
                await self._put(name, f.read(), False)
        else:
            await self._upload_parts(local_path, name, size)
        if (stored := await self._size(name)) != size:
            raise S3Error(errno.EIO, f"{self.url}/{name}: {stored} bytes are stored instead of {size}")

    async def _upload_parts(self, local_path: str | os.PathLike[str], name: str, size: int) -> None:
        where = {"Bucket": self.bucket, "Key": self._key(name)}
        part_bytes = max(self.part_bytes, math.ceil(size / MAX_PARTS))

        async def create(client: Any) -> str:
            return (await client.create_multipart_upload(**where))["UploadId"]

        upload = {**where, "UploadId": await self._retried(f"beginning to write {name}", create)}
        try:
            fd = os.open(local_path, os.O_RDONLY)
            try:
                parts = await self._put_parts(fd, name, upload, size, part_bytes)
            finally:
                os.close(fd)
            await self._complete(name, upload, parts, size)
        except BaseException:
            await self._abort(upload)
            raise

    async def _put_parts(self, fd: int, name: str, upload: dict[str, Any], size: int, part_bytes: int) -> Parts:
        """A few workers, one part in memory each; the first failure ends them all."""
        count = math.ceil(size / part_bytes)
        done: Parts = [{}] * count
        numbers = iter(range(count))

        async def work(numbers: Iterator[int]) -> None:
            for i in numbers:
                async with self._slots:
                    data = os.pread(fd, part_bytes, i * part_bytes)

                    async def put(client: Any, data: bytes = data, number: int = i + 1) -> Any:
                        return await client.upload_part(**upload, PartNumber=number, Body=data)

                    answer = await self._retried(f"writing {name}, part {i + 1}", put, num_bytes=len(data), held=True)
                    done[i] = {"PartNumber": i + 1, "ETag": answer["ETag"]}

        workers = [asyncio.ensure_future(work(numbers)) for _ in range(min(count, self._parallel))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return done

    async def _complete(self, name: str, upload: dict[str, Any], parts: Parts, size: int) -> None:
        async def complete(client: Any) -> None:
            await client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})

        try:
            await self._retried(f"finishing {name}", complete)
        except FileNotFoundError:  # NoSuchUpload: an earlier try went through, and its answer was lost
            if await self._size(name) != size:
                raise

    async def _abort(self, upload: dict[str, Any]) -> None:
        """So that no parts stay behind; what this cannot reach, `sweep` finds later."""
        try:
            client = await self._client()
            await asyncio.wait_for(client.abort_multipart_upload(**upload), 5)
        except Exception:
            return

    def delete(self, name: str) -> None:
        self._run(self._delete(name))

    async def _delete(self, name: str) -> None:
        async def delete(client: Any) -> None:
            await client.delete_object(Bucket=self.bucket, Key=self._key(name))

        await self._retried(f"deleting {name}", delete)

    def delete_tree(self, prefix: str) -> None:
        if not prefix.strip("/"):
            raise ValueError("delete_tree needs a folder below the root")

        async def delete_all() -> None:
            await asyncio.gather(*[self._delete(entry.name) for entry in await self._list(prefix)])

        self._run(delete_all())

    def sweep(self, older_than: float, spare: Callable[[str], bool] = lambda name: False) -> int:
        return self._run(self._sweep(older_than, spare))

    async def _sweep(self, older_than: float, spare: Callable[[str], bool]) -> int:
        """Give up multipart uploads that were begun before `older_than` (their parts cost, and are not listed)."""
        prefix = f"{self._root}/" if self._root else ""

        async def ask(client: Any) -> Any:
            return await client.list_multipart_uploads(Bucket=self.bucket, Prefix=prefix)

        found = (await self._retried("listing unfinished uploads", ask)).get("Uploads", [])
        old = [
            item
            for item in found
            if item["Initiated"].timestamp() < older_than and not spare(item["Key"][len(prefix) :])
        ]
        for item in old:
            await self._abort({"Bucket": self.bucket, "Key": item["Key"], "UploadId": item["UploadId"]})
        return len(old)

    # -- requests

    def _key(self, name: str) -> str:
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"storage name must be relative and without '..': {name!r}")
        return "/".join(part for part in (self._root, name) if part)

    def _run(self, work: Awaitable[T]) -> T:
        from fsspec.asyn import sync

        async def run() -> T:
            return await work

        return sync(self._filesystem().loop, run)

    def _filesystem(self) -> Any:
        if self._fs is None:
            import s3fs

            self._fs = s3fs.S3FileSystem(
                skip_instance_cache=True,
                use_listings_cache=False,
                config_kwargs={
                    "connect_timeout": 10,
                    "read_timeout": 60,
                    "max_pool_connections": self._parallel + 2,
                    "retries": {"total_max_attempts": 1},  # `_retried` does it, and knows when to stop
                },
            )
        return self._fs

    async def _client(self, renew: bool = False) -> Any:
        fs = self._filesystem()
        if renew:
            await fs.set_session(refresh=True)
        await fs.set_session()
        return await fs.get_s3(self.bucket)

    async def _retried(
        self, what: str, call: Callable[[Any], Awaitable[T]], *, num_bytes: int = 0, held: bool = False
    ) -> T:
        """`call(client)` until it succeeds, is refused for good, or patience is over.

        num_bytes: how much it moves, for the watchdog. held: the caller has its slot already.
        FileNotFoundError, PermissionError, S3Error; _TakenError for a failed If-None-Match.
        """
        limit = self._request_seconds + num_bytes / self._min_rate
        give_up = time.monotonic() + self._patience
        delay, renew, renewed = 0.2, False, False
        for tries in itertools.count(1):
            try:
                client = await asyncio.wait_for(self._client(renew), limit)
                renew = False
                if held:
                    return await asyncio.wait_for(call(client), limit)
                async with self._slots:
                    return await asyncio.wait_for(call(client), limit)
            except Exception as e:
                again, error = self._judge(e, what, limit)
                if again == "renew" and not renewed:
                    renew = renewed = True
                elif again != "retry" or (tries >= MIN_TRIES and time.monotonic() + delay > give_up):
                    raise error from e
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, 8.0)
        raise AssertionError("unreachable")

    def _judge(self, e: Exception, what: str, limit: float) -> tuple[str, Exception]:
        """("retry" | "renew" | "final", the error to raise if that is the end)."""
        from botocore.exceptions import ClientError, NoCredentialsError, ParamValidationError

        head = f"{self.url}: {what}:"
        if isinstance(e, ClientError):
            return self._judge_answer(e, head)
        if isinstance(e, NoCredentialsError):
            return "final", PermissionError(
                errno.EACCES, f"{head} no credentials found; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret"
            )
        if isinstance(e, (FileNotFoundError, PermissionError, ParamValidationError, ValueError, TypeError)):
            return "final", e
        if isinstance(e, (asyncio.TimeoutError, TimeoutError)):
            return "retry", S3Error(errno.ETIMEDOUT, f"{head} no answer within {limit:.0f} s")
        return "retry", S3Error(errno.EIO, f"{head} {type(e).__name__}: {e}")

    def _judge_answer(self, e: Any, head: str) -> tuple[str, Exception]:
        code = str(e.response.get("Error", {}).get("Code", ""))
        status = int(e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        told = f"{head} {code} {e.response.get('Error', {}).get('Message', '')}".rstrip()
        if status == 412 or code == "PreconditionFailed":
            return "final", _TakenError(told)
        if code in _EXPIRED:
            return "renew", PermissionError(errno.EACCES, f"{told}; the credentials have expired: renew them")
        if code in _AGAIN or status >= 500 or status in (0, 200, 409, 429):
            return "retry", S3Error(errno.EIO, told)
        return "final", self._refusal(code, status, told)

    def _refusal(self, code: str, status: int, told: str) -> OSError:
        if code == "NoSuchBucket":
            return S3Error(errno.ENXIO, f"{told}; create the bucket {self.bucket}, or correct the URL")
        if code == "RequestTimeTooSkewed":
            return S3Error(errno.EPERM, f"{told}; set this machine's clock (NTP)")
        if status == 404:
            return FileNotFoundError(errno.ENOENT, told)
        if status in (401, 403):
            return PermissionError(errno.EACCES, f"{told} (HTTP {status}); give these credentials the right to do it")
        return S3Error(errno.EIO, f"{told} (HTTP {status})")


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
