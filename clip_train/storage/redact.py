"""Replace passwords, signatures and tokens in URLs by `REDACTED`, for logs and recipes.

Parameters that change with each signature (a date, an expiry) are replaced too, so a URL that was
signed again stays equal.
"""

import re
from typing import TypeVar, cast

REDACTED = "REDACTED"
REMOVED = (
    "the password or signature of this URL was removed when this recipe was written; "
    "give the URL again"
)
WAS_REDACTED = re.compile(rf"//{REDACTED}@|={REDACTED}")  # in a URL that was given with a secret
T = TypeVar("T")

# The user and password of a URL. A user without a password is a secret in http(s) alone (a token):
# the container in `abfs://container@account` is not. The last branch: a password that holds a `/`,
# which no URL may.
_USER = re.compile(
    r"""(?ix) ( (?:https?|ftps?):// ) [^\s/?#"<>]+ @
      | ( [a-z][a-z0-9+.-]{0,20}:// ) [^\s/?#"<>@:]* : [^\s/?#"<>]* @
      | ( [a-z][a-z0-9+.-]{0,20}:// ) [^\s/?#"<>@:]+ : (?!\d{1,5}[/?#\s]) [^\s"<>@:]* @ """
)
_NAME = r"""(?:
    x-(?:amz|goog|ms|oss|cos|obs|bce|tos)-[\w-]{1,40}
  | [\w.-]{0,40}
    (?:signature|token(?!iz)|secret|passw|credential|api.?key|access.?key|auth(?!or))
    [\w.-]{0,40}
  | sig | sas | pwd | pass | jwt | hmac | policy | expires | googleaccessid | key-pair-id
  | hdnt[ls] | hdnea
)"""
_VALUE = r"""(?: (?!::|,\w+://) [^&#\s"'<>)\]}] | [)\]}](?=\w) )+"""
_NAMED = re.compile(rf"(?ix) ([?&#]{_NAME}=) {_VALUE}")
# A long value of letters and digits, unless its name says that it is a version of the object.
_OPAQUE = re.compile(
    r"(?i)([?&#](?!(?:version|generation|rev|commit|sha|md5|etag|digest)[\w-]{0,20}=)[\w.-]{1,40}=)"
    r"(?=[\w~%+=-]{0,200}?\d)(?=[\w~%+=-]{0,200}?[a-z])[\w~%+=-]{32,}"
)
# Other signed parameters of an Azure shared access signature.
_SAS = re.compile(
    rf"(?ix) ([?&](?:s[vtepris]|srt|spr|sip|sdd|sk[a-z]{{1,4}}|s[au]oid|scid)=) {_VALUE}"
)
# Shell variables, and options of a command with their values: in `log.notify`.
_SHELL = re.compile(
    r"""(?x) (\b[A-Z0-9_]*(?:TOKEN(?!S)|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY)[A-Z0-9_]*=['"]?
    |(?<!\S)--[\w-]*(?:token(?!iz|s)|secret|passw|bearer|api-?key|access-?key)[\w-]*[ =]['"]?)
    [^\s'"]+"""
)
_MAY_HOLD = re.compile("=|://|uthorization|--")
_HEADER = re.compile(
    r"(?i)(\bauthorization['\"]?\s*[:=]\s*['\"]?(?:(?:basic|bearer|token)\s+)?)[^\s'\",]+"
)


def redact(value: T) -> T:
    """Return a text with the secrets removed from every URL in it; JSON: all texts in it."""
    if isinstance(value, dict):
        return cast(T, {redact(key): redact(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return cast(T, [redact(item) for item in value])
    if not isinstance(value, str) or not _MAY_HOLD.search(value):
        return value
    text = _USER.sub(rf"\1\2\3{REDACTED}@", value)
    if "sig=" in text:
        text = _SAS.sub(rf"\1{REDACTED}", text)
    for secret in (_NAMED, _OPAQUE, _HEADER, _SHELL):
        text = secret.sub(rf"\1{REDACTED}", text)
    return cast(T, text)
