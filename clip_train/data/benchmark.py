"""clip_benchmark's data sets, as its exporter writes them.

    wds_cars/classnames.txt                             a class in each line
    wds_cars/zeroshot_classification_templates.txt      a prompt in each line, {c} for the class
    wds_cars/test/nshards.txt                           the number of shards
    wds_cars/test/0.tar, 1.tar, ...                     images with .cls or .txt

A `.txt` in such a folder has one caption in each line. Sets on local disks are recognized, by
`nshards.txt`.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clip_train.errors import UserError
from clip_train.storage.urls import is_remote, local_path

NUM_SHARDS, SPLIT, TRAINING_SPLIT = "nshards.txt", "test", "train"
CLASSES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"


def benchmark_shards(place: str) -> list[str] | None:
    """The shards of a set's split, or of the `test` split of a set's folder. None for other places.
    UserError if `nshards.txt` has no number."""
    if is_remote(place):
        return None
    folder = local_path(place)
    for split in (folder, folder / SPLIT):
        file = split / NUM_SHARDS
        if file.is_file():
            text = file.read_text("utf-8", "replace").strip()
            if not text.isdecimal() or not int(text):
                raise UserError(f"{file} must hold the number of shards, and has {text[:60]!r}")
            return [str(split / f"{number}.tar") for number in range(int(text))]
    return None


def training_split(place: str) -> str:
    """The `train` split of a set's folder; other places as they are. UserError if the set has no
    such split."""
    if is_remote(place):
        return place
    folder = local_path(place)
    if (folder / NUM_SHARDS).is_file():
        return place
    if (folder / TRAINING_SPLIT / NUM_SHARDS).is_file():
        return str(folder / TRAINING_SPLIT)
    if (folder / SPLIT / NUM_SHARDS).is_file():
        raise UserError(
            f"{place} has no training images ({TRAINING_SPLIT}/{NUM_SHARDS}): export the split "
            f"{TRAINING_SPLIT} as well, or give other labeled images"
        )
    return place


def has_classes(place: str) -> bool:
    """Whether a place is a set's folder, or its split's, with a `classnames.txt`."""
    return benchmark_shards(place) is not None and _folder_of_classes(place) is not None


def read_classes(place: str) -> dict[str, Any] | None:
    """The class names and prompts of a set's folder, or of its split's, as `ZeroShotClasses` takes
    them; None without a `classnames.txt`."""
    folder = _folder_of_classes(place)
    if folder is None:
        return None
    content: dict[str, Any] = {"classnames": _lines(folder / CLASSES)}
    if (folder / TEMPLATES).is_file():
        content["templates"] = _lines(folder / TEMPLATES)
    return content


def _folder_of_classes(place: str) -> Path | None:
    """The folder with the `classnames.txt` of a set's folder, or of its split's."""
    if is_remote(place):
        return None
    given = local_path(place)
    if not given.is_dir() and given.name != CLASSES:
        return None
    for folder in (given, given.parent):
        if (folder / CLASSES).is_file():
            return folder
    return None


def _lines(file: Path) -> list[str]:
    """As clip_benchmark reads them, and without empty lines at the end."""
    return [line.strip() for line in file.read_text("utf-8").rstrip().splitlines()]


@functools.lru_cache(maxsize=4096)
def _has_lines(shard: str) -> bool:
    return not is_remote(shard) and (local_path(shard).parent / NUM_SHARDS).is_file()


def with_captions(members: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
    """The members of a sample of this shard, where the `.txt` is a list of captions if the shard
    belongs to one of these sets."""
    text = members.get("txt")
    if not isinstance(text, bytes) or not _has_lines(shard):
        return members
    # bytes that are not UTF-8 stay as they are, for the reason that they are invalid
    lines = text.decode("utf-8", "surrogateescape").splitlines()
    captions = [line.encode("utf-8", "surrogateescape") for line in lines]
    return {**members, "txt": captions or text}
