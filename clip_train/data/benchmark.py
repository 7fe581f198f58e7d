"""clip_benchmark's data sets, as its exporter writes them.

    wds_cars/classnames.txt                             a class in each line
    wds_cars/zeroshot_classification_templates.txt      a prompt in each line, {c} for the class
    wds_cars/test/nshards.txt                           the number of shards
    wds_cars/test/0.tar, 1.tar, ...                     images with .cls or .txt

A `.txt` in such a folder has one caption in each line. Sets are recognized by `nshards.txt`, on local
disks and in stores. A store is asked once in a process, and never about a `.tar` or a `.json`.
"""

import functools
from collections.abc import Mapping
from typing import Any

from clip_train.errors import UserError
from clip_train.storage.redact import redact
from clip_train.storage.urls import is_remote, local_path, open_storage

NUM_SHARDS, SPLIT, TRAINING_SPLIT = "nshards.txt", "test", "train"
CLASSES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"


def benchmark_shards(place: str) -> list[str] | None:
    """The shards of a set's split, or of the `test` split of a set's folder. None for other places.
    UserError if `nshards.txt` has no number. OSError if a store does not answer."""
    folder = _folder(place)
    if _is_file(folder):
        return None
    for split in (folder, f"{folder}/{SPLIT}"):
        content = _content(split, NUM_SHARDS)
        if content is not None:
            text = content.decode("utf-8", "replace").strip()
            if not text.isdecimal() or not int(text):
                raise UserError(
                    f"{redact(split)}/{NUM_SHARDS} must hold the number of shards, and has {text[:60]!r}"
                )
            return [f"{split}/{number}.tar" for number in range(int(text))]
    return None


def training_split(place: str) -> str:
    """The `train` split of a set's folder; other places as they are. UserError if the set has no
    such split. OSError if a store does not answer."""
    folder = _folder(place)
    if _is_file(folder) or _content(folder, NUM_SHARDS) is not None:
        return place
    if _content(f"{folder}/{TRAINING_SPLIT}", NUM_SHARDS) is not None:
        return f"{folder}/{TRAINING_SPLIT}"
    if _content(f"{folder}/{SPLIT}", NUM_SHARDS) is not None:
        raise UserError(
            f"{redact(place)} has no training images ({TRAINING_SPLIT}/{NUM_SHARDS}): export the "
            f"split {TRAINING_SPLIT} as well, or give other labeled images"
        )
    return place


def has_classes(place: str) -> bool:
    """Whether a place is a set's folder, or its split's, with a `classnames.txt`. OSError if a store
    does not answer."""
    return benchmark_shards(place) is not None and _folder_of_classes(place) is not None


def read_classes(place: str) -> dict[str, Any] | None:
    """The class names and prompts of a set's folder, or of its split's, as `ZeroShotClasses` takes
    them; None without a `classnames.txt`. OSError if a store does not answer."""
    folder = _folder_of_classes(place)
    if folder is None:
        return None
    content: dict[str, Any] = {"classnames": _lines(_content(folder, CLASSES) or b"")}
    templates = _content(folder, TEMPLATES)
    if templates is not None:
        content["templates"] = _lines(templates)
    return content


def _folder_of_classes(place: str) -> str | None:
    """The folder with the `classnames.txt` of a set's folder, or of its split's."""
    folder = _folder(place).removesuffix(f"/{CLASSES}")
    if _is_file(folder):
        return None
    for each in (folder, folder.rpartition("/")[0]):
        if each and _content(each, CLASSES) is not None:
            return each
    return None


def _folder(place: str) -> str:
    """A path, or a URL without a slash at its end."""
    return place.rstrip("/") if is_remote(place) else str(local_path(place))


def _is_file(place: str) -> bool:
    """Whether the name of a place is that of a shard or of a file of classes."""
    return place.partition("?")[0].endswith((".tar", ".json"))


def _content(folder: str, name: str) -> bytes | None:
    """The bytes of a file of a folder; None if there is no such file."""
    if _is_file(folder):
        return None
    return _remote_content(folder, name) if is_remote(folder) else _read(folder, name)


def _read(folder: str, name: str) -> bytes | None:
    try:
        return open_storage(folder).read_bytes(name)
    # S3 forbids to read a file that is not there, unless its bucket may be listed
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None


_remote_content = functools.lru_cache(maxsize=4096)(_read)


def _lines(content: bytes) -> list[str]:
    """As clip_benchmark reads them, and without empty lines at the end."""
    return [line.strip() for line in content.decode().rstrip().splitlines()]


@functools.lru_cache(maxsize=4096)
def _has_lines(shard: str) -> bool:
    folder, slash, _ = _folder(shard).rpartition("/")
    return _content(folder if slash else ".", NUM_SHARDS) is not None


def with_captions(members: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
    """The members of a sample of this shard, where the `.txt` is a list of captions if the shard
    belongs to one of these sets. OSError if a store does not answer: it is asked about the shards
    that have a `.txt` of several lines."""
    text = members.get("txt")
    if not isinstance(text, bytes):
        return members
    if is_remote(shard) and len(text.splitlines()) < 2:
        return members
    if not _has_lines(shard):
        return members
    # bytes that are not UTF-8 stay as they are, for the reason that they are invalid
    lines = text.decode("utf-8", "surrogateescape").splitlines()
    captions = [line.encode("utf-8", "surrogateescape") for line in lines]
    return {**members, "txt": captions or text}
