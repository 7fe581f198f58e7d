"""The index of shards: the number of samples, the number of bytes, and checksums.

`clip-train index` writes `clip_train_index.json` beside the shards: samples, size, sha256, a
checksum of every block. Remote shards are verified by it while they are read. It may have columns,
values of each sample, by which `data.keep` chooses.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import mmap
import os
import pickle
import re
import secrets
import shlex
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from clip_train.data.index_columns import FILE_PATTERN, ColumnFile, places_in, read_column
from clip_train.data.keep import ExpressionError, Keep
from clip_train.data.shards import (
    Row,
    describe_changes,
    expand,
    split_name,
    split_sources,
    synthetic_size,
    unpack_rows,
)
from clip_train.errors import UserError, unreadable
from clip_train.processes import state_of
from clip_train.storage.blocks import Checksums
from clip_train.storage.config import StorageConfig
from clip_train.storage.redact import redact
from clip_train.storage.urls import open_read

INDEX_NAME = "clip_train_index.json"  # MosaicML has taken index.json
FORMAT = "clip-train index 2"
OFFSET_EVERY = 64  # samples
READS = 3  # of an index that seems damaged
DIGITS = 16  # of a shard's sha256, by which lists of shards are compared
# The key of a checkpoint's JSON that holds `order_start`: the step at which the order of data starts.
ORDER_START_KEY = "data_began"
# The groups of `_LINE` that are the entry's pairs of key and value, in the order of sorted keys.
SORTED_PAIRS = ("block_bytes", "blocks", "bytes", "damage", "offsets", "samples", "sha256")
# a shard's line of an index, as `to_bytes` writes it
_LINE = re.compile(
    rb' (?P<name>"(?:[^"\\]|\\.)*"): \{'
    rb'(?P<samples>"samples": (?P<num_samples>\d+)), '
    rb'(?P<bytes>"bytes": \d+), '
    rb'(?P<sha256>"sha256": "(?P<digits>\w+)"), '
    rb'(?P<block_bytes>"block_bytes": \d+), '
    rb'(?P<blocks>"blocks": "\w*"), '
    rb'(?P<damage>"damage": (?:(?P<no_damage>null)|"(?:[^"\\]|\\.)*")), '
    rb'(?P<offsets>"offsets": \[[\d, ]*\])'
    rb"\},?\n"
)


@dataclass(frozen=True)
class ShardEntry:
    """One shard in an index."""

    samples: int  # in the archive, usable or not
    sha256: str  # of the whole file
    checksums: Checksums
    # what is wrong with the archive, and where; the samples behind it cannot be read
    damage: str | None = None
    # where sample OFFSET_EVERY, 2 OFFSET_EVERY, ... begins, in bytes
    offsets: array[int] = field(default_factory=partial(array, "Q"))

    @property
    def places(self) -> int:
        """Places in an epoch: one for each sample, and one for damage, so that it is counted."""
        return self.samples + (self.damage is not None)


class KnownPlace(NamedTuple):
    """A sample of a shard at which reading can begin."""

    number: int  # of the sample, from 0
    offset: int  # bytes: where it begins


def known_place(entry: ShardEntry | None, number: int) -> KnownPlace:
    """The last sample up to `number` whose offset is in the index. Without an entry: the first
    sample."""
    offsets = entry.offsets if entry is not None else ()
    # offsets[i] belongs to sample (i + 1) OFFSET_EVERY; sample 0 begins at byte 0
    nearest = min(number // OFFSET_EVERY, len(offsets))
    return KnownPlace(nearest * OFFSET_EVERY, offsets[nearest - 1] if nearest else 0)


class IndexLine(NamedTuple):
    """A shard's line of an index, which is not parsed yet. Unpickling one gives its `ShardEntry`: a
    process needs only a few entries."""

    line: bytes
    places: int  # as `ShardEntry.places`
    sha256: str
    samples: int

    def __reduce__(self) -> tuple[Any, ...]:
        return entry_of, (self.line,)


def entry_of(line: bytes) -> ShardEntry:
    """The entry of one line of an index."""
    (row,) = json.loads(b"{%b}" % line.rstrip(b",\n")).values()
    return ShardEntry(
        samples=row["samples"],
        sha256=row["sha256"],
        checksums=Checksums(row["bytes"], row["block_bytes"], row["blocks"]),
        damage=row["damage"],
        offsets=array("Q", row["offsets"]),
    )


class FolderIndex(NamedTuple):
    """An index file."""

    lines: dict[str, IndexLine]  # by the shards' names
    columns: dict[str, ColumnFile]  # by name


class IndexedShard(NamedTuple):
    """A shard of a `ShardIndex`."""

    url: str
    entry: ShardEntry | None  # None: in no index
    # one bit for each of its samples, as `numpy.packbits`: whether `data.keep` keeps it; None: all
    kept: bytes | None = None


class Kept(NamedTuple):
    """The effect of `data.keep`."""

    text: str  # equal for recipes that keep the same samples of the same shards
    places: int  # in an epoch without it


@dataclass(frozen=True)
class KeptSamples:
    """The samples that `data.keep` keeps, by path or URL of their shard."""

    kept: Kept
    bits: dict[str, bytes]  # as in `IndexedShard`
    counts: dict[str, int]


class Address(NamedTuple):
    """Where other processes of this node and user find a `SharedList`."""

    path: str  # such as /proc/1234/fd/5
    name: str  # of the memory behind the path; no other memory has it


class SharedList:
    """Objects in memory that the processes of a node share. Each process maps it, and unpickles an
    object when it asks for it. A header is stored in addition to them.

    The memory has three parts:
    - the objects, and then the header: each pickled;
    - where each of these begins, and where the last one ends: uint64, in bytes;
    - the number of objects, the header included: one uint64.

    Pickled as a path under /proc: the process that pickles it must live until it is unpickled.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError where this process cannot open it, as in another container."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self._bytes = memoryview(mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ))
        (number,) = self._bytes[-8:].cast("Q")
        self._edges = self._bytes[-8 * (number + 2) : -8].cast("Q")

    @classmethod
    def of(cls, objects: Iterable[Any], header: Any) -> SharedList:
        with open(os.memfd_create(f"clip-train-index-{secrets.token_hex(8)}"), "wb") as file:
            edges = array("Q", [0])
            for item in itertools.chain(objects, [header]):
                file.write(pickle.dumps(item))
                edges.append(file.tell())
            number = len(edges) - 1
            edges.tofile(file)
            array("Q", [number]).tofile(file)
            file.flush()
            return cls(f"/proc/self/fd/{file.fileno()}")

    @property
    def address(self) -> Address:
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return Address(path, os.readlink(path))

    @property
    def header(self) -> Any:
        return self._unpickled(len(self))

    @classmethod
    def of_parent(cls, path: str) -> SharedList:
        """In a worker. If the process that has the memory was stopped before the worker had started,
        the worker ends too, without a traceback."""
        try:
            return cls(path)
        except FileNotFoundError:
            pid = int(path.split("/")[2])
            if state_of(pid) in ("", "Z"):
                raise SystemExit(1) from None
            raise

    def __reduce__(self) -> tuple[Callable[[str], SharedList], tuple[str]]:
        return SharedList.of_parent, (self.address.path,)

    def __len__(self) -> int:
        """Of the objects, without the header."""
        return len(self._edges) - 2

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self._unpickled(number)

    def _unpickled(self, number: int) -> Any:
        return pickle.loads(self._bytes[self._edges[number] : self._edges[number + 1]])


