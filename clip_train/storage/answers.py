"""What an error of a remote store means, how to say it, and what to do about it: for readers and writers alike."""

from __future__ import annotations

import asyncio
import os
from typing import Literal

# again: nothing says that another try would be in vain; expired: credentials that were right once; denied: ones that
# are not, or none; taken: there is something by that name; final: refused for good.
Meaning = Literal["missing", "no bucket", "taken", "changed", "denied", "expired", "final", "again"]

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired"}
_OF_ONE_TRANSFER = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError", "OperationAborted", "RequestTimeout",
    "SlowDown", "Throttling", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch",
}  # fmt: skip
_BY_CODE: dict[str, Meaning] = {  # whatever the status: many of these are a 400
    **dict.fromkeys(_EXPIRED, "expired"),
    "400": "expired",  # a HEAD: it has no body to say more in
    **dict.fromkeys(_OF_ONE_TRANSFER, "again"),
    "NoSuchBucket": "no bucket",
    "RequestTimeTooSkewed": "final",
}
_BY_STATUS: dict[int, Meaning] = {
    401: "denied", 403: "denied", 404: "missing", 412: "taken", 416: "changed",
    408: "again", 409: "again", 425: "again", 429: "again",
}  # fmt: skip
# What botocore raises before it asks. (A credentials file that is just being rewritten is a ConfigParseError or a
# PartialCredentialsError: those are tried again.)
_NO_CREDENTIALS = {
    "NoCredentialsError", "ProfileNotFound", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "TokenRetrievalError",
    "LoginRefreshRequired", "LoginTokenLoadError",
}  # fmt: skip
_STILL_EXPIRED = "refreshed credentials are still expired"  # botocore's RuntimeError
_LOG_IN = "log in, set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret"
_WRONG_KEY = "correct the credentials (AWS_PROFILE, ~/.aws, or AWS_ACCESS_KEY_ID and its secret)"
_REMEDY_OF_CODE = {
    "NoSuchBucket": "create the bucket, or correct the URL",
    "RequestTimeTooSkewed": "set this machine's clock (NTP)",
    "InvalidAccessKeyId": _WRONG_KEY,
    "SignatureDoesNotMatch": _WRONG_KEY,
}


class Transfer(OSError):
    """An answer that is not what was asked for, or comes too slowly: worth another attempt."""


class Changed(OSError):
    """The object is another one than when it was opened."""


def meaning(error: BaseException) -> Meaning:
    """What the error of one attempt says about the next one."""
    if isinstance(error, Changed):
        return "changed"
    status, code, _ = _answer(error)
    if status is None:
        return _meaning_of_no_answer(error)
    return _BY_CODE.get(code) or _BY_STATUS.get(status) or ("final" if 400 <= status < 500 else "again")


def _meaning_of_no_answer(error: BaseException) -> Meaning:
    if isinstance(error, RuntimeError) and _STILL_EXPIRED in str(error):
        return "expired"
    if isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS:
        return "denied"
    if isinstance(error, FileNotFoundError) and not _of_network(error.__cause__):
        return "missing"
    mistaken = isinstance(error, TypeError | ValueError) and not isinstance(error, UnicodeError)
    return "final" if mistaken or type(error).__name__ == "ParamValidationError" else "again"


def _of_network(cause: BaseException | None) -> bool:
    """fsspec's HTTP calls every look-up that failed a FileNotFoundError: what caused it tells them apart."""
    if isinstance(cause, FileNotFoundError):
        return False
    return isinstance(cause, OSError | asyncio.TimeoutError) or type(cause).__module__.startswith("aiohttp")


def describe(error: BaseException) -> str:
    """One line: of a server's answer its status, code and message; and what to do, where that is known."""
    if isinstance(error, Transfer | Changed):
        return str(error)
    status, code, message = _answer(error)
    head = type(error).__name__ if status is None else f"HTTP {status} {code if code != str(status) else ''}".strip()
    told = " ".join((message if status is not None else str(error) or "no reason given").split())
    advice = remedy(error)
    return f"{head}{': ' * bool(told)}{told}{'; ' * bool(advice)}{advice}"


def remedy(error: BaseException) -> str:
    """What the user can do about it; "" where this cannot tell."""
    kind, (_, code, _) = meaning(error), _answer(error)
    if kind == "expired":
        return _remedy_of_expired()
    if kind == "denied" and code not in _REMEDY_OF_CODE:
        known = code or isinstance(error, PermissionError)
        return "give these credentials the right to do it" if known else _LOG_IN
    return _REMEDY_OF_CODE.get(code, "")


def _remedy_of_expired() -> str:
    if not from_environment():
        return "the credentials have expired: renew them where they come from (AWS_PROFILE, ~/.aws, a role)"
    until = os.environ.get("AWS_CREDENTIAL_EXPIRATION")
    return (
        f"the AWS_SESSION_TOKEN that this process was started with has expired{f' at {until}' if until else ''}, and "
        "nothing can renew it: start again with a new one or, better, with AWS_PROFILE or a role, which are renewed"
    )


def from_environment() -> bool:
    """Whether the credentials are temporary ones that came with the process: those stay what they are."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    tokens = ("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
    return all(map(os.environ.get, names)) and any(map(os.environ.get, tokens))


def _answer(error: BaseException | None) -> tuple[int | None, str, str]:
    """(HTTP status, S3's code, its message) from botocore's, aiohttp's or gcsfs's error, or from one that it caused."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            told = response.get("Error", {})
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, str(told.get("Code") or ""), str(told.get("Message") or "")
        module = type(error).__module__.partition(".")[0]
        number = str(getattr(error, {"aiohttp": "status", "gcsfs": "code"}.get(module, "-"), None))
        if number.isdigit():
            return int(number), "", str(error)
        error = error.__cause__
    return None, "", ""
