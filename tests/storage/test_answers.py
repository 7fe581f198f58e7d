"""What an error means to the next attempt, and what the user is told: one table for readers and writers."""

from __future__ import annotations

import asyncio

import pytest
from botocore.exceptions import ClientError, ConfigParseError, NoCredentialsError, ParamValidationError

from clip_train.storage.answers import Changed, Transfer, describe, meaning


def answer(status: int, code: str, message: str = "m") -> ClientError:
    told = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(told, "GetObject")  # type: ignore[arg-type]


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


TABLE = [
    (answer(503, "SlowDown"), "again"),
    (answer(500, "InternalError"), "again"),
    (answer(200, "InternalError"), "again"),
    (answer(400, "BadDigest"), "again"),
    (answer(400, "RequestTimeout"), "again"),
    (answer(409, "ConditionalRequestConflict"), "again"),
    (answer(429, "TooManyRequests"), "again"),
    (answer(404, "NoSuchKey"), "missing"),
    (answer(404, "404"), "missing"),
    (answer(404, "NoSuchUpload"), "missing"),
    (answer(404, "NoSuchBucket"), "no bucket"),
    (answer(412, "PreconditionFailed"), "taken"),
    (answer(416, "InvalidRange"), "changed"),
    (answer(403, "AccessDenied"), "denied"),
    (answer(403, "403"), "denied"),
    (answer(403, "InvalidAccessKeyId"), "denied"),
    (answer(403, "SignatureDoesNotMatch"), "denied"),
    (answer(403, "ExpiredToken"), "expired"),
    (answer(400, "ExpiredToken"), "expired"),
    (answer(400, "400"), "expired"),
    (answer(403, "RequestTimeTooSkewed"), "final"),
    (answer(400, "InvalidBucketName"), "final"),
    (RuntimeError("Credentials were refreshed, but the refreshed credentials are still expired."), "expired"),
    (NoCredentialsError(), "denied"),
    (ConfigParseError(path="~/.aws/credentials"), "again"),
    (ParamValidationError(report="x"), "final"),
    (ValueError("Invalid endpoint: x"), "final"),
    (ConnectionResetError(), "again"),
    (asyncio.TimeoutError(), "again"),
    (Transfer("short"), "again"),
    (Changed("another"), "changed"),
    (caused_by(PermissionError("Forbidden"), answer(403, "ExpiredToken")), "expired"),  # as s3fs translates it
    (caused_by(FileNotFoundError("x"), ConnectionResetError()), "again"),  # as fsspec's HTTP calls any failure
    (FileNotFoundError("x"), "missing"),
]


@pytest.mark.parametrize("error,expected", TABLE, ids=lambda v: v if isinstance(v, str) else str(v)[:40])
def test_meaning(error: Exception, expected: str) -> None:
    assert meaning(error) == expected


@pytest.mark.parametrize(
    "error,told",
    [
        (answer(503, "SlowDown", "Reduce\nyour rate"), "HTTP 503 SlowDown: Reduce your rate"),
        (answer(403, "SignatureDoesNotMatch", ""), "HTTP 403 SignatureDoesNotMatch; correct the credentials"),
        (answer(404, "404", "Not Found"), "HTTP 404: Not Found"),
        (answer(404, "NoSuchBucket", ""), "HTTP 404 NoSuchBucket; create the bucket"),
        (answer(403, "RequestTimeTooSkewed", ""), "HTTP 403 RequestTimeTooSkewed; set this machine's clock"),
        (answer(403, "AccessDenied", ""), "HTTP 403 AccessDenied; give these credentials the right"),
        (NoCredentialsError(), "NoCredentialsError: Unable to locate credentials; log in, set AWS_PROFILE"),
        (ConnectionResetError(), "ConnectionResetError: no reason given"),
        (Transfer("7 bytes came instead of 8"), "7 bytes came instead of 8"),
    ],
    ids=lambda v: "" if isinstance(v, str) else str(v)[:40],
)
def test_description(error: Exception, told: str) -> None:
    assert describe(error).startswith(told)


def test_an_expired_token_of_the_environment_is_told_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_CREDENTIAL_EXPIRATION"):
        monkeypatch.delenv(name, raising=False)
    assert "renew them where they come from" in describe(answer(403, "ExpiredToken"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "SECRET")
    assert "has expired, and nothing can renew it" in describe(answer(403, "ExpiredToken"))
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", "2026-11-21T09:00:00Z")
    told = describe(answer(403, "ExpiredToken"))
    assert "has expired at 2026-11-21T09:00:00Z, and" in told and "SECRET" not in told
