"""Which checkpoint to resume from: the newest that is committed and proves whole.

In this order, newest first: the marker is read; the manifest must have the sha256 that the marker names;
every file must have its size; every file must have its sha256. At the first thing that does not fit, all
ranks step back together to the next older one, and remember why. Something that cannot be read for another
reason (permission, a broken disk) is no damage: it stops the run, which would else silently lose its work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from clip_train import dist
from clip_train.checkpoint import layout
from clip_train.checkpoint.layout import Commit, CommitRef, FileEntry, Manifest
from clip_train.errors import CheckpointError
from clip_train.storage import Storage

T = TypeVar("T")
_CHUNK = 4 << 20  # bytes


@dataclass(frozen=True)
class Skipped:
    """A committed checkpoint that is not whole."""

    ref: CommitRef
    reason: str

    def __str__(self) -> str:
        return f"step {self.ref.step}: {self.reason}"


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole."""

    commit: Commit
    manifest: Manifest


@dataclass(frozen=True)
class Resolution:
    """The answer, the same on all ranks."""

    found: Found | None
    skipped: list[Skipped] = field(default_factory=list)
    commits: list[CommitRef] = field(default_factory=list)  # all that were there, newest first


class _DamagedError(Exception):
    pass


def list_commits(storage: Storage) -> list[CommitRef]:
    """All commit markers, newest first."""
    refs = (CommitRef.parse(entry.name) for entry in storage.list("commit"))
    return sorted((ref for ref in refs if ref is not None), reverse=True)


def resolve(storage: Storage, only: CommitRef | None = None) -> Resolution:
    """Called by all ranks. Rank 0 looks, all ranks share the hashing, all get the same answer.

    only: consider this checkpoint alone. CheckpointError, on all ranks, where one cannot read.
    """
    commits = dist.on_main(lambda: _readable(storage, lambda: list_commits(storage)))
    skipped: list[Skipped] = []
    for ref in commits:
        if only is not None and ref != only:
            continue
        found, reason = dist.on_main(lambda ref=ref: _inspect(storage, ref))  # type: ignore[misc]
        if found is not None:
            reason = _verify_contents(storage, found)
            if reason is None:
                return Resolution(found, skipped, commits)
        skipped.append(Skipped(ref, reason or "damaged"))
    return Resolution(None, skipped, commits)


def _readable(storage: Storage, action: Callable[[], T]) -> T:
    try:
        return action()
    except (OSError, layout.NewerFormatError) as e:
        raise CheckpointError(
            f"cannot read the checkpoints under {storage.url}: {type(e).__name__}: {e}. This is not taken "
            "for a damaged or missing checkpoint; mend it, or set checkpoint.resume"
        ) from e


def _inspect(storage: Storage, ref: CommitRef) -> tuple[Found | None, str | None]:
    """All that can be told without reading the data: (found, None) or (None, what is wrong)."""

    def look() -> Found:
        commit = read_commit(storage, ref)
        manifest_name = f"{commit.prefix}/{layout.MANIFEST}"
        try:
            data = storage.read_bytes(manifest_name)
        except FileNotFoundError:
            raise _DamagedError(f"{manifest_name} is missing") from None
        if layout.sha256_of(data) != commit.manifest_sha256:
            raise _DamagedError(f"{manifest_name} does not have the sha256 in its commit marker")
        try:
            manifest = Manifest.from_bytes(data)
        except ValueError as e:
            raise _DamagedError(f"{manifest_name}: {e}") from e
        for entry in manifest.files:
            name = f"{commit.prefix}/{entry.name}"
            try:
                size = storage.size(name)
            except FileNotFoundError:
                raise _DamagedError(f"{name} is missing") from None
            if size != entry.size:
                raise _DamagedError(f"{name} has {size} bytes instead of {entry.size}")
        return Found(commit, manifest)

    try:
        return _readable(storage, look), None
    except _DamagedError as e:
        return None, str(e)


def read_commit(storage: Storage, ref: CommitRef) -> Commit:
    """What the marker `ref` says. _DamagedError (private) if it makes no sense; OSError."""
    try:
        commit = Commit.from_bytes(storage.read_bytes(ref.name))
    except FileNotFoundError:
        raise _DamagedError(f"{ref.name} is gone") from None
    except ValueError as e:
        raise _DamagedError(f"{ref.name} is not readable: {e}") from e
    if commit.ref != ref:
        raise _DamagedError(f"{ref.name} is the marker of epoch {commit.epoch}, step {commit.step}")
    return commit


def prefix_of(storage: Storage, ref: CommitRef) -> str | None:
    """The folder that a marker names; None if the marker makes no sense. OSError."""
    try:
        return read_commit(storage, ref).prefix
    except _DamagedError:
        return None


def _verify_contents(storage: Storage, found: Found) -> str | None:
    """Hash all files, dealt over the ranks; the first damage that any rank met, or None."""
    mine = found.manifest.files[dist.rank() :: dist.world_size()]
    reason = dist.agreed(lambda: _readable(storage, lambda: _first_damage(storage, found.commit.prefix, mine)))
    return next((each for each in dist.gather_objects(reason) if each is not None), None)


def _first_damage(storage: Storage, prefix: str, files: list[FileEntry]) -> str | None:
    for entry in files:
        name = f"{prefix}/{entry.name}"
        digest = hashlib.sha256()
        try:
            with storage.open_read(name) as f:
                while chunk := f.read(_CHUNK):
                    digest.update(chunk)
        except FileNotFoundError:
            return f"{name} is missing"
        if digest.hexdigest() != entry.sha256:
            return f"{name} does not have its sha256: a byte has changed since it was written"
    return None