@dataclass(frozen=True)
class ShardIndex:
    """A list of shards, with the known facts about each, in their order."""

    shards: Sequence[str]
    # of each shard, as `ShardEntry.places`, or the number of samples that are kept; None: not
    # counted
    places: Sequence[int | None]
    digits: Sequence[str]  # the first DIGITS of the sha256 in an index; "": in no index
    sources: tuple[int, ...]  # shards of each source that `::` joins; (): there is one
    kept: Kept | None  # None: all samples
    # For other processes: an `IndexedShard` for each shard, and as header the fields above as `of`
    # found them.
    shared: SharedList

    @classmethod
    def of(
        cls,
        shards: Sequence[str],
        entries: Mapping[str, ShardEntry | IndexLine] | None = None,
        sources: tuple[int, ...] = (),
        keep: KeptSamples | None = None,
    ) -> ShardIndex:
        """entries: by path or URL."""
        places: list[int | None] = []
        digits: list[str] = []
        indexed: list[tuple[str, ShardEntry | IndexLine | None, bytes | None]] = []
        for shard in shards:
            entry = (entries or {}).get(shard)
            places.append(entry.places if entry else synthetic_size(shard))
            digits.append(entry.sha256[:DIGITS] if entry else "")
            bits = None
            if keep is not None:
                bits = keep.bits[shard]
                places[-1] = keep.counts[shard]
            indexed.append((shard, entry, bits))
        kept = keep.kept if keep is not None else None
        shared = SharedList.of(indexed, header=(shards, places, digits, sources, kept))
        return cls(shards, places, digits, sources, kept, shared)

    @classmethod
    def opened(cls, address: Address) -> ShardIndex:
        """The index that another process of this node has shared. Raises OSError if this process
        cannot open it."""
        shared = SharedList(address.path)
        # in another container, the path may lead to another file
        if shared.address.name != address.name:
            raise OSError(f"{address.path} is {shared.address.name}, not {address.name}")
        shards, places, digits, sources, kept = shared.header
        return cls(shards, places, digits, sources, kept, shared)

    def shard(self, number: int) -> IndexedShard:
        return IndexedShard(*self.shared[number])

    @property
    def unindexed(self) -> list[str]:
        """The shards that are in no index."""
        return [
            shard
            for shard, digits in zip(self.shards, self.digits, strict=True)
            if not digits and synthetic_size(shard) is None
        ]

    def with_places(self, counted: Mapping[str, int]) -> ShardIndex:
        """The same index with these numbers of places, by path or URL."""
        places = [
            counted.get(shard, known) for shard, known in zip(self.shards, self.places, strict=True)
        ]
        # `shared` keeps the old numbers in its header. Only `opened` reads that, and each node
        # opens an index before the shards without a number are counted.
        return replace(self, places=places)

    @property
    def num_samples(self) -> int | None:
        """Places in one epoch; None if not all shards are counted."""
        return None if None in self.places else sum(filter(None, self.places))

    def rows(self) -> list[Row]:
        """The facts of each shard that a checkpoint stores, once all are counted."""
        return [
            Row(redact(split_name(shard)[1]), digits, places or 0)
            for shard, digits, places in zip(self.shards, self.digits, self.places, strict=True)
        ]

    def fingerprint(self) -> str:
        """Differs between nodes that do not see the same shards, or keep other samples."""
        names = repr([*((row.name, row.digits) for row in self.rows()), self.kept])
        return hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()

    def describe(self) -> str:
        """A line for the log about the index, or about missing ones."""
        text = f"{len(self.shards)} shards, all indexed"
        if self.unindexed:
            text = (
                f"{len(self.unindexed)} of {len(self.shards)} shards have no index (the first is "
                f"{self.unindexed[0]}): flipped bytes and replaced shards go unseen; `clip-train "
                "index` makes one"
            )
        elif not any(self.digits):
            text = "synthetic: noise, without files"
        if self.num_samples is not None:
            text += f", {self.num_samples:,} samples in an epoch"
        if self.kept is not None:
            text += f", kept of {self.kept.places:,} by data.keep ({self.kept.text})"
        return text


