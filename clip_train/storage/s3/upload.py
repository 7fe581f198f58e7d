"""One large file in parts, several at a time, each verified by the server; whole in the end, or not there at all."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

from clip_train.storage.s3.body import Body, Sums
from clip_train.storage.s3.requests import Requests

MAX_PARTS = 9000  # S3 allows 10,000: a file of more gets larger ones
_SECONDS_PER_PART = 0.1  # that a server may take to put them together


class Upload:
    """Of `size` bytes to `where`, a bucket and a key. name: for messages."""

    def __init__(self, requests: Requests, name: str, where: dict[str, Any], size: int, part_bytes: int) -> None:
        self._requests, self._name, self._where, self._size = requests, name, where, size
        self._part_bytes = max(part_bytes, math.ceil(size / MAX_PARTS))
        self._count = math.ceil(size / self._part_bytes)
        self._done: list[dict[str, Any]] = [{}] * self._count

    async def send(self, local_path: str | os.PathLike[str]) -> None:
        """OSError, and then nothing was published."""

        async def create(client: Any) -> str:
            return (await client.create_multipart_upload(**self._where, ChecksumAlgorithm="CRC32"))["UploadId"]

        upload_id = await self._requests.until_done(f"beginning to write {self._name}", create)
        upload = {**self._where, "UploadId": upload_id}
        try:
            fd = os.open(local_path, os.O_RDONLY)
            try:
                await self._put_parts(fd, upload)
            finally:
                os.close(fd)
            await self._complete(upload)
        except BaseException:
            await abort(self._requests, upload)
            raise

    async def _put_parts(self, fd: int, upload: dict[str, Any]) -> None:
        """A few workers, one part in memory each; the first failure ends them all."""
        numbers = iter(range(self._count))
        workers = [
            asyncio.ensure_future(self._work(fd, upload, numbers))
            for _ in range(min(self._count, self._requests.limits.parallel))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, fd: int, upload: dict[str, Any], numbers: Iterator[int]) -> None:
        for i in numbers:
            async with self._requests.slots:
                # read and hashed in a thread, while the loop sends other parts
                data, sums = await asyncio.to_thread(self._read, fd, i)
                part = {**upload, "PartNumber": i + 1, "ChecksumCRC32": sums.crc32}

                async def put(client: Any, data: bytes = data, sums: Sums = sums, part: dict[str, Any] = part) -> Any:
                    return await client.upload_part(**part, Body=Body(data, sums))

                what = f"writing {self._name}, part {i + 1}"
                answer = await self._requests.until_done(what, put, num_bytes=len(data), held=True)
                self._done[i] = {"PartNumber": i + 1, "ETag": answer["ETag"], "ChecksumCRC32": sums.crc32}

    def _read(self, fd: int, i: int) -> tuple[bytes, Sums]:
        data = os.pread(fd, self._part_bytes, i * self._part_bytes)
        return data, Sums(data)

    async def _complete(self, upload: dict[str, Any]) -> None:
        async def complete(client: Any) -> None:
            await client.complete_multipart_upload(**upload, MultipartUpload={"Parts": self._done})

        async def stored(client: Any) -> int:
            return int((await client.head_object(**self._where))["ContentLength"])

        seconds = self._requests.limits.request_seconds + self._count * _SECONDS_PER_PART
        try:
            await self._requests.until_done(f"finishing {self._name}", complete, more_seconds=seconds)
        except FileNotFoundError:  # NoSuchUpload: an earlier try went through, and its answer was lost
            if await self._requests.until_done(f"looking at {self._name}", stored) != self._size:
                raise


async def abort(requests: Requests, upload: dict[str, Any]) -> None:
    """So that no parts stay behind; what this cannot reach, `S3Storage.sweep` finds later."""
    with contextlib.suppress(Exception):
        client = await requests.client()
        await asyncio.wait_for(client.abort_multipart_upload(**upload), requests.limits.request_seconds)
