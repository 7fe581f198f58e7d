"""Columns of an index: a value of each sample's `.json`, one `.npy` for each column beside the
index.

The index says which file has a column, and which of its shards have no values. The rows are those
of all other shards, in the order of their names. A column has numbers (missing: NaN), texts in
UTF-8 (missing: empty), or uids of 32 hexadecimal digits (missing: zeros).
"""

import hashlib
import io
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from clip_train.data.fields import scalar
from clip_train.data.keep import UID, UID_PATTERN, uid_of
from clip_train.errors import DataError, UserError, unreadable
from clip_train.storage.config import StorageConfig
from clip_train.storage.redact import redact
from clip_train.storage.urls import is_remote, local_path, open_read

MAX_TEXT_BYTES = 256
READS = 3  # of a file that seems damaged: bits may flip in transit
CHUNK_BYTES = 1 << 24
DIGITS = 16  # of its sha256, in the name of a file
FILE_PATTERN = re.compile(r"clip_train_column_[0-9a-f]+\.npy")
INTEGERS = tuple(map(np.dtype, ("<i2", "<i4", "<i8")))


class ColumnFile(NamedTuple):
    """A column, as an index names it."""

    file: str  # its name, in the folder of the index
    sha256: str
    without: tuple[str, ...] = ()  # shards of the index that are not in it


def column_of(name: str, values: Sequence[Any]) -> Any:
    """The values of one shard's samples as an array. Lists and objects count as missing.

    Raises:
        DataError: a text is too long.
    """
    scalars = [scalar(value) for value in values]
    scalars = [None if isinstance(value, list | dict) else value for value in scalars]
    known = [value for value in scalars if value is not None]
    texts = [value for value in known if isinstance(value, str)]
    if not texts:
        return _numbers(scalars)
    if len(texts) == len(known) and all(map(UID_PATTERN.fullmatch, texts)):
        return np.array([uid_of(value or "0" * 32) for value in scalars], UID)
    encoded = [b"" if value is None else _encoded(value) for value in scalars]
    longest = max(encoded, key=len)
    if len(longest) > MAX_TEXT_BYTES:
        raise DataError(
            f"--columns json.{name}: a text has {len(longest):,} bytes ({longest[:40].decode('utf-8', 'replace')}...); "
            f"a column has numbers, uids, or texts of at most {MAX_TEXT_BYTES} bytes: leave it out"
        )
    return np.array(encoded, f"S{len(longest)}")


def _numbers(scalars: list[Any]) -> Any:
    if None not in scalars and all(isinstance(value, int) for value in scalars):
        low, high = min(scalars, default=0), max(scalars, default=0)
        for dtype in INTEGERS:
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return np.array(scalars, dtype)
    return np.array([math.nan if value is None else value for value in scalars], "<f8")


def joined(parts: Sequence[Any]) -> Any:
    """The arrays of several shards as one. If one of them has texts, all become texts."""
    kinds = {part.dtype.kind for part in parts if not _all_missing(part)}
    if kinds <= set("if"):
        return np.concatenate([part for part in parts if part.dtype.kind in "if"] or parts)
    if kinds == {"V"}:
        return np.concatenate(
            [part if part.dtype == UID else np.zeros(len(part), UID) for part in parts]
        )
    return np.concatenate([_as_text(part) for part in parts])


def _all_missing(part: Any) -> bool:
    return part.dtype.kind == "f" and bool(np.isnan(part).all())


def _as_text(part: Any) -> Any:
    if part.dtype.kind == "S":
        return part
    if _all_missing(part):
        return np.zeros(len(part), "S1")
    if part.dtype == UID:
        texts = [f"{first:016x}{last:016x}" if first or last else "" for first, last in part]
    else:
        texts = ["" if math.isnan(value) else str(scalar(value)) for value in part.tolist()]
    return np.array([_encoded(text) for text in texts])


def _encoded(value: Any) -> bytes:
    return str(value).encode("utf-8", "surrogatepass")


def places_in(column: ColumnFile, samples: Mapping[str, int]) -> dict[str, slice]:
    """The rows of each shard that has values. samples: of all shards of the index."""
    places, begin = {}, 0
    for shard in sorted(samples.keys() - set(column.without)):
        places[shard] = slice(begin, begin + samples[shard])
        begin += samples[shard]
    return places


@contextmanager
def column_file(array: Any, without: Iterable[str]) -> Iterator[tuple[ColumnFile, str]]:
    """A column as a file on this machine, to be copied beside the index; its path."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "column.npy")
        np.save(path, array, allow_pickle=False)
        digest = _digest_of(path)
        yield ColumnFile(f"clip_train_column_{digest[:DIGITS]}.npy", digest, tuple(without)), path


def _digest_of(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read_column(folder: str, name: str, column: ColumnFile, storage: StorageConfig) -> Any:
    """Its array; a local file is mapped into memory. UserError if it is missing or damaged."""
    url = folder + column.file
    what = f"the column {name} of the index, {redact(url)},"
    again = "run `clip-train index` again with --columns"
    try:
        if not is_remote(url):
            path = local_path(url)
            if _digest_of(path) == column.sha256:
                return np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            for _ in range(READS):
                with open_read(url, storage) as file:
                    data = file.read()
                if hashlib.sha256(data).hexdigest() == column.sha256:
                    return np.load(io.BytesIO(data), allow_pickle=False)
    except FileNotFoundError as e:
        raise UserError(f"{what} is missing: copy it with the index, or {again}") from e
    except OSError as e:
        raise unreadable(e, f"{what} cannot be read: {type(e).__name__}: {e}") from e
    raise UserError(f"{what} is damaged: it does not have its sha256; {again}")
