"""Reading the small files: which checkpoints are committed, and what each consists of. No torch, no ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from clip_train.checkpoint import layout
from clip_train.checkpoint.layout import Commit, CommitRef, Manifest
from clip_train.errors import CheckpointError
from clip_train.storage import Storage

T = TypeVar("T")
_READS = 3  # of a small file that does not have its sha256: the bit may have flipped on the way


class DamagedError(Exception):
    """A committed checkpoint that is not whole, in words."""


def readable(storage: Storage, action: Callable[[Storage], T]) -> T:
    """`action(storage)`; CheckpointError where it cannot be told what is there."""
    try:
        return action(storage)
    except layout.NewerFormatError as e:
        raise CheckpointError(f"the newest checkpoint under {storage.url} is not for this version: {e}") from e
    except OSError as e:
        raise CheckpointError(
            f"cannot read the checkpoints under {storage.url}: {type(e).__name__}: {e}. This is not taken "
            "for a damaged or missing checkpoint; mend it, or set checkpoint.resume"
        ) from e


@dataclass(frozen=True)
class Found:
    """A checkpoint as its small files describe it."""

    commit: Commit
    manifest: Manifest


def list_commits(storage: Storage) -> list[CommitRef]:
    """All commit markers, newest first; also the one that the hint names, should the listing hide it. OSError."""
    refs = {CommitRef.parse(entry.name) for entry in storage.list("commit")}
    hinted = read_hint(storage)
    if hinted is not None and hinted not in refs and storage.exists(hinted.name):
        refs.add(hinted)
    return sorted((ref for ref in refs if ref is not None), reverse=True)


def read_hint(storage: Storage) -> CommitRef | None:
    """What `latest.json` names; None where it is missing or makes no sense. OSError."""
    try:
        body = _read_again(storage, layout.HINT, layout.unseal)
    except (FileNotFoundError, ValueError):
        return None
    return CommitRef.parse(str(body.get("commit")))


def read_sealed(storage: Storage, name: str) -> dict[str, Any]:
    """FileNotFoundError; ValueError where it makes no sense; OSError."""
    return _read_again(storage, name, layout.unseal)


def _read_again(storage: Storage, name: str, parse: Callable[[bytes], T]) -> T:
    for tries in itertools.count(1):
        try:
            return parse(storage.read_bytes(name))
        except ValueError:
            if tries >= _READS:
                raise
    raise AssertionError("unreachable")


def read_commit(storage: Storage, ref: CommitRef) -> Commit:
    """What the marker `ref` says. DamagedError if it makes no sense; OSError."""
    try:
        commit = _read_again(storage, ref.name, Commit.from_bytes)
    except FileNotFoundError:
        raise DamagedError(f"{ref.name} is gone") from None
    except ValueError as e:
        raise DamagedError(f"{ref.name} is not readable: {e}") from e
    if commit.ref != ref:
        raise DamagedError(f"{ref.name} is the marker of epoch {commit.epoch}, step {commit.step}")
    return commit


def prefix_of(storage: Storage, ref: CommitRef) -> str | None:
    """The folder that a marker names; None if the marker makes no sense to this version. OSError."""
    try:
        return read_commit(storage, ref).prefix
    except (DamagedError, layout.NewerFormatError):
        return None


def read_found(storage: Storage, ref: CommitRef) -> Found:
    """The marker and the manifest that it vouches for. DamagedError; OSError."""
    commit = read_commit(storage, ref)
    data = read_manifest(storage, commit)
    try:
        return Found(commit, Manifest.from_bytes(data))
    except ValueError as e:
        raise DamagedError(f"{commit.prefix}/{layout.MANIFEST}: {e}") from e


def read_manifest(storage: Storage, commit: Commit) -> bytes:
    """As it was written. DamagedError; OSError."""
    name = f"{commit.prefix}/{layout.MANIFEST}"

    def verified(data: bytes) -> bytes:
        if layout.sha256_of(data) != commit.manifest_sha256:
            raise ValueError("does not have the sha256 in its commit marker")
        return data

    try:
        return _read_again(storage, name, verified)
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing") from None
    except ValueError as e:
        raise DamagedError(f"{name}: {e}") from e


def check_sizes(storage: Storage, found: Found) -> None:
    """DamagedError for the first file that is not there in its size; OSError."""
    prefix = found.commit.prefix
    sizes = {entry.name: entry.size for entry in storage.list(prefix)}
    for entry in found.manifest.files:
        name = f"{prefix}/{entry.name}"
        size = sizes.get(name)
        if size is None:  # a listing may hide a file
            try:
                size = storage.size(name)
            except FileNotFoundError:
                raise DamagedError(f"{name} is missing") from None
        if size != entry.size:
            raise DamagedError(f"{name} has {size} bytes instead of {entry.size}")