def index_of(
    spec: str,
    verify: str,
    storage: StorageConfig,
    field: str = "data.train",
    keep: Keep | None = None,
) -> ShardIndex:
    """The shards that `spec` names, with the known facts about them. Raises UserError as `expand`
    and `look_up`."""
    return look_up(expand(spec, field), verify, storage, keep)


def look_up(
    sources: list[list[str]], verify: str, storage: StorageConfig, keep: Keep | None = None
) -> ShardIndex:
    """Read the indexes beside the shards of some sources. Shards with signed links have no index,
    because a signature is for one file only.

    Args:
        verify: as `data.verify`; "off" leaves indexes alone.
        keep: the samples that count and are read; None: all.

    Raises:
        UserError: an index is damaged, or cannot be read, or lacks what `keep` needs; or nothing is
            kept.
    """
    shards = [shard for source in sources for shard in source]
    entries: dict[str, IndexLine] = {}
    folders: dict[str, dict[str, str]] = {}  # by folder: the shards by name
    if verify == "auto":
        for shard in shards:
            folder, name = split_name(shard)
            if "?" not in name and synthetic_size(shard) is None:
                folders.setdefault(folder, {})[name] = shard
    indexes: dict[str, FolderIndex] = {}
    for folder, names in folders.items():
        indexes[folder] = load(folder, storage)
        lines = indexes[folder].lines
        entries |= {shard: lines[name] for name, shard in names.items() if name in lines}
    kept = None
    if keep is not None:
        unindexed = [shard for shard in shards if shard not in entries]
        if unindexed:
            raise UserError(
                f"{keep} needs an index with columns, and {len(unindexed)} of {len(shards)} shards "
                f"have no index (the first is {redact(unindexed[0])}); {_command(keep)}"
            )
        kept = _kept_samples(keep, folders, indexes, storage)
    return ShardIndex.of(shards, entries, tuple(map(len, sources)), kept)


def _command(keep: Keep) -> str:
    """The remedy for an index without the columns that `keep` needs."""
    names = ",".join(f"json.{name}" for name in keep.columns)
    places = shlex.join(map(redact, split_sources(keep.train)))
    return f"run `clip-train index {places} --columns {shlex.quote(names)}`"


