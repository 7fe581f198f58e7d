"""Where shards are: the one module that lists and opens them, through `clip_train.storage`."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from braceexpand import braceexpand

from clip_train.errors import UserError
from clip_train.storage import Checksums, StorageConfig, expand_glob, is_remote, local_path, open_read

BUFFER_BYTES = 1 << 18  # of a local file: tar headers are 512 bytes, each would be a system call


def split(spec: str) -> list[str]:
    """The sources that `::` joins, each with its braces and globs."""
    return [part.strip() for part in spec.split("::")]


def expand(spec: str, field: str = "data.train") -> list[str]:
    """`spec` (braces, globs, parts joined by `::`) -> shard paths or URLs, in an order all ranks agree on.

    Raises:
        UserError: a `pipe:` URL, braces that do not close, or a pattern that matches nothing.
    """
    shards: list[str] = []
    for part in split(spec):
        if part.startswith("pipe:"):
            raise UserError(
                f"{field} ({part}): `pipe:` runs a shell command, whose failure looks like the end of "
                "the data; give a path or a URL instead, such as s3://bucket/{00000..00099}.tar"
            )
        try:
            patterns = list(braceexpand(part)) if part else []
        except ValueError as e:
            raise UserError(f"{field} ({part}): the braces do not balance ({e})") from e
        if not patterns:
            raise UserError(f"{field} ({spec}) has an empty part: give a path, or remove the extra `::`")
        for pattern in patterns:
            try:
                shards += expand_glob(pattern)
            except UserError as e:
                raise UserError(f"{field} ({part}) matches no shard, seen from {os.getcwd()}: {e}") from e
            except (OSError, ImportError) as e:
                raise UserError(f"{field} ({part}) cannot be listed ({type(e).__name__}: {e})") from e
    return shards


@dataclass(frozen=True)
class Reading:
    """How shards are opened: how patiently, and what their bytes are held against."""

    storage: StorageConfig = field(default_factory=StorageConfig)
    checksums: Mapping[str, Checksums] = field(default_factory=dict)  # by path or URL; of the indexed ones


PLAIN = Reading()


def open_shard(url: str, reading: Reading = PLAIN) -> BinaryIO:
    """A seekable binary file, each block of which is verified where the shard is indexed.

    Raises OSError, which is worth a retry unless it is a `ReadError`; UserError for an unknown protocol.
    """
    file = open_read(url, reading.storage, reading.checksums.get(url))
    if isinstance(file, io.BufferedReader):
        return io.BufferedReader(file.detach(), BUFFER_BYTES)
    return file  # what is remote or verified brings its own blocks


def missing_files(shards: list[str]) -> list[str]:
    """The local shards that are not there; remote ones show when they are opened."""
    return [shard for shard in shards if not is_remote(shard) and not os.path.isfile(local_path(shard))]
