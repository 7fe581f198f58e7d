"""Names and small files of a checkpoint. Does not touch a disk, and does not import torch.

    lease/e000007.json                   who writes with epoch 7: put if absent
    ckpt/s0000001200/e000007-1/          one attempt
        rank00000.safetensors            one rank's fragments, and its random state
        _rank00000.json                  that rank's manifest: its file's checksums and fragments
        _LAYOUT.bin                      which fragment is where, in the files of all ranks
        _MANIFEST.json                   all ranks' files, and the trainer's state
    commit/e000007-s0000001200.json      written last: it makes the checkpoint exist
    tmp/ckpt/...                         an attempt fetched for a resume, kept until the next save

The folder of an attempt is named by its step, the writer's epoch and the number of the snapshot in
that process. Every process takes the next epoch before it writes. A writer whose epoch is no longer
the highest may not commit. The newest checkpoint has the highest (epoch, step).
"""

import hashlib
import json
import re
import zlib
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

FORMAT_VERSION = 3  # 1 and 2 were clip-train 0.1's
BLOCK_BYTES = 16 << 20  # the unit of fetching and verification

LEASE_NAME = re.compile(r"lease/e(\d{6,})\.json")
_COMMIT_NAME = re.compile(r"commit/e(\d{6,})-s(\d{10,})\.json")
_PREFIX = re.compile(r"ckpt/s(\d{10,})/e(\d{6,})-[0-9a-f]+")

MANIFEST = "_MANIFEST.json"
LAYOUT = "_LAYOUT.bin"
FETCHED = "tmp/"  # before an attempt's folder
Natural = Annotated[int, Field(strict=True, ge=0)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]  # in its own folder

# -- names


class CommitRef(NamedTuple):
    """A commit marker by its name; they sort by age."""

    epoch: int
    step: int

    @property
    def name(self) -> str:
        return f"commit/e{self.epoch:06d}-s{self.step:010d}.json"

    @classmethod
    def parse(cls, name: str) -> "CommitRef | None":
        """None for the name of another file."""
        match = _COMMIT_NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None


def attempt_prefix(epoch: int, step: int, number: int = 1) -> str:
    """The folder of the `number`th snapshot of one process."""
    return f"ckpt/s{step:010d}/e{epoch:06d}-{number}"


def parse_prefix(prefix: str) -> CommitRef | None:
    """Which commit an attempt's folder is meant for; None for another folder."""
    match = _PREFIX.fullmatch(prefix)
    return CommitRef(int(match[2]), int(match[1])) if match else None


def lease_name(epoch: int) -> str:
    return f"lease/e{epoch:06d}.json"


def rank_manifest_name(prefix: str, rank: int) -> str:
    return f"{prefix}/_rank{rank:05d}.json"


# -- names of tensors in a rank's file: "slot|start|name" for fragments, "@rank|name" for tensors of
# this rank only, "@shared|name" (in rank 0's file) for tensors that are equal on all ranks

RANK_KEY = "@rank|"
SHARED_KEY = "@shared|"

# -- small files


def add_checksum(body: dict[str, Any]) -> bytes:
    """JSON with its own sha256: a reader notices a bit that flipped in transit and reads again."""
    # as the reader parses it, where all keys are text
    body = json.loads(json.dumps({**body, "format": FORMAT_VERSION}))
    return json.dumps({**body, "sha256": sha256_of(_canonical(body))}, sort_keys=True).encode()


def parse_checked(data: bytes) -> dict[str, Any]:
    """The inverse of `add_checksum`. ValueError for anything else; FormatError for another
    version's.
    """
    body = json.loads(data)  # JSONDecodeError and UnicodeDecodeError are ValueErrors
    if not isinstance(body, dict):
        raise ValueError("not a JSON object")
    digest = body.pop("sha256", None)
    if digest is None:
        digest = body.pop("seal", None)  # the key of format 2
    if digest is None and body.get("format") == FORMAT_VERSION:  # format 1 has none
        raise ValueError("it has no sha256")
    if digest is not None and digest != sha256_of(_canonical(body)):
        raise ValueError("its sha256 does not match")
    # Only now: a flipped bit in "format" must not pass for another version.
    return check_format(body)


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def verified(data: bytes, sha256: str) -> bytes:
    """ValueError for data without this sha256."""
    if sha256_of(data) != sha256:
        raise ValueError("its sha256 does not match")
    return data


class FormatError(Exception):
    """Written by another version of clip-train. The file is not damaged, so it must not be
    skipped."""


