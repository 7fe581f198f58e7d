"""What makes a raw sample usable, decided when it is read, without decoding: the same for every reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from clip_train.data.bad_samples import BadSample

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm")


def image_bytes(members: Mapping[str, Any]) -> bytes:
    """The image member's content. BadSample where there is none, or an empty one."""
    for extension in IMAGE_EXTENSIONS:
        if extension in members:
            if not members[extension]:
                raise BadSample("image is empty")
            return members[extension]
    raise BadSample("no image")


def caption(members: Mapping[str, Any], caption_key: str | None) -> str:
    """The caption: the `.txt` member, or `caption_key` of the `.json`. BadSample where there is none."""
    if caption_key is None:
        if "txt" not in members:
            raise BadSample("no caption")
        text = _text(members["txt"])
    else:
        value = metadata(members).get(caption_key)
        if value is None:
            raise BadSample("no caption")
        if not isinstance(value, str):
            raise BadSample("caption is not a text")
        text = value
    if not text.strip():
        raise BadSample("caption is empty")
    return text


def metadata(members: Mapping[str, Any]) -> dict[str, Any]:
    """The `.json` member; {} where there is none. BadSample if it is no JSON object."""
    if "json" not in members:
        return {}
    content = members["json"]
    try:
        parsed = json.loads(content) if isinstance(content, bytes | str) else content
    except ValueError as e:
        raise BadSample("json does not parse") from e
    if not isinstance(parsed, dict):
        raise BadSample("json does not parse")
    return parsed


def check(members: Mapping[str, Any], duplicate: bool, caption_key: str | None) -> str | None:
    """Why this sample cannot be used; None if it can, as far as one sees without decoding."""
    if duplicate:
        return "duplicate key"
    try:
        image_bytes(members)
        caption(members, caption_key)
    except BadSample as e:
        return e.reason
    return None


def _text(content: bytes | str) -> str:
    return content.decode("utf-8", errors="replace") if isinstance(content, bytes) else content
