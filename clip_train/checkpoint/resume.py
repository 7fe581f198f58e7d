"""Which checkpoint to resume from: the newest that is committed, here or in the remote store, and proves whole.

In this order, newest first: the marker is read; the manifest must have the sha256 that the marker names;
every file must have its size; every file must have its sha256 (a local one is hashed, a remote one fetched in
verified ranges; the ranks share that work). At the first thing that does not fit, all ranks step back
together to the next older one, and remember why. Something that cannot be read for another reason
(permission, network, a broken disk) is no damage: it stops the run, which would else silently lose its work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from clip_train import dist
from clip_train.checkpoint import layout, marks
from clip_train.checkpoint.files import DamagedBlockError, download, first_damage
from clip_train.checkpoint.layout import CommitRef, FileEntry
from clip_train.checkpoint.marks import DamagedError, Found
from clip_train.checkpoint.pipeline import check_space, free_bytes
from clip_train.errors import CheckpointError
from clip_train.storage import LocalStorage, Storage

T = TypeVar("T")
_LISTINGS = 5  # how often the choice is begun anew


@dataclass(frozen=True)
class Skipped:
    """A committed checkpoint that is not whole."""

    ref: CommitRef
    reason: str

    def __str__(self) -> str:
        return f"step {self.ref.step}: {self.reason}"


class Places(NamedTuple):
    """Where checkpoints may lie."""

    local: LocalStorage | None
    remote: Storage | None
    cache: LocalStorage | None  # where remote ones are fetched to; None: blocks are fetched as they are read


@dataclass(frozen=True)
class Resolution:
    """The answer, the same on all ranks."""

    found: Found | None
    skipped: list[Skipped] = field(default_factory=list)
    commits: list[CommitRef] = field(default_factory=list)  # all that were there, newest first
    in_local: bool = False  # it is committed on the local disk
    in_remote: bool = False  # and in the remote store
    fetched: int = 0  # bytes that came from there, over all ranks


def resolve(places: Places, only: CommitRef | None = None) -> Resolution:
    """Called by all ranks. Rank 0 looks, all ranks share hashing and fetching, all get the same answer.

    only: consider this checkpoint alone. Without `places.cache` the contents of remote files are not verified
    here but as they are read. CheckpointError, on all ranks, where one cannot read.
    """
    for _ in range(_LISTINGS):
        answer = _resolve_listed(places, only)
        passed_over = {each.ref for each in answer.skipped}
        if not passed_over or passed_over <= set(dist.on_main(lambda: list(itertools.chain(*list_places(places))))):
            break  # else a process that still runs has removed one while we looked, and there are newer ones
    return answer


def _resolve_listed(places: Places, only: CommitRef | None) -> Resolution:
    """Among the commits that are there now."""
    known = dist.on_main(lambda: list_places(places))
    commits = sorted(set(known[0]) | set(known[1]), reverse=True)
    skipped: list[Skipped] = []
    for ref in commits:
        if only is not None and ref != only:
            continue
        in_local, in_remote = ref in known[0], ref in known[1]
        found, reason = dist.on_main(lambda ref=ref, a=in_local, b=in_remote: _inspect(places, ref, a, b))  # type: ignore[misc]
        fetched = 0
        if found is not None and (places.cache is not None or not in_remote):
            reason, fetched = _bring(places, found, places.remote if in_remote else None)
        if found is not None and reason is None:
            return Resolution(found, skipped, commits, in_local, in_remote, fetched)
        skipped.append(Skipped(ref, reason or "damaged"))
    return Resolution(None, skipped, commits)


def list_places(places: Places) -> tuple[list[CommitRef], list[CommitRef]]:
    """The commits of the local disk and of the remote store, newest first. CheckpointError."""
    local, remote = ([] if each is None else readable(each, marks.list_commits) for each in places[:2])
    return local, remote


def readable(storage: Storage, action: Callable[[Storage], T]) -> T:
    """`action(storage)`; CheckpointError where it cannot be told what is there."""
    try:
        return action(storage)
    except (OSError, layout.NewerFormatError) as e:
        raise CheckpointError(
            f"cannot read the checkpoints under {storage.url}: {type(e).__name__}: {e}. This is not taken "
            "for a damaged or missing checkpoint; mend it, or set checkpoint.resume"
        ) from e


def _inspect(places: Places, ref: CommitRef, in_local: bool, in_remote: bool) -> tuple[Found | None, str | None]:
    """All that can be told without reading the data: (found, None) or (None, what is wrong)."""
    reasons: list[str] = []
    for storage, there in ((places.remote, in_remote), (places.local, in_local)):
        if storage is None or not there:
            continue

        def look(storage: Storage) -> Found:
            found = marks.read_found(storage, ref)
            marks.check_sizes(storage, found)
            return found

        try:
            return readable(storage, look), None
        except DamagedError as e:
            reasons.append(f"{e}" if len(reasons) == 0 and not (in_local and in_remote) else f"{storage.url}: {e}")
    return None, "; ".join(reasons)


def _bring(places: Places, found: Found, remote: Storage | None) -> tuple[str | None, int]:
    """Every file whole on the local disk, dealt over the ranks: (the first damage that any met or None, bytes)."""
    mine = found.manifest.files[dist.rank() :: dist.world_size()]  # on as many ranks as wrote it: one's own
    outcome = dist.agreed(lambda: _bring_mine(places.cache, remote, found.commit.prefix, mine))
    outcomes = dist.gather_objects(outcome)
    return next((reason for reason, _ in outcomes if reason is not None), None), sum(n for _, n in outcomes)


def _bring_mine(
    local: LocalStorage | None, remote: Storage | None, prefix: str, files: Collection[FileEntry]
) -> tuple[str | None, int]:
    fetched = 0
    for entry in files:
        name = f"{prefix}/{entry.name}"
        why: str | None = f"{name} is missing"
        if local is not None:
            why = readable(local, lambda _, name=name, entry=entry: first_damage(local.path(name), entry))  # type: ignore[misc]
        if why is not None and remote is not None and local is not None:
            why = readable(remote, lambda _, name=name, entry=entry: _fetch(local, remote, name, entry))  # type: ignore[misc]
            fetched += entry.size
        if why is not None:
            return why, fetched
    return None, fetched


def _fetch(local: LocalStorage, remote: Storage, name: str, entry: FileEntry) -> str | None:
    check_space(local.root, entry.size, free_bytes(local.root))
    try:
        download(remote, name, entry, local.path(name))
    except FileNotFoundError:
        return f"{remote.url}/{name} is missing"
    except DamagedBlockError as e:
        return f"{remote.url}: {e}"
    return None


def keep_locally(local: LocalStorage, remote: Storage, found: Found) -> None:
    """Rank 0, when all files of a remote checkpoint are here: make it a local one too. OSError."""
    local.put_bytes(f"{found.commit.prefix}/{layout.MANIFEST}", marks.read_manifest(remote, found.commit))
    local.put_bytes(found.commit.ref.name, found.commit.to_bytes())
