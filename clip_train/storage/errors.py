"""Classify errors of remote stores: whether to try again, and what the user can do.

Reads the errors of obstore, of botocore (credentials, settings) and of fsspec's file systems.
obstore has no typed error for most answers (for none to a listing): status and code are parsed.
"""

import asyncio
import re
import socket
from collections.abc import Iterator
from typing import Literal
from urllib.request import getproxies, proxy_bypass

# What an error means for the next attempt.
Meaning = Literal[
    "missing",
    "no bucket",
    "taken",  # the name exists already
    "denied",  # the credentials are invalid or missing, or lack a permission
    "expired",  # the credentials were valid once
    "elsewhere",  # the bucket is in another region
    "final",  # another attempt cannot succeed
    "again",  # another attempt may succeed
    "unreachable",  # nothing listens there, or the host's name is unknown
]

# A code counts more than the status: many of these are a 400.
_BY_CODE: dict[str, Meaning] = {
    **dict.fromkeys(
        ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"), "expired"
    ),
    **dict.fromkeys(
        ("BadDigest", "IncompleteBody", "RequestTimeout", "Throttling", "NoSuchUpload"), "again"
    ),
    **dict.fromkeys(("XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"), "again"),
    # Azure's, for a conditional write to a name that exists; others of its 409 may pass
    "BlobAlreadyExists": "taken",
    "InvalidBlockList": "again",
    **dict.fromkeys(("NoSuchBucket", "ContainerNotFound"), "no bucket"),
    "AccountIsDisabled": "final",
    "RequestExpired": "expired",
    "RequestTimeTooSkewed": "final",
    "AuthorizationHeaderMalformed": "elsewhere",
}
_BY_STATUS: dict[int, Meaning] = {
    301: "elsewhere", 307: "elsewhere", 401: "denied", 403: "denied", 404: "missing", 412: "taken",
    408: "again", 409: "again", 425: "again", 429: "again",
}  # fmt: skip
# botocore raises these before it sends a request. (ConfigParseError and PartialCredentialsError
# are tried again: the credentials file may just be rewritten.)
_NO_CREDENTIALS = re.compile(
    "NoCredentialsError|ProfileNotFound|SSOTokenLoadError|UnauthorizedSSOTokenError"
    "|TokenRetrievalError|LoginRefreshRequired|LoginTokenLoadError"
)
# obstore, at Azure and Google: it asks this machine's metadata server if nothing else is set
_TOKEN_REQUEST = "Error performing token request"
_STILL_EXPIRED = "refreshed credentials are still expired"  # botocore's RuntimeError
_WRONG_KEY = "correct the credentials (AWS_PROFILE, ~/.aws, or AWS_ACCESS_KEY_ID and its secret)"
_REMEDIES = {  # by code, or by meaning
    "NoSuchBucket": "create the bucket, or correct the URL",
    "RequestTimeTooSkewed": "set this machine's clock (NTP)",
    "InvalidAccessKeyId": _WRONG_KEY,
    "SignatureDoesNotMatch": _WRONG_KEY,
    "InvalidPathError": "rename or remove that object, or use a folder without it",
    "NotImplementedError": "this protocol is read-only; use s3://, gs://, az:// or a local folder",
    "unreachable": "unknown host, or the connection is refused; check the URL, and that the server "
    "is up",
    "elsewhere": "set AWS_DEFAULT_REGION to the bucket's region",
    "denied": "give these credentials the right to do it",
    "expired": "the credentials have expired: renew them where they come from "
    "(AWS_PROFILE, ~/.aws, a role); an AWS_SESSION_TOKEN needs a new start with a new token",
    # there are no credentials
    "log in": "log in, set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret; "
    "for a public bucket AWS_SKIP_SIGNATURE=true",
}
# What differs at other stores, by the scheme of the URL.
_REMEDIES_OF: dict[str, dict[str, str]] = {
    "az": {
        "ContainerNotFound": "create the container, or correct the URL",
        "AuthenticationFailed": "correct AZURE_STORAGE_ACCOUNT_KEY or the token, which may have "
        "expired; compare this machine's clock (NTP)",
        "AuthorizationFailure": "correct AZURE_STORAGE_ACCOUNT_KEY or the token, or let the "
        "account's firewall accept this machine",
        "AuthorizationPermissionMismatch": "give this identity the right to do it",
        "expired": "the token has expired: renew it",
        "log in": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or "
        "AZURE_STORAGE_SAS_TOKEN, or AZURE_USE_AZURE_CLI=true after `az login`, or for a public "
        "container AZURE_SKIP_SIGNATURE=true",
    },
    "gs": {
        "AuthenticationRequired": "the token or key is not valid: correct "
        "GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
        "expired": "the token has expired: renew it, or give a key that can be renewed in "
        "GOOGLE_APPLICATION_CREDENTIALS",
        "log in": "run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS "
        "to a file of credentials, or to read a public bucket GOOGLE_SKIP_SIGNATURE=true",
    },
    "sftp": {
        "log in": "name the user and a key that the server accepts in ~/.ssh/config, or add the "
        "key to an agent",
        "denied": "give this user the right to do it on the server's disk",
        "FailureError": "the server does not say why: often its disk is full, read-only or over a "
        "quota",
        "NotImplementedError": "use the sftp server of OpenSSH",
    },
}
_SIGN = "check the URL's user and password; a signed URL may have expired: sign it again"


