"""What an error of a remote store means, how it is reported, and what to do about it: for reads and writes alike.

It reads the errors of obstore (S3), botocore (credentials, settings) and the file systems of fsspec (any other URL).
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
from collections.abc import Iterator
from typing import Literal

# again: another attempt may succeed; expired: credentials that were valid once; denied: ones
# that are not, or none; taken: there is something by that name; elsewhere: in another region; final: refused for good.
Meaning = Literal[
    "missing", "no bucket", "taken", "changed", "denied", "expired", "elsewhere", "final", "again"
]

_BY_CODE: dict[str, Meaning] = {  # whatever the status: many of these are a 400
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"), "expired"
    ),
    **dict.fromkeys(
        ("BadDigest", "IncompleteBody", "RequestTimeout", "Throttling", "NoSuchUpload"), "again"
    ),
    **dict.fromkeys(("XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"), "again"),
    "NoSuchBucket": "no bucket",
    "RequestExpired": "expired",
    "RequestTimeTooSkewed": "final",
    "AuthorizationHeaderMalformed": "elsewhere",
}
_BY_STATUS: dict[int, Meaning] = {
    301: "elsewhere", 307: "elsewhere", 401: "denied", 403: "denied", 404: "missing", 412: "taken", 416: "changed",
    408: "again", 409: "again", 425: "again", 429: "again",
}  # fmt: skip
# What botocore raises before it asks. (A credentials file that is just being rewritten is a ConfigParseError or a
# PartialCredentialsError: those are tried again.)
_NO_CREDENTIALS = {
    "NoCredentialsError", "ProfileNotFound", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "TokenRetrievalError",
    "LoginRefreshRequired", "LoginTokenLoadError",
}  # fmt: skip
_STILL_EXPIRED = "refreshed credentials are still expired"  # botocore's RuntimeError
_TIMEOUT = "kind: Timeout"  # obstore's
_LOG_IN = "log in, set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret; for a public bucket AWS_SKIP_SIGNATURE=true"
_WRONG_KEY = "correct the credentials (AWS_PROFILE, ~/.aws, or AWS_ACCESS_KEY_ID and its secret)"
_REMEDY_OF_CODE = {
    "NoSuchBucket": "create the bucket, or correct the URL",
    "RequestTimeTooSkewed": "set this machine's clock (NTP)",
    "InvalidAccessKeyId": _WRONG_KEY,
    "SignatureDoesNotMatch": _WRONG_KEY,
}


class StorageError(OSError):
    """Final: it has been tried as often as is worth it. Names the file, what was done, the reason and the remedy."""


class MissingError(StorageError, FileNotFoundError):
    """There is no such file in a bucket that is there."""


class DeniedError(StorageError, PermissionError):
    """The server refuses, with fresh credentials too."""


class TakenError(StorageError, FileExistsError):
    """There is something by that name already."""


class TransferError(OSError):
    """An answer that is not what was asked for, or comes too slowly: worth another attempt."""


class ChangedError(OSError):
    """The object is another one than when it was opened."""


def final_error(kind: Meaning, message: str) -> StorageError:
    """For an error that means `kind`; its errno is EIO where it may pass."""
    classes = {
        "missing": MissingError,
        "denied": DeniedError,
        "expired": DeniedError,
        "taken": TakenError,
    }
    error = classes.get(kind, StorageError)(message)
    error.errno = {"no bucket": errno.ENXIO, "final": errno.EPERM, "elsewhere": errno.EPERM}.get(
        kind, errno.EIO
    )
    return error


def meaning(error: BaseException) -> Meaning:
    """What the error of one attempt means for the next one."""
    if isinstance(error, ChangedError):
        return "changed"
    status, code, message = _response(error)
    silent = status == 400 and not code  # an answer to HEAD has no body to give a code in
    if (silent and not _is_plain_http(error) and "<html" not in str(error).lower()) or (
        _STILL_EXPIRED in message
    ):
        return "expired"
    if status is not None:
        return (
            _BY_CODE.get(code)
            or _BY_STATUS.get(status)
            or ("final" if 400 <= status < 500 else "again")
        )
    if isinstance(error, PermissionError) or code in _NO_CREDENTIALS:
        return "denied"
    if isinstance(error, FileNotFoundError) and not _of_network(error.__cause__):
        return "missing"
    mistaken = isinstance(error, TypeError | ValueError) and not isinstance(error, UnicodeError)
    return "final" if mistaken or code == "ParamValidationError" else "again"


def _of_network(cause: BaseException | None) -> bool:
    """fsspec's HTTP calls every look-up that failed a FileNotFoundError: its cause is what differs."""
    if isinstance(cause, FileNotFoundError):
        return False
    return isinstance(cause, OSError | asyncio.TimeoutError) or type(cause).__module__.startswith(
        "aiohttp"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _is_plain_http(error: BaseException) -> bool:
    """An answer to fsspec's HTTP, which knows nothing of buckets and their credentials."""
    return any(type(cause).__module__.startswith("aiohttp") for cause in _chain(error))


def is_unreachable(error: BaseException) -> bool:
    """Nothing listens at that address, or its name is not known."""
    return any(
        isinstance(cause, (ConnectionRefusedError, socket.gaierror)) for cause in _chain(error)
    )


def describe(error: BaseException) -> str:
    """One line: of a server's answer its status, code and message; and what to do, where that is known."""
    if isinstance(error, TransferError | ChangedError):
        return str(error)
    if is_unreachable(error):
        unknown = any(isinstance(cause, socket.gaierror) for cause in _chain(error))
        what = "the host's name is not known" if unknown else "the connection is refused"
        return f"{what}; check the URL, and that the server is up"
    status, code, message = _response(error)
    head = code if status is None else f"HTTP {status} {code}".strip()
    text = " ".join(message.split()) or ("no reason given" if status is None else "")
    advice = remedy(error)
    return f"{head}{': ' * bool(head and text)}{text}{'; ' * bool(advice)}{advice}"


def remedy(error: BaseException) -> str:
    """What the user can do about it; "" where that is not known."""
    kind, (status, code, _) = meaning(error), _response(error)
    if kind == "denied" and _is_plain_http(error):
        return "check the URL's user and password; a signed URL may have expired: sign it again"
    if kind == "elsewhere":
        return "set AWS_REGION to the one of the bucket"
    if kind == "denied" and code not in _REMEDY_OF_CODE:
        return _LOG_IN if status is None else "give these credentials the right to do it"
    if kind != "expired":
        return _REMEDY_OF_CODE.get(code, "")
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


def _response(error: BaseException) -> tuple[int | None, str, str]:
    """(HTTP status, the server's code, its message) of an error, or of one that caused it.

    Without an answer: None, the kind of error, its text.
    """
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore's
            answer = response.get("Error", {})
            status, code = (
                response.get("ResponseMetadata", {}).get("HTTPStatusCode"),
                str(answer.get("Code") or ""),
            )
            return status, "" if code == str(status) else code, str(answer.get("Message") or "")
        number = str(getattr(cause, "status", getattr(cause, "code", None)))  # aiohttp's, gcsfs's
        if number.isdigit():
            return int(number), "", str(cause)
        cause = cause.__cause__
    return _response_in(str(error), type(error).__name__)


def _response_in(text: str, kind: str) -> tuple[int | None, str, str]:
    """The same from the text of an obstore error, which is all that it has."""
    text, _, details = text.partition("\n\nDebug source:")
    code, message = (
        re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("Code", "Message")
    )
    status = re.search(r"status code: (\d{3})", text)
    if status or code:  # a code without a status: an error in the body of a 200
        return (
            int(status[1]) if status else 200,
            code[1] if code else "",
            message[1] if message else "",
        )
    if "redirect without LOCATION" in text:
        return 301, "", "the bucket is in another region"
    if provider := re.search(r"credential provider: (\w+): (.*)", text, re.DOTALL):
        return None, provider[1], provider[2]
    if details:  # the text itself is no more than "Error performing GET ... - HTTP error: error sending request"
        kind, inner = "", re.search(r'(?:message|error): "([^"]+)"', details)
        text = re.sub(r".* - |Generic S3 error: |HTTP error: ", "", text, flags=re.DOTALL)
        text = f"{text}{f': {inner[1]}' if inner else ': no answer in time' if _TIMEOUT in details else ''}"
    return None, kind, text


def is_timeout(error: BaseException) -> bool:
    """Whether obstore gave a request up that took too long."""
    return _TIMEOUT in str(error)
