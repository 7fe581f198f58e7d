"""Which checkpoint to resume from: the newest that is committed, here or in the remote store, and proves whole.

In this order, newest first: the marker is read; the manifest must have the sha256 that the marker names;
every file must have its size; every file must have its sha256 (`bring.py`: a local one is hashed, a remote one
fetched in verified blocks; the ranks share that work). At the first thing that does not fit, all ranks step back
together to the next older one, and remember why. Something that cannot be read for another reason
(permission, network, a broken disk) is no damage: it stops the run, which would else silently lose its work.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from clip_train import dist
from clip_train.checkpoint import layout, marks
from clip_train.checkpoint.bring import Bringer, Brought
from clip_train.checkpoint.layout import CommitRef
from clip_train.checkpoint.marks import DamagedError, Found, readable
from clip_train.storage import LocalStorage, Storage

logger = logging.getLogger(__name__)
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
    brought: Brought | None = None  # its files; None: they lie in the store, and are fetched as they are read


def resolve(
    places: Places,
    only: CommitRef | None = None,
    *,
    fetch: bool = True,
    shared: Callable[[], bool] = lambda: True,
    log: Callable[[str], None] = logger.info,
) -> Resolution:
    """Called by all ranks. Rank 0 looks, all ranks share hashing and fetching, all get the same answer.

    only: consider this checkpoint alone. fetch: bring a remote one to `places.cache`; else it is read where it lies,
    each block verified then, unless there is a whole copy in the cache. shared: whether all ranks see `places.cache`.
    log: told, on rank 0, how far it is. CheckpointError, on all ranks, where one cannot read.
    """
    for _ in range(_LISTINGS):
        answer = _resolve_listed(places, only, fetch, shared, log)
        passed_over = {each.ref for each in answer.skipped}
        if not passed_over or passed_over <= set(dist.on_main(lambda: list(itertools.chain(*list_places(places))))):
            break  # else a process that still runs has removed one while we looked, and there are newer ones
    return answer


def _resolve_listed(
    places: Places, only: CommitRef | None, fetch: bool, shared: Callable[[], bool], log: Callable[[str], None]
) -> Resolution:
    """Among the commits that are there now."""
    known = dist.on_main(lambda: list_places(places))
    commits = sorted(set(known[0]) | set(known[1]), reverse=True)
    skipped: list[Skipped] = []
    for ref in commits:
        if only is not None and ref != only:
            continue
        in_local, in_remote = ref in known[0], ref in known[1]
        found, reason = dist.on_main(lambda ref=ref, a=in_local, b=in_remote: _inspect(places, ref, a, b))  # type: ignore[misc]
        brought = None
        if found is not None and places.cache is not None and (fetch or in_local):
            remote = places.remote if in_remote and fetch else None
            together = places.remote is None or shared()  # also where this one has not come to the store
            brought = Bringer(places.cache, remote, found, shared=together, log=log).bring()
            reason = brought.problem
            if not fetch and in_remote and (reason is not None or not brought.seen_by_all):
                brought = reason = None  # there is another copy of it
        if found is not None and reason is None:
            return Resolution(found, skipped, commits, in_local, in_remote, brought)
        skipped.append(Skipped(ref, reason or "damaged"))
    return Resolution(None, skipped, commits)


def list_places(places: Places) -> tuple[list[CommitRef], list[CommitRef]]:
    """The commits of the local disk and of the remote store, newest first. CheckpointError."""
    local, remote = ([] if each is None else readable(each, marks.list_commits) for each in places[:2])
    return local, remote


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


def keep_locally(local: LocalStorage, remote: Storage, found: Found) -> None:
    """Rank 0, when all files of a remote checkpoint are here: make it a local one too. OSError."""
    local.put_bytes(f"{found.commit.prefix}/{layout.MANIFEST}", marks.read_manifest(remote, found.commit))
    local.put_bytes(found.commit.ref.name, found.commit.to_bytes())
