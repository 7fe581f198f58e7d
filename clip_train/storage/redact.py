"""Replace passwords, signatures and tokens in URLs by `REDACTED`, for logs and recipes.

The user and password of a URL and its whole query string are replaced, so a URL that was signed
again stays equal.
"""

import re
from typing import TypeVar, cast

REDACTED = "REDACTED"
REMOVED = (
    "the password or signature of this URL was removed when this recipe was written; "
    "give the URL again"
)
WAS_REDACTED = re.compile(
    rf"//{REDACTED}@|[?#=]{REDACTED}"
)  # in a URL that was given with a secret
T = TypeVar("T")

# The user and password of a URL. A user without a password is a secret in http(s) alone (a token):
# the container in `abfs://container@account` is not. The last branch: a password that holds a `/`,
# which no URL may.
_USER = re.compile(
    r"""(?ix) ( (?:https?|ftps?):// ) [^\s/?#"<>]+ @
      | ( [a-z][a-z0-9+.-]{0,20}:// ) [^\s/?#"<>@:]* : [^\s/?#"<>]* @
      | ( [a-z][a-z0-9+.-]{0,20}:// ) [^\s/?#"<>@:]+ : (?!\d{1,5}[/?#\s]) [^\s"<>@:]* @ """
)
# A query string, or a fragment with values. It ends where the next source of a list begins.
_QUERY = re.compile(
    r"""(?x) ([?#]) (?= [^\s"'<>=?#]{1,80} = )
    (?: (?!::|,\w+://) [^\s"'<>)\]}] | [)\]}](?=\w) )+"""
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
    for secret in (_QUERY, _HEADER, _SHELL):
        text = secret.sub(rf"\1{REDACTED}", text)
    return cast(T, text)