class StorageError(OSError):
    """The last attempt has failed. The message has the URL, the operation, the reason and the
    remedy."""


class MissingError(StorageError, FileNotFoundError):
    """The bucket exists, the file does not."""


class DeniedError(StorageError, PermissionError):
    """The server refuses even fresh credentials."""


class RefusedError(StorageError):
    """The request is wrong, or its target is. Another attempt cannot succeed."""


class SettingsError(ValueError):
    """The client refuses its settings: no request was sent."""


class TransferError(OSError):
    """The answer was wrong, short or too slow; another attempt may succeed."""


class FailureError(OSError):
    """The server refuses a request and does not say why; another attempt may succeed."""


class ChangedError(OSError):
    """The file has changed since it was opened, or cannot be read in ranges. Another attempt cannot
    help."""


# The error after the last attempt; StorageError if the cause may pass.
RAISED: dict[Meaning, type[OSError]] = {
    "missing": MissingError,
    "denied": DeniedError,
    "expired": DeniedError,
    "taken": FileExistsError,
    "no bucket": RefusedError,
    "final": RefusedError,
    "elsewhere": RefusedError,
}
# fsspec raises NotImplementedError if a protocol cannot write, as https:// cannot.
_FINAL = (TypeError, ValueError, NotImplementedError, ChangedError)


def meaning(error: BaseException) -> Meaning:
    """The consequence of one attempt's error for the next attempt."""
    status, code, message = _answer(error)
    is_final = isinstance(error, _FINAL) and not isinstance(error, UnicodeError)
    is_final |= type(error).__name__ == "InvalidPathError"  # obstore's, of a name in a listing
    kind: Meaning = "again"
    if _STILL_EXPIRED in message:
        kind = "expired"
    elif status is not None:
        default: Meaning = "final" if 400 <= status < 500 else "again"
        kind = _BY_CODE.get(code) or _BY_STATUS.get(status, default)
    elif isinstance(error, PermissionError) or _NO_CREDENTIALS.search(f"{code} {message}"):
        kind = "denied"
    elif _is_unreachable(error):
        kind = "unreachable"
    elif isinstance(error, FileExistsError) or type(error).__name__ == "AlreadyExistsError":
        kind = "taken"
    elif isinstance(error, FileNotFoundError):
        # fsspec's HTTP raises this for every failed look-up; a broken connection is its cause
        kind = "missing"
        cause = error.__cause__
        is_http = type(cause).__module__.startswith("aiohttp")
        is_broken = is_http or isinstance(cause, OSError | asyncio.TimeoutError)
        if is_broken and not isinstance(cause, FileNotFoundError):
            kind = "again"
    elif is_final:
        kind = "final"
    return kind


