"""What an error means to the next attempt, and what the user reads: one table for readers and writers.

obstore's errors are nothing but text: here they come from obstore itself, asking a server of the test.
"""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import obstore
import pytest
from aiohttp import ClientPayloadError
from aiohttp.http_exceptions import ContentLengthError
from botocore.exceptions import (
    ClientError,
    ConfigParseError,
    NoCredentialsError,
)

from clip_train.storage.errors import ChangedError, TransferError, describe_error, meaning


class Answers(ThreadingHTTPServer):
    """Answers each request with `status` and an error of S3; with status 0 it hangs up."""

    status, code, message = 200, "", "m"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.server.status:
            self.connection.close()
            return
        body = f"<Error><Code>{self.server.code}</Code><Message>{self.server.message}</Message></Error>".encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_PUT = do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[Answers]:
    with Answers(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def s3(url: str, **options: object) -> obstore.store.S3Store:
    keys = (
        {}
        if "credential_provider" in options
        else {"access_key_id": "a", "secret_access_key": "SECRET"}
    )
    return obstore.store.S3Store(
        "bucket", endpoint=url, region="us-east-1", retry_config={"max_retries": 0},
        client_options={"allow_http": True, "timeout": datetime.timedelta(seconds=60)}, **keys, **options,
    )  # fmt: skip


def refused(server: Answers, method: str, status: int, code: str, message: str = "m") -> Exception:
    server.status, server.code, server.message = status, code, message
    store = s3(server.url)
    with pytest.raises(Exception) as caught:
        if method == "GET":
            obstore.get(store, "key")
        elif method == "HEAD":
            obstore.head(store, "key")
        elif method == "LIST":
            obstore.list(store).collect()
        else:
            obstore.put(store, "key", b"1", mode="create", use_multipart=False)
    return caught.value


OBSTORE = [
    ("GET", 503, "SlowDown", "again"),
    ("GET", 500, "InternalError", "again"),
    ("GET", 0, "", "again"),
    ("PUT", 400, "BadDigest", "again"),
    ("PUT", 400, "RequestTimeout", "again"),
    ("PUT", 409, "ConditionalRequestConflict", "again"),
    ("PUT", 404, "NoSuchUpload", "again"),
    ("GET", 429, "TooManyRequests", "again"),
    ("GET", 404, "NoSuchKey", "missing"),
    ("HEAD", 404, "", "missing"),
    ("GET", 404, "NoSuchBucket", "no bucket"),
    ("LIST", 404, "NoSuchBucket", "no bucket"),
    ("PUT", 412, "PreconditionFailed", "taken"),
    ("GET", 416, "InvalidRange", "final"),
    ("GET", 403, "AccessDenied", "denied"),
    ("LIST", 403, "AccessDenied", "denied"),
    ("HEAD", 403, "", "denied"),
    ("GET", 403, "InvalidAccessKeyId", "denied"),
    ("GET", 403, "SignatureDoesNotMatch", "denied"),
    ("GET", 403, "ExpiredToken", "expired"),
    ("LIST", 400, "ExpiredToken", "expired"),
    ("GET", 301, "PermanentRedirect", "elsewhere"),
    ("LIST", 400, "AuthorizationHeaderMalformed", "elsewhere"),
    ("GET", 403, "RequestTimeTooSkewed", "final"),
    ("GET", 400, "InvalidBucketName", "final"),
]


@pytest.mark.parametrize("method, status, code, expected", OBSTORE)
def test_meaning_of_an_answer(
    server: Answers, method: str, status: int, code: str, expected: str
) -> None:
    assert meaning(refused(server, method, status, code)) == expected


def answer(status: int, code: str, message: str = "m") -> ClientError:
    body = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(body, "ListMultipartUploads")  # type: ignore[arg-type]


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


OTHERS = [
    (answer(503, "SlowDown"), "again"),
    (answer(404, "404"), "missing"),
    (answer(403, "AccessDenied"), "denied"),
    (answer(400, "ExpiredToken"), "expired"),
    (
        RuntimeError(
            "Credentials were refreshed, but the refreshed credentials are still expired."
        ),
        "expired",
    ),
    (NoCredentialsError(), "denied"),
    (ConfigParseError(path="~/.aws/credentials"), "again"),
    (ValueError("Invalid endpoint: x"), "final"),
    (ConnectionResetError(), "again"),
    (asyncio.TimeoutError(), "again"),
    (TransferError("short"), "again"),
    (ChangedError("another"), "final"),
    (caused_by(PermissionError("Forbidden"), answer(403, "ExpiredToken")), "expired"),
    (
        caused_by(FileNotFoundError("x"), ConnectionResetError()),
        "again",
    ),  # as fsspec's HTTP calls any failure
    (FileNotFoundError("x"), "missing"),
    # an answer that was cut short: aiohttp gives it a code, 400
    (caused_by(ClientPayloadError("cut"), ContentLengthError("cut")), "again"),
]


@pytest.mark.parametrize(
    "error,expected", OTHERS, ids=lambda v: v if isinstance(v, str) else str(v)[:40]
)
def test_meaning(error: Exception, expected: str) -> None:
    assert meaning(error) == expected


@pytest.mark.parametrize(
    "error", [NoCredentialsError(), RuntimeError("the refreshed credentials are still expired")]
)
def test_what_botocore_raises_within_obstore_means_the_same(
    server: Answers, error: Exception
) -> None:
    def provide() -> None:
        raise error

    with pytest.raises(Exception) as caught:
        obstore.get(s3(server.url, credential_provider=provide), "key")
    assert meaning(caught.value) == meaning(error) and describe_error(
        caught.value
    ) == describe_error(error)


@pytest.mark.parametrize(
    "status, code, message, text",
    [
        (503, "SlowDown", "Reduce\nyour rate", "HTTP 503 SlowDown: Reduce your rate"),
        (
            403,
            "SignatureDoesNotMatch",
            "",
            "HTTP 403 SignatureDoesNotMatch; correct the credentials",
        ),
        (404, "NoSuchBucket", "", "HTTP 404 NoSuchBucket; create the bucket"),
        (
            403,
            "RequestTimeTooSkewed",
            "",
            "HTTP 403 RequestTimeTooSkewed; set this machine's clock",
        ),
        (403, "AccessDenied", "", "HTTP 403 AccessDenied; give these credentials the right"),
        (
            301,
            "PermanentRedirect",
            "",
            "HTTP 301: the bucket is in another region; set AWS_DEFAULT_REGION to",
        ),
    ],
)
def test_description_of_an_answer(
    server: Answers, status: int, code: str, message: str, text: str
) -> None:
    found = describe_error(refused(server, "GET", status, code, message))
    assert found.startswith(text) and "SECRET" not in found and "\n" not in found


def test_description_of_no_answer() -> None:
    with pytest.raises(Exception) as caught:
        obstore.get(s3("http://127.0.0.1:1"), "key")
    assert "error sending request: Connection refused" in describe_error(caught.value)


@pytest.mark.parametrize(
    "error, text",
    [
        (answer(404, "404", "Not Found"), "HTTP 404: Not Found"),
        (
            NoCredentialsError(),
            "NoCredentialsError: Unable to locate credentials; log in, set AWS_PROFILE",
        ),
        (ConnectionResetError(), "ConnectionResetError: no reason given"),
        (TransferError("7 bytes came instead of 8"), "7 bytes came instead of 8"),
    ],
    ids=lambda v: "" if isinstance(v, str) else str(v)[:40],
)
def test_description(error: Exception, text: str) -> None:
    assert describe_error(error).startswith(text)


def test_no_credentials_at_azure() -> None:
    """obstore asks the machine's own server for a token: none is there."""
    with pytest.raises(Exception) as caught:
        store = obstore.store.AzureStore(
            "container",
            account_name="account",
            msi_endpoint="http://127.0.0.1:1/token",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        obstore.list(store).collect()
    assert meaning(caught.value) == "unreachable"
    found = describe_error(caught.value, "az")
    assert found.startswith("there are no credentials") and "AZURE_STORAGE_ACCOUNT_KEY" in found