def check_format(body: Any) -> dict[str, Any]:
    """The content of a small file. ValueError for anything else; FormatError."""
    version = body.get("format") if isinstance(body, dict) else None
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"format {version!r}")
    remedy = (
        "continue with the clip-train that wrote it, or export its weights there (clip-train "
        "export) and start from them in another run.dir and checkpoint.remote "
        "(model.init_from=<the export>)"
    )
    if version > FORMAT_VERSION:
        remedy = (
            "update clip-train, or name an older checkpoint in another run "
            "(checkpoint.resume=<its commit/*.json>)"
        )
    if version != FORMAT_VERSION:
        raise FormatError(
            f"format {version}, and this clip-train reads format {FORMAT_VERSION}: {remedy}"
        )
    return body


class FileBlock(NamedTuple):
    """The unit of verification and fetching."""

    file: int  # its place in the manifest
    name: str
    start: int  # bytes [start, end)
    end: int
    sha256: str


# The constructors of the following check types and names, and ignore unknown keys: ValueError.


@dataclass(frozen=True)
class FileEntry:
    """The expected size and checksums of a file."""

    name: FileName  # within the attempt's folder
    size: Natural  # bytes
    blocks: list[str]  # sha256 of every BLOCK_BYTES bytes


@dataclass(frozen=True)
class Manifest:
    """All files of a checkpoint."""

    step: Natural
    epoch: Natural
    world_size: Natural
    files: list[FileEntry]  # one for each rank, in the order of ranks
    layout_sha256: str  # of LAYOUT
    state: dict[str, Any]  # the trainer's: counters, data position, recipe, ...
    created: str = ""  # ISO 8601, UTC


@dataclass(frozen=True)
class Commit:
    """The content of a commit marker."""

    epoch: Natural
    step: Natural
    prefix: str
    manifest_sha256: str
    token: str = ""  # of the lease under which it was written


def blocks_of(files: Sequence[FileEntry]) -> list[list[FileBlock]]:
    """The blocks of each file. ValueError if a file's number of blocks does not match its size."""
    blocks: list[list[FileBlock]] = []
    for number, entry in enumerate(files):
        starts = range(0, entry.size, BLOCK_BYTES)
        if len(starts) != len(entry.blocks):
            raise ValueError(f"{entry.name} of {entry.size} bytes has {len(entry.blocks)} blocks")
        ends = [min(start + BLOCK_BYTES, entry.size) for start in starts]
        cuts = zip(starts, ends, entry.blocks, strict=True)
        blocks.append([FileBlock(number, entry.name, *cut) for cut in cuts])
    return blocks


def build_layout(fragments: Sequence[dict[str, Any]]) -> bytes:
    """The content of LAYOUT: the position of every fragment of every rank.

    The content is compressed with zlib: 8 bytes with the length of the header, the header (JSON),
    and columns of int64. They have one row per fragment, sorted by parameter and start. The columns
    are parameter, start, numel and file. For each kind (slot and dtype), one more column has the
    byte offset in the file, or -1 if the fragment lacks this kind.

    Args:
        fragments: for each file, `storage.tensors.FilePlan.fragments`.

    Raises:
        ValueError: the fragments of two ranks contradict each other.
    """
    params: dict[str, list[int]] = {}
    kinds: dict[tuple[str, str], int] = {}
    rows: list[tuple[int, int, int, int, dict[int, int]]] = []
    name_ids: dict[str, int] = {}
    for file, part in enumerate(fragments):
        for name, shape in part["shapes"].items():
            name_ids.setdefault(name, len(name_ids))
            if params.setdefault(name, shape) != shape:
                raise ValueError(
                    f"{name} has shape {shape} on rank {file}, and {params[name]} elsewhere"
                )
        for name, start, numel, slots in part["rows"]:
            offsets = {
                kinds.setdefault((slot, dtype), len(kinds)): offset for slot, dtype, offset in slots
            }
            rows.append((name_ids[name], start, numel, file, offsets))
    rows.sort(key=lambda row: row[:2])
    columns: list[array[int]] = []
    if rows:
        columns += [array("q", column) for column in list(zip(*rows, strict=True))[:4]]
    columns += [array("q", (row[4].get(kind, -1) for row in rows)) for kind in kinds.values()]
    head = {
        "params": list(params.items()),
        "kinds": list(kinds),
        "rows": len(rows),
        "tensors": [part["tensors"] for part in fragments],
    }
    encoded = json.dumps(head).encode()
    parts = [len(encoded).to_bytes(8, "little"), encoded]
    parts += [column.tobytes() for column in columns]
    return zlib.compress(b"".join(parts), level=1)
