"""Read the fields of a sample's `.json`, and of a table's rows: groups, labels and captions take
the same values for missing, and the same numbers for equal.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from clip_train.data.invalid import InvalidSample


def metadata(members: Mapping[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """The `.json` member; {} if there is none. If it is not a JSON object: {}, or with `strict`
    InvalidSample."""
    content = members.get("json", {})  # a user's stage may have parsed it
    try:
        parsed = json.loads(content) if isinstance(content, bytes | str) else content
    except (ValueError, RecursionError):  # the latter: brackets nested thousands deep
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    if strict:
        raise InvalidSample("member is too large" if content is None else "json does not parse")
    return {}


def key_of(name: str) -> str:
    """The key that a recipe's name means: `json.x` and `x` are both x."""
    return name.removeprefix("json.")


def is_missing(value: Any) -> bool:
    """null; NaN, which pandas writes for an empty cell, and infinities; blank text; [], {}, and
    lists of these alone."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, bytes | str):
        return not value.strip()
    if isinstance(value, list | tuple):
        return all(map(is_missing, value))
    return value is None or (isinstance(value, dict) and not value)


def scalar(value: Any) -> Any:
    """A value as labels and groups compare it: None if it is missing, the element of a list of one,
    3 for 3.0, and text without blanks around it; the same within lists and objects."""
    if is_missing(value):
        return None
    if isinstance(value, list | tuple):
        parts = [scalar(each) for each in value]
        return parts[0] if len(parts) == 1 else parts
    if isinstance(value, dict):
        return {key: scalar(value[key]) for key in sorted(value)}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return value.strip() if isinstance(value, str) else value


def without_case(text: str) -> str:
    """The text in lower case, with single blanks: two captions are the same if these are equal."""
    return " ".join(text.lower().split())


def as_json(fields: Mapping[str, Any]) -> bytes:
    """The content of a `.json`. NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_finite(fields), default=str, allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
