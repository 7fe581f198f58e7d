"""The names and the small files of a checkpoint, and nothing that touches a disk.

    lease/e000007.json                                        who writes with epoch 7: made if absent
    ckpt/s0000001200/e000007-1f2e3d4c/rank00000.safetensors   fragments and random state of one rank
                                     /_rank00000.json         that rank's word: size and sha256 of its files
                                     /_MANIFEST.json          all ranks' files, and the trainer's state
    commit/e000007-s0000001200.json                           written last: without it there is no checkpoint
    metric/e000007-s0000001200.json                           what the evaluation at that step came to
    latest.json                                               a hint, for when a listing hides the newest

An attempt to save has a folder of its own, never written twice. `e` is the epoch of the writer: every process
that is going to write takes the next one, and a writer whose epoch is no longer the highest may not commit.
The newest checkpoint is the one with the highest (epoch, step).
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

FORMAT_VERSION = 2  # 1 had no blocks, no leases and no seals
BLOCK_BYTES = 16 << 20  # what is fetched and verified at once

_LEASE_NAME = re.compile(r"lease/e(\d{6,})\.json")
_COMMIT_NAME = re.compile(r"commit/e(\d{6,})-s(\d{10,})\.json")
_PREFIX = re.compile(r"ckpt/s(\d{10,})/e(\d{6,})-[0-9a-f]{8}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

# -- names


class CommitRef(NamedTuple):
    """A commit marker by its name; they sort by age."""

    epoch: int
    step: int

    @property
    def name(self) -> str:
        return f"commit/e{self.epoch:06d}-s{self.step:010d}.json"

    @property
    def metric_name(self) -> str:
        return f"metric/e{self.epoch:06d}-s{self.step:010d}.json"

    @classmethod
    def parse(cls, name: str) -> CommitRef | None:
        """None for a file that is no commit marker."""
        match = _COMMIT_NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None

    @classmethod
    def of_metric(cls, name: str) -> CommitRef | None:
        """Whose number it is; None for a file of another kind."""
        return cls.parse(f"commit/{name.removeprefix('metric/')}") if name.startswith("metric/") else None


def new_prefix(epoch: int, step: int) -> str:
    """The folder of a new attempt to save."""
    return f"ckpt/s{step:010d}/e{epoch:06d}-{uuid.uuid4().hex[:8]}"


def parse_prefix(prefix: str) -> CommitRef | None:
    """Which commit an attempt's folder was meant for; None if it is no such folder."""
    match = _PREFIX.fullmatch(prefix)
    return CommitRef(int(match[2]), int(match[1])) if match else None


def lease_name(epoch: int) -> str:
    return f"lease/e{epoch:06d}.json"


def parse_lease(name: str) -> int | None:
    """The epoch; None for a file that is no lease."""
    match = _LEASE_NAME.fullmatch(name)
    return int(match[1]) if match else None


def rank_file(rank: int) -> str:
    return f"rank{rank:05d}.safetensors"


def rank_manifest(rank: int) -> str:
    return f"_rank{rank:05d}.json"


MANIFEST = "_MANIFEST.json"
HINT = "latest.json"

# -- tensors in a rank's file: "slot|start|name" for fragments, "@rank|name" for what belongs to the rank,
# "@shared|name" in rank 0's for what is the same on all of them

_RANK_KEY = "@rank|"
_SHARED_KEY = "@shared|"


def fragment_key(name: str, slot: str, start: int) -> str:
    if "|" in slot or slot.startswith("@"):
        raise ValueError(f"an optimizer slot cannot be called {slot!r}")
    return f"{slot}|{start}|{name}"


def parse_fragment_key(key: str) -> tuple[str, str, int] | None:
    """(name, slot, start), or None for a tensor that is no part of a parameter."""
    if key.startswith("@"):
        return None
    slot, start, name = key.split("|", 2)
    return name, slot, int(start)


def rank_tensor_key(name: str) -> str:
    return _RANK_KEY + name


def parse_rank_tensor_key(key: str) -> str | None:
    return key[len(_RANK_KEY) :] if key.startswith(_RANK_KEY) else None


def shared_tensor_key(name: str) -> str:
    return _SHARED_KEY + name


def parse_shared_tensor_key(key: str) -> str | None:
    return key[len(_SHARED_KEY) :] if key.startswith(_SHARED_KEY) else None


# -- small files