def _is_unreachable(error: BaseException) -> bool:
    refused = any(isinstance(e, ConnectionRefusedError | socket.gaierror) for e in _causes(error))
    return refused or _TOKEN_REQUEST in str(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, then its cause, then the cause of that, ..."""
    while error is not None:
        yield error
        error = error.__cause__


def describe_error(error: BaseException, scheme: str = "s3") -> str:
    """One line: status, code and message of the server's answer, and the remedy if known.

    scheme: of the store's URL; the remedies name its settings.
    """
    if isinstance(error, TransferError | ChangedError):
        return str(error)
    kind = meaning(error)
    remedies = _REMEDIES | _REMEDIES_OF.get(scheme, {})
    if _TOKEN_REQUEST in str(error) and _answer(error)[0] is None:
        return (
            "there are no credentials: neither the environment nor this machine has them; "
            f"{remedies['log in']}"
        )
    if kind == "unreachable":
        return remedies[kind]
    status, code, message = _answer(error)
    text = " ".join(message.split())
    if status is None:
        head = code
        text = text or "no reason given"
    else:
        head = f"HTTP {status} {code}".strip()
    advice = remedies.get(code) or remedies.get(type(error).__name__) or remedies.get(kind, "")
    cause = error.__cause__ or error
    if kind == "denied" and type(cause).__module__.startswith("aiohttp"):
        advice = _SIGN
    elif isinstance(error, SettingsError) or _is_without_login(error, kind, status):
        advice = remedies["log in"]
    reason = ": ".join(filter(None, (head, text)))
    return "; ".join(filter(None, (reason, advice)))


def _is_without_login(error: BaseException, kind: Meaning, status: int | None) -> bool:
    """Whether there are no valid credentials. With an errno, they are valid, and a file is refused."""
    return kind == "denied" and status is None and getattr(error, "errno", None) is None


def describe_route(error: BaseException, server: str) -> str:
    """The end of a message about a request without an answer: its server and its proxies. Empty if
    there was an answer. server: its host, perhaps with the scheme and a port."""
    if _answer(error)[0] is not None or meaning(error) not in ("again", "unreachable"):
        return ""
    host = server.rpartition("://")[2]
    proxies = {} if proxy_bypass(host) else getproxies()
    used = [f"{kind}_proxy={proxies[kind]}" for kind in ("http", "https", "all") if kind in proxies]
    through = f", through a proxy ({', '.join(used)})" if used else ""
    return f" (the server is {host}{through})"


def _answer(error: BaseException) -> tuple[int | None, str, str]:
    """(HTTP status, the server's code, its message) of an error, or of one that caused it.

    Without an answer of a server: None, the kind of error, its text.
    """
    for cause in _causes(error):
        if type(cause).__module__ == "aiohttp.http_exceptions":
            continue  # the answer could not be read: this `code` is the client's own
        response = getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore's
            answer = response.get("Error", {})
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(answer.get("Code") or "")
            return status, "" if code == str(status) else code, str(answer.get("Message") or "")
        number = str(getattr(cause, "status", getattr(cause, "code", None)))  # aiohttp's, gcsfs's
        if number.isdigit():
            return int(number), "", str(cause)
    return _answer_in(type(error).__name__, str(error))


def _answer_in(kind: str, text: str) -> tuple[int | None, str, str]:
    """The same from the text of an obstore error, which has no other information."""
    text, _, details = text.partition("\n\nDebug source:")
    status = re.search(r"status code: (\d{3})", text)
    tags = dict(re.findall(r"(?s)<(Code|Message)>(.*?)</", text))
    if status or tags:  # a code without a status: an error in the body of a 200
        number = int(status[1]) if status else 200
        return number, tags.get("Code", ""), tags.get("Message", "")
    bulk = re.search(r"(?s)Bulk delete request failed for key .*?: (.*) \(code: (\d{3})\)", text)
    if bulk:  # Azure's answer for one of many blobs, whose code obstore drops
        code = "ContainerNotFound" if "container does not exist" in bulk[1] else ""
        return int(bulk[2]), code, bulk[1]
    if "redirect without LOCATION" in text:
        return 301, "", "the bucket is in another region"
    provider = re.search(r"(?s)credential provider: (\w+): (.*)", text)
    if provider:
        return None, provider[1], provider[2]
    if details:  # the text is no more than "Error performing GET ... - error sending request"
        reason = re.search(r'(?:message|error): "([^"]+)"', details)
        late = ": no answer in time" if "kind: Timeout" in details else ""
        text = re.sub(r"(?s).* - |Generic \w+ error: |HTTP error: ", "", text)
        kind, text = "", text + (f": {reason[1]}" if reason else late)
    return None, kind, text
