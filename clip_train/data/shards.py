"""Where shards are: from `data.train` to a list of paths or URLs. The one module that lists and opens them.

`pack_rows` is what a checkpoint keeps of that list, so that a resumed run notices that it has changed.
"""

from __future__ import annotations

import base64
import io
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from braceexpand import braceexpand

from clip_train.errors import UserError, missing, unreadable
from clip_train.storage.blocks import Checksums
from clip_train.storage.config import StorageConfig
from clip_train.storage.redact import REMOVED, is_redacted, redact
from clip_train.storage.urls import expand_glob, is_remote, local_path, open_read

BUFFER_BYTES = 1 << 18  # of a local file: tar headers are 512 bytes, each would be a system call
Row = tuple[
    str, str, int
]  # of a shard: name, whose folder may move; 16 digits of its sha256 or ""; samples
TABLES = (".csv", ".tsv", ".parquet", ".json", ".jsonl")
NSHARDS = "nshards.txt"
NAMES_SHOWN = 5
SYNTHETIC = (
    "synthetic://"  # and a number of samples: a shard that is no file, of `data.images.synthetic`
)


def split_sources(spec: str) -> list[str]:
    """The sources that `::` joins, each with its braces and globs."""
    return [part.strip() for part in spec.split("::")]


def expand_braces(spec: str, field: str = "data.train") -> list[list[str]]:
    """`spec` (braces, globs, sources joined by `::`) -> each source's paths, URLs and patterns; lists nothing.

    Raises:
        UserError: a `pipe:` URL, a table instead of shards, an empty part, or braces that do not close.
    """
    found: list[list[str]] = []
    for part in split_sources(spec):
        if part.startswith("pipe:"):
            raise UserError(
                f"{field} ({part}): `pipe:` runs a shell command, whose failure looks like the end of "
                "the data; give a path or a URL instead, such as s3://bucket/{00000..00099}.tar"
            )
        if part.lower().endswith(TABLES):
            raise UserError(
                f"{field} ({part}) is a table, not shards: `clip-train shards {part} OUT` makes them of files, "
                f"`img2dataset --url_list {part} --output_format webdataset` of URLs; then give "
                "'OUT/{00000..00099}.tar'"
            )
        if is_redacted(part):
            raise UserError(f"{field} ({part}): {REMOVED}, as {field}=<URL>")
        try:
            patterns = list(braceexpand(part)) if part else []
        except ValueError as e:
            raise UserError(f"{field} ({part}): the braces do not balance ({e})") from e
        if not patterns:
            raise UserError(
                f"{field} ({spec}) has an empty part: give a path, or remove the extra `::`"
            )
        found.append(patterns)
    return found


def expand(spec: str, field: str = "data.train") -> list[list[str]]:
    """`spec` -> the paths or URLs of each source's shards, in an order that does not depend on who lists them.

    Raises:
        UserError: as `expand_braces`, or a pattern that matches nothing.
    """
    return [
        [shard for pattern in patterns for shard in _listed(pattern, field)]
        for patterns in expand_braces(spec, field)
    ]


def is_folder(place: str) -> bool:
    """Whether it names a folder: of a URL its last slash says so."""
    return place.endswith("/") or (not is_remote(place) and os.path.isdir(local_path(place)))


def _listed(pattern: str, field: str) -> list[str]:
    try:
        numbered = is_folder(pattern) and (
            is_remote(pattern) or (local_path(pattern) / NSHARDS).exists()
        )
        return _numbered(pattern.rstrip("/")) if numbered else expand_glob(pattern)
    except UserError as e:
        what = f"{field} ({pattern}) matches no shard, seen from {os.getcwd()}"
        before = (
            "" if is_remote(pattern) else re.split(r"[*?\[]", local_path(pattern).as_posix())[0]
        )
        raise missing(before, what, str(e)) from e
    except ImportError as e:
        raise UserError(f"{field} ({pattern}) cannot be listed ({type(e).__name__}: {e})") from e
    except OSError as e:
        raise unreadable(
            e, f"{field} ({pattern}) cannot be listed ({type(e).__name__}: {e})"
        ) from e


def _numbered(folder: str) -> list[str]:
    """The shards of clip_benchmark's layout: 0.tar, 1.tar, ..., as many as nshards.txt says. UserError, OSError."""
    try:
        with open_read(f"{folder}/{NSHARDS}") as file:
            return [f"{folder}/{n}.tar" for n in range(int(file.read()))]
    except (FileNotFoundError, ValueError) as e:
        raise UserError(
            f"{NSHARDS} of the folder cannot be read ({e}); without one write {folder}/*.tar"
        ) from e


def synthetic_size(shard: str) -> int | None:
    """Samples of `synthetic://N`; None of a shard that is to be read."""
    number = shard.removeprefix(SYNTHETIC)
    return int(number) if number != shard and number.isdecimal() else None


def split_name(shard: str) -> tuple[str, str]:
    """(folder with its "/", name) of a path or URL."""
    folder, slash, name = shard.rpartition("/")
    return folder + slash, name


@dataclass(frozen=True)
class Reading:
    """How shards are opened: how patiently, and what their bytes are verified against."""

    storage: StorageConfig = field(default_factory=StorageConfig)
    checksums: Mapping[str, Checksums] = field(
        default_factory=dict
    )  # by path or URL; of the indexed ones


PLAIN = Reading()


def open_shard(url: str, reading: Reading = PLAIN, buffer_bytes: int = BUFFER_BYTES) -> BinaryIO:
    """A seekable binary file, each block of which is verified where the shard is indexed.

    Raises OSError, which is worth a retry unless it is a `StorageError`; UserError for an unknown protocol.
    """
    file = open_read(url, reading.storage, reading.checksums.get(url))
    if isinstance(file, io.BufferedReader):
        return io.BufferedReader(file.detach(), buffer_bytes)
    return file  # what is remote or verified brings its own blocks


def pack_rows(rows: Iterable[Row]) -> str:
    """As text: some 25 bytes for each indexed shard, 2 to 4 for another."""
    text = "\n".join(f"{name}\t{digits}\t{count}" for name, digits, count in rows)
    return base64.b64encode(zlib.compress(text.encode("utf-8", "surrogateescape"), 9)).decode()


def unpack_rows(packed: str) -> list[Row]:
    text = zlib.decompress(base64.b64decode(packed)).decode("utf-8", "surrogateescape")
    rows = (line.rsplit("\t", 2) for line in text.split("\n"))
    return [(redact(name), digits, int(count)) for name, digits, count in rows]


def changes(then: Sequence[Row], now: Sequence[Row]) -> str:
    """What has been added, removed, changed or reordered since; "" where nothing has, as far as indexes tell."""
    before, after = _digits_of(then), _digits_of(now)
    found = {
        "added": [name for name in after for _ in after[name][len(before[name]) :]],
        "removed": [name for name in [*before] for _ in before[name][len(after[name]) :]],
        "changed in content": [
            name
            for name in [*after]
            for a, b in zip(before[name], after[name], strict=False)
            if a and b and a != b
        ],
    }
    if not any(found.values()) and [row[0] for row in then] != [row[0] for row in now]:
        return "the same shards are in another order"
    return "; ".join(
        f"{len(names)} {kind} ({', '.join(names[:NAMES_SHOWN])}{', ...' * (len(names) > NAMES_SHOWN)})"
        for kind, names in found.items()
        if names
    )


def _digits_of(rows: Iterable[Row]) -> dict[str, list[str]]:
    """By name; [] of one that is not there."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, digits, _ in rows:
        found[name].append(digits)
    return found
