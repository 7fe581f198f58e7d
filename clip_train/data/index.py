"""What is known about shards: how many samples, how many bytes and which bytes each one has.

`clip-train index` writes two files beside the shards: `sizes.json`, OpenCLIP's `{name: samples}`, and
`clip_train_index.json`, which adds the size, the sha256 and a checksum of every block: with it no byte of a shard is
used before its block has been verified. Counts also come from another's `sizes.json` and img2dataset's `*_stats.json`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from clip_train.data.shards import Row, changes, expand, split_name, synthetic_size, unpack_rows
from clip_train.errors import UserError, unreadable
from clip_train.storage.blocks import Checksums
from clip_train.storage.config import StorageConfig
from clip_train.storage.redact import redact
from clip_train.storage.urls import open_read

INDEX_NAME = "clip_train_index.json"  # MosaicML has taken index.json
SIZES_NAME = "sizes.json"
STATS_SUFFIX = "_stats.json"  # img2dataset's, in place of .tar
FORMAT = "clip-train index 2"
FORMAT_1 = "clip-train index 1"  # counted samples with an image and a caption apart from the others
OFFSET_EVERY = 64  # samples
READS = 3  # of an index that does not fit its own sum: other bytes may come
THREADS = 16  # for many small files


@dataclass(frozen=True)
class ShardEntry:
    """One shard in an index."""

    samples: int  # in the archive, usable or not
    sha256: str  # of the whole file
    checksums: Checksums
    damage: str | None = None  # of the archive, as it was indexed: what follows is lost
    # bytes: where sample OFFSET_EVERY, 2 OFFSET_EVERY, ... begins; 8 bytes each: every worker of a run has all
    # of all shards
    offsets: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def count(self) -> int:
        """Places in an epoch: damage has one of its own, so that it is met and counted."""
        return self.samples + (self.damage is not None)

    def to_dict(self) -> dict[str, Any]:
        sums = self.checksums
        return {
            "samples": self.samples, "bytes": sums.size, "sha256": self.sha256, "block_bytes": sums.block_bytes,
            "blocks": sums.sums, "damage": self.damage, "offsets": list(self.offsets),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> ShardEntry:
        sums = Checksums(found["bytes"], found["block_bytes"], found["blocks"])
        samples, offsets = found["samples"], array("Q", found["offsets"])
        if len(offsets) != samples // OFFSET_EVERY:
            raise ValueError(f"it has {len(offsets)} offsets for {samples} samples")
        if found.get(
            "unusable"
        ):  # of FORMAT_1: not counted above, so the offsets are not of these numbers
            samples, offsets = samples + found["unusable"], array("Q")
        return cls(samples, found["sha256"], sums, found["damage"], offsets)


@dataclass(frozen=True)
class ShardIndex:
    """A list of shards with what is known about each."""

    shards: list[str]
    entries: Mapping[str, ShardEntry] = field(default_factory=dict)  # by path or URL
    sizes: Mapping[str, int] = field(
        default_factory=dict
    )  # samples by path or URL; go before the entries'
    sources: tuple[int, ...] = ()  # shards of each of those that `::` joins; (): they are one

    @property
    def checksums(self) -> dict[str, Checksums]:
        return {shard: entry.checksums for shard, entry in self.entries.items()}

    @property
    def without(self) -> list[str]:
        """The shards of which no index knows."""
        return [
            shard
            for shard in self.shards
            if shard not in self.entries and synthetic_size(shard) is None
        ]

    @property
    def uncounted(self) -> list[str]:
        """The shards whose number of samples is not known, once each."""
        return [shard for shard in dict.fromkeys(self.shards) if self.count(shard) is None]

    def count(self, shard: str) -> int | None:
        """Samples in a shard, None where it is not known."""
        entry = self.entries.get(shard)
        return self.sizes.get(shard, entry.count if entry else synthetic_size(shard))

    def by_source(self) -> list[list[str]]:
        ends = [*itertools.accumulate(self.sources or (len(self.shards),), initial=0)]
        return [self.shards[start:stop] for start, stop in itertools.pairwise(ends)]

    def with_sizes(self, sizes: Mapping[str, int]) -> ShardIndex:
        return replace(self, sizes={**self.sizes, **sizes})

    @property
    def num_samples(self) -> int | None:
        """Samples in one epoch; None where not all shards are counted."""
        counts = [self.count(shard) for shard in self.shards]
        return None if None in counts else sum(filter(None, counts))

    def rows(self) -> list[Row]:
        """What a checkpoint keeps of each shard, once all are counted."""
        digits = {shard: entry.sha256[:16] for shard, entry in self.entries.items()}
        return [
            (redact(split_name(shard)[1]), digits.get(shard, ""), self.count(shard) or 0)
            for shard in self.shards
        ]

    def fingerprint(self) -> str:
        """Differs between nodes that do not see the same shards."""
        names = repr([row[:2] for row in self.rows()])
        return hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()

    def describe(self) -> str:
        """What it gives, or what is lost without it."""
        lost, number = self.without, self.num_samples
        text = f"{len(self.shards)} shards, all indexed: every block is verified"
        if not any(shard in self.entries for shard in self.shards):
            text = "synthetic: noise, of no file"
        if lost:
            text = (
                f"{len(lost)} of {len(self.shards)} shards have no index (the first is {lost[0]}): flipped bytes in "
                "images and captions go unseen, and so does a shard that was replaced; `clip-train index` makes one"
            )
        return text + ("" if number is None else f", {number:,} samples in an epoch")


def index_of(
    spec: str, verify: str, storage: StorageConfig, field: str = "data.train"
) -> ShardIndex:
    """The shards that `spec` names with what is known about them. UserError as `expand` and `look_up` raise it."""
    return look_up(expand(spec, field), verify, storage)


def look_up(sources: list[list[str]], verify: str, storage: StorageConfig) -> ShardIndex:
    """Reads what lies beside the shards of some sources.

    Args:
        verify: as `data.verify`; "off" leaves indexes alone.

    Raises:
        UserError: an index is damaged, or whether there is one cannot be found out.
    """
    shards = [shard for source in sources for shard in source]
    entries: dict[str, ShardEntry] = {}
    folders = by_folder(shards) if verify == "auto" else {}
    for folder, names in folders.items():
        known = load(folder, storage)
        entries |= {shard: known[name] for name, shard in names.items() if name in known}
    found = ShardIndex(shards, entries, sources=tuple(map(len, sources)))
    return found.with_sizes(find_sizes(found.uncounted, storage))


@dataclass(frozen=True)
class ResumedData:
    """Where the data goes on."""

    index: ShardIndex  # with the counts that the order was made of
    began: int  # step
    notice: str = ""  # why it begins anew


def resume_data(
    state: Mapping[str, Any],
    index: ShardIndex,
    keys: Mapping[str, Any],
    *,
    changed_shards: bool,
    changed_order: bool,
) -> ResumedData:
    """The data of a run that goes on from a checkpoint: at the same position, or anew where a change is allowed.

    Args:
        state: the checkpoint's, with `TrainLoader.state` in it.
        index: of `data.train` now; need not be counted.
        keys: `order_keys` of the recipe now.
        changed_shards: the list of shards may have changed.
        changed_order: anything else may have changed as well.

    Raises:
        UserError: a change that is not allowed, with what was and is.
    """
    rows, then = unpack_rows(state["shards"]), state["order"]
    others = [
        f"{key} was {then.get(key)}, is {now}" for key, now in keys.items() if then.get(key) != now
    ]
    shards = changes(rows, index.rows())
    if others and not changed_order:
        raise UserError(
            f"the order of the data is not that of the checkpoint: {'; '.join(others)}. Restore it, or set "
            "checkpoint.allow_changed_recipe=true to go on with the weights and begin the data anew"
        )
    if shards and not (changed_shards or changed_order):
        raise UserError(
            f"data.train is not the list of shards that the checkpoint was written with: {shards}. Restore it, or set "
            "data.allow_changed_shards=true to begin the first epoch of the new one"
        )
    if shards or others:
        return ResumedData(
            index,
            state["step"],
            "; ".join([*others, *([f"data.train: {shards}"] if shards else [])]),
        )
    sizes = {shard: count for shard, (_, _, count) in zip(index.shards, rows, strict=True)}
    return ResumedData(index.with_sizes(sizes), state["data_began"])


def find_sizes(shards: list[str], storage: StorageConfig) -> dict[str, int]:
    """Samples by path or URL, of those whose folder has a sizes.json, or img2dataset's file beside each shard."""

    def written(shard: str) -> int | None:
        return load_counts(shard.removesuffix(".tar") + STATS_SUFFIX, storage).get("successes")

    found: dict[str, int] = {}
    for folder, names in by_folder(shards).items():
        sizes = load_counts(folder + SIZES_NAME, storage)
        found |= {shard: sizes[name] for name, shard in names.items() if name in sizes}
        rest = [shard for shard in names.values() if shard not in found]
        if rest and written(rest[0]) is not None:
            with ThreadPoolExecutor(THREADS) as pool:
                counts = zip(rest, pool.map(written, rest), strict=True)
                found |= {shard: count for shard, count in counts if count is not None}
    return found