class FolderColumns(NamedTuple):
    """Some columns of an index."""

    arrays: dict[str, Any]  # by the column's name: the values of all shards
    places: dict[str, dict[str, slice]]  # by the column's name, by shard: its part of the array

    @classmethod
    def read(
        cls, keep: Keep, folder: str, shards: Iterable[str], storage: StorageConfig, of: FolderIndex
    ) -> FolderColumns:
        """Those that `keep` needs. Raises UserError if one of these shards is not in one of them."""
        samples = {name: line.samples for name, line in of.lines.items()}
        found = cls({}, {})
        for name in keep.columns:
            if name not in of.columns:
                known = f"it has {', '.join(sorted(of.columns)) or 'no columns'}"
                for near in difflib.get_close_matches(name, of.columns, n=1):
                    known = f"did you mean {near}? {known}"
                raise UserError(
                    f"{keep}: the index {redact(folder)}{INDEX_NAME} has no column {name}; {known}. "
                    f"To add it, {_command(keep)}"
                )
            places = places_in(of.columns[name], samples)
            without = [shard for shard in shards if shard not in places]
            if without:
                raise UserError(
                    f"{keep}: {len(without)} shards in {redact(folder)} have no column {name} in the "
                    f"index (the first is {without[0]}); {_command(keep)}"
                )
            found.places[name] = places
            found.arrays[name] = read_column(folder, name, of.columns[name], storage)
        return found

    def of_shard(self, shard: str) -> dict[str, Any]:
        return {name: values[self.places[name][shard]] for name, values in self.arrays.items()}

    def ranges(self) -> Iterator[str]:
        """The range of each column of numbers, for a message."""
        for name, values in self.arrays.items():
            if values.dtype.kind in "if":
                known = values[~np.isnan(values)]
                if len(known):
                    yield f"{name} is from {known.min():g} to {known.max():g}"


def _kept_samples(
    keep: Keep,
    folders: Mapping[str, Mapping[str, str]],
    indexes: Mapping[str, FolderIndex],
    storage: StorageConfig,
) -> KeptSamples:
    """The samples that `keep` keeps.

    folders: by folder: paths or URLs of the shards by name. indexes: by folder; of all shards.
    """
    condition = keep.load(storage)
    bits: dict[str, bytes] = {}
    counts: dict[str, int] = {}
    places = 0
    ranges: list[str] = []
    for folder, shards in folders.items():
        columns = FolderColumns.read(keep, folder, shards, storage, indexes[folder])
        for name, shard in shards.items():
            try:
                mask = condition.mask(columns.of_shard(name))
            except ExpressionError as e:
                raise UserError(f"{keep}: {e}; correct it") from None
            bits[shard] = np.packbits(mask).tobytes()
            counts[shard] = int(np.count_nonzero(mask))
            places += indexes[folder].lines[name].places
        if not any(counts.values()):
            ranges += columns.ranges()
    if not any(counts.values()):
        remedy = "correct it, or set data.keep=null"
        raise UserError(
            f"{keep} keeps none of the {places:,} samples of data.train; "
            + "; ".join([*ranges, remedy])
        )
    return KeptSamples(Kept(condition.identity, places), bits, counts)


@dataclass(frozen=True)
class ResumedData:
    """The data of a resumed run."""

    index: ShardIndex  # with the places that the order was made of
    order_start: int  # the step at which the order of data starts
    notice: str = ""  # the changes for which it starts over at this step; "": none


def resume_data(
    state: Mapping[str, Any],
    index: ShardIndex,
    keys: Mapping[str, Any],
    *,
    allow_changed_shards: bool,
    allow_changed_order: bool,
) -> ResumedData:
    """The data of a run that resumes from a checkpoint. It continues at the same position, or
    starts over if something changed and the change is allowed.

    Args:
        state: the checkpoint's, with `TrainLoader.state` in it.
        index: of `data.train` now; need not be counted.
        keys: `order_keys` of the recipe now.
        allow_changed_shards: start over if the list of shards has changed, rather than raise.
        allow_changed_order: the same for any change, of `keys` or of the list.

    Raises:
        UserError: a change that is not allowed, with the old and the new value.
    """
    rows = unpack_rows(state["shards"])
    saved_keys = state["order"]
    notices = [
        f"{key} was {saved_keys.get(key)}, is {value}"
        for key, value in keys.items()
        if saved_keys.get(key) != value
    ]
    if notices and not allow_changed_order:
        raise UserError(
            f"the data order differs from the checkpoint's: {'; '.join(notices)}. Restore "
            "it, or set checkpoint.allow_changed_recipe=true to continue with the weights and "
            "begin the data anew"
        )
    shard_changes = describe_changes(rows, index.rows())
    if shard_changes and not (allow_changed_shards or allow_changed_order):
        raise UserError(
            "data.train is not the list of shards that the checkpoint was written with: "
            f"{shard_changes}. Restore it, or set data.allow_changed_shards=true to begin the "
            "first epoch of the new one"
        )
    if shard_changes:
        notices.append(f"data.train: {shard_changes}")
    if notices:
        return ResumedData(index, state["step"], "; ".join(notices))
    places = {shard: row.places for shard, row in zip(index.shards, rows, strict=True)}
    return ResumedData(index.with_places(places), state[ORDER_START_KEY])