def seal(body: dict[str, Any]) -> bytes:
    """JSON that carries its own sha256, so that a bit that flips on the way is seen and read again."""
    body = {**body, "format": FORMAT_VERSION}
    return json.dumps({**body, "seal": sha256_of(_canonical(body))}, sort_keys=True).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """The inverse of `seal`. ValueError for anything else; NewerFormatError."""
    body = json.loads(data)
    if isinstance(body, dict) and body.get("format") != 1 and "seal" in body:
        told = body.pop("seal")
        if told != sha256_of(_canonical(body)):  # before its format is believed
            raise ValueError("it does not have the sha256 that it names")
        return _check_format(body)
    if _check_format(body)["format"] > 1:
        raise ValueError("it names no sha256")
    return body


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class FileEntry:
    """What a file must be."""

    name: str  # within the attempt's folder
    size: int  # bytes
    sha256: str
    rank: int  # who wrote it
    blocks: list[str] = field(default_factory=list)  # sha256 of every BLOCK_BYTES bytes; empty in format 1


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint consists of."""

    step: int
    epoch: int
    world_size: int
    files: list[FileEntry]
    state: dict[str, Any]  # the trainer's: counters, cursors, recipe, ...
    created: str = ""  # ISO 8601, UTC

    def to_bytes(self) -> bytes:
        body = {**asdict(self), "format": FORMAT_VERSION, "state": encode_state(self.state)}
        return json.dumps(body, indent=1, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """ValueError for anything but a manifest of this format."""
        body = _check_format(json.loads(data))  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        try:
            files = [FileEntry(**entry) for entry in body["files"]]
            manifest = cls(
                step=int(body["step"]),
                epoch=int(body["epoch"]),
                world_size=int(body["world_size"]),
                files=files,
                state=decode_state(body["state"]),
                created=str(body.get("created", "")),
            )
        except (KeyError, TypeError) as e:
            raise ValueError(f"not a manifest: {type(e).__name__} {e}") from e
        for entry in files:
            if not isinstance(entry.name, str) or not _FILE_NAME.fullmatch(entry.name):
                raise ValueError(f"not a file name: {entry.name!r}")
            if not isinstance(entry.size, int) or (entry.blocks and len(entry.blocks) != -(-entry.size // BLOCK_BYTES)):
                raise ValueError(f"{entry.name} of {entry.size!r} bytes has {len(entry.blocks)} blocks")
        return manifest


@dataclass(frozen=True)
class Commit:
    """What a commit marker says."""

    epoch: int
    step: int
    prefix: str
    manifest_sha256: str

    @property
    def ref(self) -> CommitRef:
        return CommitRef(self.epoch, self.step)

    def to_bytes(self) -> bytes:
        return seal(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Commit:
        """ValueError for anything but a commit marker of this format."""
        body = unseal(data)
        try:
            commit = cls(
                epoch=int(body["epoch"]),
                step=int(body["step"]),
                prefix=str(body["prefix"]),
                manifest_sha256=str(body["manifest_sha256"]),
            )
        except (KeyError, TypeError) as e:
            raise ValueError(f"not a commit marker: {type(e).__name__} {e}") from e
        if parse_prefix(commit.prefix) != commit.ref:
            raise ValueError(f"it names the folder {commit.prefix!r}")
        return commit


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class NewerFormatError(Exception):
    """Written by a newer version of this program: not damage, and not to be stepped over."""


def _check_format(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ValueError("not a JSON object")
    version = body.get("format")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise NewerFormatError(
            f"format {version}, and this clip-train reads formats up to {FORMAT_VERSION}: update clip-train, or name "
            "an older checkpoint (checkpoint.resume=<its commit/*.json>)"
        )
    if version not in (1, FORMAT_VERSION):
        raise ValueError(f"format {version!r}")
    return body


# -- state

_INT_KEYS = "__int_keys__"


def encode_state(value: Any, where: str = "state") -> Any:
    """`value` as JSON can hold it, deeply copied. Tuples become lists; a dict whose keys are all integers
    (cursors by lane) is tagged, so that `decode_state` gives integers back. TypeError for anything else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [encode_state(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        if value and all(isinstance(key, int) and not isinstance(key, bool) for key in value):
            return {_INT_KEYS: {str(key): encode_state(item, f"{where}[{key}]") for key, item in value.items()}}
        for key in value:
            if not isinstance(key, str) or key == _INT_KEYS:
                raise TypeError(f"{where}: a key must be a string, or all of them integers: {key!r}")
        return {key: encode_state(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where}: cannot be kept as JSON: {type(value).__name__}")


def decode_state(value: Any) -> Any:
    """The inverse of `encode_state`."""
    if isinstance(value, list):
        return [decode_state(item) for item in value]
    if isinstance(value, dict):
        if set(value) == {_INT_KEYS}:
            return {int(key): decode_state(item) for key, item in value[_INT_KEYS].items()}
        return {key: decode_state(item) for key, item in value.items()}
    return value