def load_counts(url: str, storage: StorageConfig) -> dict[str, int]:
    """Those in a JSON object, another's sizes.json perhaps; {} where there is none: what would be in it is counted."""
    try:
        with open_read(url, storage) as file:
            found = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    found = found if isinstance(found, dict) else {}
    return {name: count for name, count in found.items() if type(count) is int and count >= 0}


def by_folder(shards: list[str]) -> dict[str, dict[str, str]]:
    """Folder -> name -> shard. A signed link is of one file, so its folder cannot be asked; noise has none."""
    found: dict[str, dict[str, str]] = {}
    for shard in shards:
        folder, name = split_name(shard)
        if "?" not in name and synthetic_size(shard) is None:
            found.setdefault(folder, {})[name] = shard
    return found


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
            message = f"cannot look for an index of the shards, {url}: {type(e).__name__}: {e}"
            raise unreadable(e, f"{message}; data.verify=off trains without one") from e
        except (ValueError, LookupError, TypeError, OverflowError) as e:
            if read == READS:
                raise UserError(
                    f"the index {url} is damaged ({e}); remove it, and run `clip-train index` again"
                ) from e
    raise AssertionError("unreachable")


def parse(data: bytes) -> dict[str, ShardEntry]:
    """ValueError, LookupError, TypeError or OverflowError for what is not a whole index."""
    found = json.loads(data)
    if found["format"] not in (FORMAT, FORMAT_1):
        raise ValueError(f"its format is {found['format']}, not {FORMAT}")
    if found["sha256"] != _sum(found["shards"]):
        raise ValueError("it does not fit its own sha256")
    return {name: ShardEntry.from_dict(entry) for name, entry in found["shards"].items()}


def to_bytes(entries: Mapping[str, ShardEntry]) -> bytes:
    """An index file; the same entries give the same bytes."""
    shards = {name: entries[name].to_dict() for name in sorted(entries)}
    lines = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in shards.items()
    )
    text = f'{{"format": "{FORMAT}", "sha256": "{_sum(shards)}", "shards": {{\n{lines}\n}}}}\n'
    return text.encode()


def _sum(shards: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(shards, sort_keys=True).encode()).hexdigest()
