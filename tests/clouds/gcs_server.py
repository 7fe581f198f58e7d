"""Google Cloud Storage's XML API over memory, as far as object stores' clients use it.

    python gcs_server.py HOST PORT TOKEN

Modeled on https://cloud.google.com/storage/docs/xml-api: generations, `x-goog-if-generation-match`, multipart uploads
whose parts have at least 5 MiB, listings in pages, ranges, a bearer token, errors as XML. The standard library only.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import re
import sys
import threading
import urllib.parse
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from email.utils import format_datetime
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

LEAST_PART = 5 << 20
PAGE = 1000


class Refusal(Exception):
    """An answer that is not a success."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass
class Stored:
    """One generation of an object."""

    data: bytes
    generation: int
    changed: datetime.datetime

    @cached_property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


@dataclass
class Upload:
    """A multipart upload that is not complete."""

    key: str
    parts: dict[int, bytes] = field(default_factory=dict)


@dataclass
class StoredBucket:
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)


class Store:
    """All buckets. Each request is one atomic step."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.buckets: dict[str, StoredBucket] = {}
        self.numbers = itertools.count(1_700_000_000_000_000)

    def bucket(self, name: str) -> StoredBucket:
        if name not in self.buckets:
            raise Refusal(404, "NoSuchBucket", "The specified bucket does not exist.")
        return self.buckets[name]

    def insert(self, bucket: str, key: str, data: bytes, only_if: str | None) -> Stored:
        """only_if: the generation that must be there; 0: none."""
        objects = self.bucket(bucket).objects
        present = objects[key].generation if key in objects else 0
        if only_if is not None and int(only_if) != present:
            raise Refusal(
                412, "PreconditionFailed", "At least one of the pre-conditions did not hold."
            )
        now = datetime.datetime.now(datetime.timezone.utc)
        objects[key] = Stored(data, next(self.numbers), now)
        return objects[key]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store
    token: str

    def log_message(self, *arguments: object) -> None:
        pass

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, query = self.path.partition("?")
        asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        bucket, _, key = urllib.parse.unquote(path.lstrip("/")).partition("/")
        try:
            if self.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refusal(401, "AuthenticationRequired", "Authentication required.")
            with self.store.lock:
                method = "get" if self.command == "HEAD" else self.command.lower()
                getattr(self, f"{method}_{'object' if key else 'bucket'}")(bucket, key, asked, body)
        except Refusal as e:
            text = f"<Error><Code>{e.code}</Code><Message>{escape(e.message)}</Message></Error>"
            self.answer(e.status, f"<?xml version='1.0' encoding='UTF-8'?>{text}".encode())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    # -- buckets

    def put_bucket(self, bucket: str, key: str, asked: dict[str, str], body: bytes) -> None:
        self.store.buckets.setdefault(bucket, StoredBucket())
        self.answer(200)

    def get_bucket(self, bucket: str, key: str, asked: dict[str, str], body: bytes) -> None:
        found = self.store.bucket(bucket)
        if "uploads" in asked:
            uploads = "".join(
                f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{number}</UploadId></Upload>"
                for number, upload in found.uploads.items()
            )
            listing = f"<ListMultipartUploadsResult>{uploads}</ListMultipartUploadsResult>"
            self.answer(200, listing.encode())
            return
        prefix = asked.get("prefix", "")
        after = asked.get("continuation-token") or asked.get("start-after", "")
        keys = sorted(key for key in found.objects if key.startswith(prefix) and key > after)
        page = keys[: min(PAGE, int(asked.get("max-keys", PAGE)))]
        entries = "".join(self.entry(key, found.objects[key]) for key in page)
        more = len(keys) > len(page)
        rest = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        self.answer(
            200,
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://doc.s3.amazonaws.com/2006-03-01">'
            f"<Name>{bucket}</Name><KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{entries}{rest}</ListBucketResult>".encode(),
        )

    @staticmethod
    def entry(key: str, stored: Stored) -> str:
        changed = stored.changed.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return (
            f"<Contents><Key>{escape(key)}</Key><Generation>{stored.generation}</Generation>"
            f"<LastModified>{changed}</LastModified><ETag>{escape(stored.etag)}</ETag>"
            f"<Size>{len(stored.data)}</Size></Contents>"
        )

    # -- objects

    def put_object(self, bucket: str, key: str, asked: dict[str, str], body: bytes) -> None:
        if "uploadId" in asked:
            upload = self.upload(bucket, key, asked["uploadId"])
            upload.parts[int(asked["partNumber"])] = body
            self.answer(200, headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
            return
        only_if = self.headers.get("x-goog-if-generation-match")
        self.stored(self.store.insert(bucket, key, body, only_if))

    def stored(self, stored: Stored, body: bytes = b"") -> None:
        self.answer(200, body, {"ETag": stored.etag, "x-goog-generation": str(stored.generation)})

    def upload(self, bucket: str, key: str, number: str) -> Upload:
        upload = self.store.bucket(bucket).uploads.get(number)
        if upload is None or upload.key != key:
            raise Refusal(404, "NoSuchUpload", "The specified upload does not exist.")
        return upload

    def post_object(self, bucket: str, key: str, asked: dict[str, str], body: bytes) -> None:
        found = self.store.bucket(bucket)
        if "uploads" in asked:
            number = f"u{next(self.store.numbers)}"
            found.uploads[number] = Upload(key)
            self.answer(
                200,
                f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
                f"<UploadId>{number}</UploadId></InitiateMultipartUploadResult>".encode(),
            )
            return
        upload = self.upload(bucket, key, asked["uploadId"])
        listed = ET.fromstring(re.sub(rb' xmlns="[^"]*"', b"", body))
        parts = []
        for part in listed.iter("Part"):
            content = upload.parts.get(int(part.findtext("PartNumber") or 0))
            etag = (part.findtext("ETag") or "").strip('"')
            if content is None or hashlib.md5(content).hexdigest() != etag:
                raise Refusal(400, "InvalidPart", "One or more of the parts was not found.")
            parts.append(content)
        if any(len(part) < LEAST_PART for part in parts[:-1]):
            raise Refusal(400, "EntityTooSmall", "A part is smaller than the least allowed size.")
        only_if = self.headers.get("x-goog-if-generation-match")
        stored = self.store.insert(bucket, key, b"".join(parts), only_if)
        del found.uploads[asked["uploadId"]]
        self.stored(
            stored,
            f"<CompleteMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
            f"<ETag>{escape(stored.etag)}</ETag></CompleteMultipartUploadResult>".encode(),
        )

    def get_object(self, bucket: str, key: str, asked: dict[str, str], body: bytes) -> None:
        stored = self.store.bucket(bucket).objects.get(key)
        if stored is None:
            raise Refusal(404, "NoSuchKey", "The specified key does not exist.")
        headers = {
            "ETag": stored.etag,
            "Last-Modified": format_datetime(stored.changed, usegmt=True),
            "x-goog-generation": str(stored.generation),
            "Accept-Ranges": "bytes",
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        size = len(stored.data)
        if wanted is None:
            self.answer(200, stored.data, headers)
            return
        begin, end = int(wanted[1]), min(size, int(wanted[2] or size) + 1)
        if begin >= size:
            raise Refusal(416, "InvalidRange", "The requested range cannot be satisfied.")
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self.answer(206, stored.data[begin:end], headers)

    def delete_object(self, bucket: str, key: str, asked: dict[str, str], body: bytes) -> None:
        found = self.store.bucket(bucket)
        if "uploadId" in asked:
            self.upload(bucket, key, asked["uploadId"])
            del found.uploads[asked["uploadId"]]
        elif found.objects.pop(key, None) is None:
            raise Refusal(404, "NoSuchKey", "The specified key does not exist.")
        self.answer(204)


class HttpServer(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


if __name__ == "__main__":
    host, port, Handler.token = sys.argv[1:]
    Handler.store = Store()
    HttpServer((host, int(port)), Handler).serve_forever()
