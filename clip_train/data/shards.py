"""Locate shards: from `data.train` to a list of paths or URLs. No other module lists or opens them.

A checkpoint stores `pack_rows` of that list, so a resumed run notices changes.
"""

import base64
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from braceexpand import braceexpand

from clip_train.data.benchmark import benchmark_shards
from clip_train.errors import UserError, missing, raise_all, unreadable
from clip_train.places import split_places
from clip_train.storage.blocks import BlockCache, Checksums
from clip_train.storage.config import StorageConfig
from clip_train.storage.redact import REMOVED, WAS_REDACTED, redact
from clip_train.storage.urls import expand_glob, is_remote, local_path, open_read

TABLES = (".csv", ".tsv", ".parquet", ".json", ".jsonl")
NAMES_SHOWN = 5
SYNTHETIC = "synthetic://"  # and a number of samples: noise (`data.images`) instead of a file


class Row(NamedTuple):
    """The facts of a shard that a checkpoint stores."""

    name: str  # without its folder, which may move
    digits: str  # the first 16 of its sha256; "": it is in no index
    places: int  # as `ShardEntry.places`


def split_sources(spec: str) -> list[str]:
    """The sources that `::` joins, each with its braces and globs."""
    return [part.strip() for part in split_places(spec)]


def expand_braces(spec: str, field: str = "data.train") -> list[list[str]]:
    """`spec` (braces, globs, sources joined by `::`) -> each source's paths, URLs and patterns;
    lists nothing.

    Raises:
        UserError: a `pipe:` URL, a table instead of shards, an empty part, or braces that do not
            close.
    """
    sources: list[list[str]] = []
    for part in split_sources(spec):
        mistakes = []
        if part.startswith("pipe:"):
            mistakes.append(
                f"{field} ({part}): `pipe:` runs a shell command, whose failure looks like the end "
                "of the data; give a path or a URL instead, such as s3://bucket/{00000..00099}.tar"
            )
        if part.lower().endswith(TABLES):
            mistakes.append(
                f"{field} ({part}) is a table, not shards: `clip-train shards {part} OUT` makes "
                f"them of files, `img2dataset --url_list {part} --output_format webdataset` of "
                "URLs; then give 'OUT/{00000..00099}.tar'"
            )
        if WAS_REDACTED.search(part) is not None:
            mistakes.append(f"{field} ({part}): {REMOVED}, as {field}=<URL>")
        if not part:
            mistakes.append(
                f"{field} ({spec}) has an empty part: give a path, or remove the extra `::`"
            )
        raise_all(mistakes)
        try:
            sources.append(list(braceexpand(part)))
        except ValueError as e:
            raise UserError(f"{field} ({part}): the braces do not balance ({e})") from e
    return sources


def expand(spec: str, field: str = "data.train") -> list[list[str]]:
    """`spec` -> the paths or URLs of each source's shards, in an order that does not depend on who
    lists them. The folder of a clip_benchmark set is its shards.

    Raises:
        UserError: as `expand_braces`, or a pattern that matches nothing.
    """
    sources: list[list[str]] = []
    for patterns in expand_braces(spec, field):
        shards: list[str] = []
        for pattern in patterns:
            try:
                of_set = None if pattern.startswith(SYNTHETIC) else benchmark_shards(pattern)
                shards += of_set or expand_glob(pattern)
            except UserError as e:
                # `missing` says if the folder in front of the wildcards does not exist
                folder = ""
                if not is_remote(pattern):
                    folder = re.split(r"[*?\[]", local_path(pattern).as_posix())[0]
                what = f"{field} ({pattern}) matches no shard, seen from {os.getcwd()}"
                raise missing(folder, what, str(e)) from e
            except OSError as e:
                raise unreadable(e, _not_listed(field, pattern, e)) from e
            except ImportError as e:
                raise UserError(_not_listed(field, pattern, e)) from e
        sources.append(shards)
    return sources


def _not_listed(field: str, pattern: str, error: Exception) -> str:
    return f"{field} ({pattern}) cannot be listed ({type(error).__name__}: {error})"


def synthetic_size(shard: str) -> int | None:
    """Samples of `synthetic://N`; None for a shard that is a file."""
    number = shard.removeprefix(SYNTHETIC)
    return int(number) if number != shard and number.isdecimal() else None


def split_name(shard: str) -> tuple[str, str]:
    """(folder with its "/", name) of a path or URL."""
    folder, slash, name = shard.rpartition("/")
    return folder + slash, name


@dataclass(frozen=True)
class Reading:
    """How a remote shard is read: how patiently, its checksums if it is indexed, and the cache that
    it shares with other workers."""

    storage: StorageConfig = field(default_factory=StorageConfig)
    checksums: Checksums | None = None
    cache: BlockCache | None = None


PLAIN = Reading()


def open_shard(url: str, reading: Reading = PLAIN) -> BinaryIO:
    """A seekable binary file. Each block of a remote shard is verified if the shard is indexed.

    Raises:
        OSError: it is worth a retry unless it is a `StorageError`.
        UserError: an unknown protocol.
    """
    return open_read(url, reading.storage, reading.checksums, reading.cache)


def pack_rows(rows: Iterable[Row]) -> str:
    """The rows as text: about 25 bytes for a shard with an index, 2 to 4 for one without."""
    text = "\n".join(f"{row.name}\t{row.digits}\t{row.places}" for row in rows)
    return base64.b64encode(zlib.compress(text.encode("utf-8", "surrogateescape"), 9)).decode()


def unpack_rows(packed: str) -> list[Row]:
    text = zlib.decompress(base64.b64decode(packed)).decode("utf-8", "surrogateescape")
    rows = []
    for line in text.split("\n"):
        name, digits, places = line.rsplit("\t", 2)
        rows.append(Row(redact(name), digits, int(places)))
    return rows


def describe_changes(old: Sequence[Row], new: Sequence[Row]) -> str:
    """The shards that were added, removed, changed or reordered; "" for none. A changed content is
    known only if both lists have an index."""
    old_names, new_names = [row.name for row in old], [row.name for row in new]
    old_digits = {row.name: row.digits for row in old}
    kinds = {
        "added": Counter(new_names) - Counter(old_names),
        "removed": Counter(old_names) - Counter(new_names),
        "changed in content": Counter(
            row.name
            for row in new
            if row.digits and old_digits.get(row.name, "") not in ("", row.digits)
        ),
    }
    lines = []
    for kind, names in kinds.items():
        if names:
            listed = ", ".join(list(names.elements())[:NAMES_SHOWN])
            if names.total() > NAMES_SHOWN:
                listed += ", ..."
            lines.append(f"{names.total()} {kind} ({listed})")
    if not lines and old_names != new_names:
        return "the same shards are in another order"
    return "; ".join(lines)
