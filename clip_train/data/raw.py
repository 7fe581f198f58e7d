"""What makes a raw sample usable, decided when it is read, without decoding: the same for every reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from clip_train.data.bad_samples import BadSample
from clip_train.data.tar import RawSample

MAX_CAPTION_BYTES = 1 << 15  # of a .txt; more is a document, and would hold up the tokenizer
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm")


def image_bytes(members: Mapping[str, Any]) -> bytes:
    """The image member's content. BadSample where there is none, or an empty one."""
    for extension in IMAGE_EXTENSIONS:
        if extension in members:
            if not members[extension]:
                raise BadSample("image is empty")
            return members[extension]
    if any(e.rpartition(".")[2] in IMAGE_EXTENSIONS for e in members if not e.startswith("__")):
        raise BadSample("no image: dots in the key")  # a.b.jpg is the member b.jpg of the sample a
    raise BadSample("no image")


def captions(members: Mapping[str, Any], caption_key: str | None) -> list[str]:
    """The usable captions, at least one: the `.txt` member, or `caption_key` of the `.json`, a text or a list of texts.

    Raises:
        BadSample: there is none.
    """
    if caption_key is None:
        if "txt" not in members:
            raise BadSample("no caption")
        value = members["txt"]
    else:
        value = metadata(members).get(caption_key)
        if value is None:
            raise BadSample("no caption")
    if not isinstance(value, list):
        return [_usable_text(value)]
    texts: list[str] = []
    reason = "caption is empty"
    for item in value:
        try:
            texts.append(_usable_text(item))
        except BadSample as e:
            reason = e.reason
    if not texts:
        raise BadSample(reason)
    return texts


def caption(members: Mapping[str, Any], caption_key: str | None, draw: int = 0) -> str:
    """One of `captions`: of a list the one that `draw`, a random non-negative number, falls on; 0: the first."""
    texts = captions(members, caption_key)
    return texts[draw % len(texts)]


def metadata(members: Mapping[str, Any]) -> dict[str, Any]:
    """The `.json` member; {} where there is none. BadSample if it is no JSON object."""
    if "json" not in members:
        return {}
    content = members["json"]
    try:
        parsed = json.loads(content) if isinstance(content, bytes | str) else content
    except (ValueError, RecursionError) as e:  # the latter: brackets nested thousands deep
        raise BadSample("json does not parse") from e
    if not isinstance(parsed, dict):
        raise BadSample("json does not parse")
    return parsed


def check(sample: RawSample, caption_key: str | None) -> str | None:
    """Why this sample cannot be used; None if it can, as far as one sees without decoding."""
    if sample.duplicate:
        return "duplicate key"
    try:
        image_bytes(sample.members)
        captions(sample.members, caption_key)
    except BadSample as e:
        return "member is too large" if sample.too_large else e.reason
    return None


def _usable_text(content: Any) -> str:
    """A caption that a tokenizer can take. Bytes that are no UTF-8 are refused, as OpenCLIP's loader does."""
    if not isinstance(content, bytes | str):
        raise BadSample("caption is not a text")
    if len(content) > MAX_CAPTION_BYTES:
        raise BadSample("caption is too long")
    try:
        text = content.decode() if isinstance(content, bytes) else content
        text.encode()  # JSON can spell half a surrogate pair, which nothing can encode
    except UnicodeError as e:
        raise BadSample("caption is not UTF-8") from e
    if not text.strip():
        raise BadSample("caption is empty")
    return text