def load(folder: str, storage: StorageConfig) -> FolderIndex:
    """A folder's index; an empty one if there is none. Raises UserError."""
    url = folder + INDEX_NAME
    damage: Exception | None = None
    for _ in range(READS):  # bits may flip in transit
        try:
            with open_read(url, storage) as file:
                data = file.read()
            return FolderIndex(parse(data), columns_in(data))
        except FileNotFoundError:
            return FolderIndex({}, {})
        except UserError:  # an unknown protocol; a UserError is a ValueError, which means damage
            raise
        except OSError as e:
            message = f"cannot look for an index of the shards, {url}: {type(e).__name__}: {e}"
            raise unreadable(e, f"{message}; data.verify=off trains without one") from e
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as e:
            damage = e
    raise UserError(
        f"the index {url} is damaged ({damage}); remove it, and run `clip-train index` again"
    ) from damage


def parse(data: bytes) -> dict[str, IndexLine]:
    """The lines of an index by the shards' names.

    They are not parsed as JSON, which would take four times as long. Raises ValueError, LookupError
    or TypeError for anything but a whole index as `to_bytes` writes it.
    """
    lines = data.splitlines(keepends=True)
    content = json.loads(lines[0] + lines[-1])
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']}, not {FORMAT}")
    known: dict[str, IndexLine] = {}
    digest = hashlib.sha256(b"{")  # of the JSON with sorted keys
    for line in filter(bytes.strip, lines[1:-1]):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"a line begins with {line[:40]!r}")
        pairs = b", ".join(match.group(*SORTED_PAIRS))
        separator = b", " if known else b""
        digest.update(b"%b%b: {%b}" % (separator, match["name"], pairs))
        # damage has a place of its own
        samples = int(match["num_samples"])
        places = samples + (match["no_damage"] is None)
        name = json.loads(match["name"])
        known[name] = IndexLine(match[0], places, match["digits"].decode(), samples)
    digest.update(b"}")
    if content["sha256"] != digest.hexdigest():
        raise ValueError("it does not fit its own sha256")
    return known


def columns_in(data: bytes) -> dict[str, ColumnFile]:
    """The columns of an index file, by name; {} for one of an earlier version. Raises as `parse`."""
    lines = data.splitlines(keepends=True)
    rows = json.loads(lines[0] + lines[-1]).get("columns", {})
    columns = {}
    for name, row in rows.items():
        # an index from somebody else must not lead to other files
        if FILE_PATTERN.fullmatch(row["file"]) is None:
            raise ValueError(f"the file of its column {name} is {row['file']!r}")
        columns[name] = ColumnFile(row["file"], row["sha256"], tuple(row["without"]))
    return columns


def to_bytes(
    entries: Mapping[str, ShardEntry], columns: Mapping[str, ColumnFile] | None = None
) -> bytes:
    """An index file; the same entries and columns give the same bytes. Earlier versions ignore the
    columns."""
    shards = {}
    for name, entry in sorted(entries.items()):
        checksums = entry.checksums
        shards[name] = {
            "samples": entry.samples,
            "bytes": checksums.size,
            "sha256": entry.sha256,
            "block_bytes": checksums.block_bytes,
            "blocks": checksums.sums,
            "damage": entry.damage,
            "offsets": list(entry.offsets),
        }
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in shards.items())
    digest = hashlib.sha256(json.dumps(shards, sort_keys=True).encode()).hexdigest()
    head = f'"format": "{FORMAT}", "sha256": "{digest}"'
    if columns:
        files = {
            name: {"file": column.file, "sha256": column.sha256, "without": column.without}
            for name, column in sorted(columns.items())
        }
        head += f', "columns": {json.dumps(files)}'
    return f'{{{head}, "shards": {{\n{rows}\n}}}}\n'.encode()
