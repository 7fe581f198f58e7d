"""Writes samples as WebDataset shards, each of which appears whole or not at all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import webdataset


def write_shards(
    folder: str | os.PathLike[str],
    samples: Iterable[Mapping[str, Any]],
    per_shard: int,
    pattern: str = "{:05d}.tar",
) -> list[Path]:
    """Writes `samples` in order, `per_shard` to a file; the same samples give the same bytes.

    Args:
        samples: dicts of "__key__" (without dots: a key ends at the first one) and extension -> content;
            bytes stay as they are, the rest is encoded by webdataset according to its extension.
        pattern: the file's name, formatted with the shard's number.

    Returns:
        The shards' paths.

    Raises:
        ValueError: a key with a dot, or without content.
        OSError: from the disk.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    iterator = iter(samples)
    while group := list(itertools.islice(iterator, per_shard)):
        path = folder / pattern.format(len(paths))
        part = path.with_name(f".{path.name}.part")
        try:
            with part.open("wb") as file:
                # a fixed time, so that equal samples make equal shards
                with webdataset.TarWriter(file, mtime=0) as tar:
                    for sample in group:
                        tar.write(_checked(sample))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        paths.append(path)
    return paths


def _checked(sample: Mapping[str, Any]) -> dict[str, Any]:
    key = sample["__key__"]
    if not key or "." in key.rsplit("/", 1)[-1]:
        raise ValueError(f"sample key {key!r} must not be empty or hold a dot: readers end the key at the first one")
    if len(sample) < 2:
        raise ValueError(f"sample {key!r} has no content")
    return dict(sample)
