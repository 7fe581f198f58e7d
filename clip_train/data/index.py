"""The shard index: how many samples, how many bytes and which bytes each shard has.

`clip-train index` writes two files beside the shards: `sizes.json`, OpenCLIP's `{name: samples}`, and
`clip_train_index.json`, which adds the size, the sha256 and the sum of every block. With it an epoch's length is exact,
and no byte of a shard is used before its block has been verified.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clip_train.data.config import DataConfig
from clip_train.data.lanes import Counts
from clip_train.data.sources import expand
from clip_train.errors import UserError
from clip_train.storage import Checksums, StorageConfig, open_read

INDEX_NAME = "clip_train_index.json"  # MosaicML has taken index.json
SIZES_NAME = "sizes.json"
FORMAT = "clip-train index 1"
MARK_EVERY = 64  # usable samples
READS = 3  # of an index that does not fit its own sum: other bytes may come


@dataclass(frozen=True)
class ShardEntry:
    """What is known about one shard."""

    samples: int  # usable ones, as far as one sees without decoding
    unusable: int
    caption_key: str | None  # with which they were counted
    sha256: str  # of the whole file
    checksums: Checksums
    damage: str | None = None  # of the archive, as it was indexed
    # bytes: where it goes on behind MARK_EVERY, 2 MARK_EVERY, ... usable samples; as 8 bytes each, for every worker of
    # a run has all marks of all shards
    marks: array[int] = field(default_factory=lambda: array("Q"))

    def to_dict(self) -> dict[str, Any]:
        sums = self.checksums
        return {
            "samples": self.samples, "unusable": self.unusable, "caption_key": self.caption_key,
            "bytes": sums.size, "sha256": self.sha256, "block_bytes": sums.block_bytes, "blocks": sums.sums,
            "damage": self.damage, "marks": list(self.marks),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> ShardEntry:
        sums = Checksums(found["bytes"], found["block_bytes"], found["blocks"])
        marks = found["marks"]
        if len(marks) != found["samples"] // MARK_EVERY:
            raise ValueError(f"it has {len(marks)} marks for {found['samples']} samples")
        return cls(
            found["samples"], found["unusable"], found["caption_key"], found["sha256"], sums, found["damage"], marks
        )


@dataclass(frozen=True)
class ShardIndex:
    """The entries of a list of shards, as far as there are any."""

    shards: list[str]
    entries: Mapping[str, ShardEntry] = field(default_factory=dict)  # by path or URL

    @property
    def checksums(self) -> dict[str, Checksums]:
        return {shard: entry.checksums for shard, entry in self.entries.items()}

    @property
    def without(self) -> list[str]:
        """The shards that no index knows."""
        return [shard for shard in self.shards if shard not in self.entries]

    def counts(self, caption_key: str | None, shards: list[str] | None = None) -> Counts | None:
        """Of some of the shards, or all; None where they are not all counted, or by another caption."""
        entries = [self.entries.get(shard) for shard in (self.shards if shards is None else shards)]
        known = [entry for entry in entries if entry is not None and entry.caption_key == caption_key]
        if len(known) < len(entries) or not any(entry.samples for entry in known):
            return None
        return Counts(tuple(entry.samples for entry in known), tuple(entry.marks for entry in known), MARK_EVERY)

    def num_samples(self, caption_key: str | None) -> int | None:
        """Usable samples in one epoch; None where they are not all counted, or by another caption."""
        counts = self.counts(caption_key)
        return None if counts is None else sum(counts.samples)

    def describe(self, caption_key: str | None) -> str:
        """What it gives, or what is lost without it."""
        lost, number = self.without, self.num_samples(caption_key)
        if not lost:
            exact = "" if number is None else f", {number:,} samples in an epoch"
            return f"{len(self.shards)} shards, all indexed: every block is verified{exact}"
        return (
            f"{len(lost)} of {len(self.shards)} shards have no index (the first is {lost[0]}): bytes that were flipped "
            "inside an image or a caption cannot be seen, a shard that is whole but another one neither, and the "
            "length of an epoch is not known. `clip-train index` makes one"
        )


def index_of(config: DataConfig, storage: StorageConfig) -> ShardIndex:
    """The list of `data.train` with what is known about it. UserError as `expand` and `find_index` raise it."""
    shards = expand(config.train)
    return find_index(shards, storage) if config.verify == "auto" else ShardIndex(shards)


def find_index(shards: list[str], storage: StorageConfig) -> ShardIndex:
    """Reads the indexes beside the shards, where there is one.

    Raises:
        UserError: it is damaged, or it cannot be told whether there is one.
    """
    entries: dict[str, ShardEntry] = {}
    by_folder: dict[str, dict[str, str]] = {}
    for shard in shards:
        folder, name = split(shard)
        if "?" not in name:  # a signed link is of one file
            by_folder.setdefault(folder, {})[name] = shard
    for folder, names in by_folder.items():
        known = load(folder, storage)
        entries |= {shard: known[name] for name, shard in names.items() if name in known}
    return ShardIndex(shards, entries)


def load(folder: str, storage: StorageConfig) -> dict[str, ShardEntry]:
    """The entries of a folder's index by the shards' names; {} where there is none. UserError."""
    url = folder + INDEX_NAME
    for read in range(1, READS + 1):
        try:
            with open_read(url, storage) as file:
                return parse(file.read())
        except FileNotFoundError:
            return {}
        except OSError as e:
            raise UserError(
                f"it cannot be told whether there is an index, {url} ({type(e).__name__}: {e}); "
                "data.verify=off goes without"
            ) from e
        except (ValueError, LookupError, TypeError, OverflowError) as e:
            if read == READS:
                raise UserError(f"the index {url} is damaged ({e}); remove it, and run `clip-train index` again") from e
    raise AssertionError("unreachable")


def parse(data: bytes) -> dict[str, ShardEntry]:
    """ValueError, LookupError, TypeError or OverflowError for what is not a whole index."""
    found = json.loads(data, object_hook=_with_small_marks)
    if found["format"] != FORMAT:
        raise ValueError(f"its format is {found['format']}, not {FORMAT}")
    if found["sha256"] != _sum(found["shards"]):
        raise ValueError("it does not fit its own sha256")
    return {name: ShardEntry.from_dict(entry) for name, entry in found["shards"].items()}


def to_bytes(entries: Mapping[str, ShardEntry]) -> bytes:
    """An index file; the same entries give the same bytes."""
    shards = {name: entries[name].to_dict() for name in sorted(entries)}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in shards.items())
    text = f'{{"format": "{FORMAT}", "sha256": "{_sum(shards)}", "shards": {{\n{lines}\n}}}}\n'
    return text.encode()


def split(shard: str) -> tuple[str, str]:
    """(folder with its "/", name) of a path or URL."""
    folder, slash, name = shard.rpartition("/")
    return folder + slash, name


def _with_small_marks(found: dict[str, Any]) -> dict[str, Any]:
    """A shard's marks as they are kept, at once: as numbers of Python's own those of all shards are much larger."""
    marks = found.get("marks")
    return {**found, "marks": array("Q", marks)} if isinstance(marks, list) else found


def _sum(shards: Mapping[str, Any]) -> str:
    """The sha256 of their JSON, which is made of one after another."""
    sha256 = hashlib.sha256(b"{")
    for number, name in enumerate(sorted(shards)):
        entry = json.dumps(shards[name], sort_keys=True, default=list)
        sha256.update(f"{', ' if number else ''}{json.dumps(name)}: {entry}".encode())
    sha256.update(b"}")
    return sha256.hexdigest()
