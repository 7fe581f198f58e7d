"""Which checkpoint to resume from: the newest that is committed, here or in the remote store, and proves whole.

In this order, newest first: the marker is read; the manifest and the layout must have their sha256; every file must
have its size; every block its sha256 (`fetch.py`; the ranks share that work). At the first thing that does not fit, all
ranks step back together to the next older one, and report why. Something that cannot be read for another reason
(permission, network, a broken disk) is no damage: it stops the run, which would else silently lose its work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import lease
from clip_train.checkpoint.commit import (
    DamagedError,
    Found,
    check_sizes,
    copy_commit,
    list_commits,
    read_found,
    read_layout,
    readable,
)
from clip_train.checkpoint.config import locate
from clip_train.checkpoint.fetch import CheckpointFiles
from clip_train.checkpoint.manifest import CommitRef
from clip_train.checkpoint.snapshot import FragmentReader
from clip_train.errors import CheckpointError
from clip_train.storage.base import Storage
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import open_storage

_LISTINGS = 5  # how often the selection is begun anew
Log = Callable[[str], None]


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
    cache: LocalStorage | None  # where remote ones are fetched to; None: nowhere


class Fetched(NamedTuple):
    """What came from the remote store."""

    num_bytes: int = 0  # over all ranks
    seconds: float = 0.0
    num_ranks: int = 0  # that fetched something


NOTHING = Fetched()


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to continue from."""

    step: int
    state: dict[str, Any]  # as given to `save`; dicts with integer keys have them back, tuples are lists
    reader: FragmentReader
    rank_tensors: dict[str, Tensor] | None  # this rank's; None if the number of ranks has changed
    world_size: int  # of the run that wrote it
    path: str  # where it lies: a folder or a URL
    ref: CommitRef  # its marker
    in_remote: bool = False  # it is committed in the remote store
    skipped: list[Skipped] = field(default_factory=list)  # newer ones that are not whole, and why
    fetch: Fetched = NOTHING

    @property
    def fetched(self) -> int:
        """Bytes that came from the remote store, over all ranks."""
        return self.fetch.num_bytes

    def describe(self) -> str:
        """Which step, from where, and instead of what."""
        got = "nothing fetched"
        if self.fetch.num_bytes:
            got = f"{self.fetch.num_bytes / 1e6:,.1f} MB fetched in {self.fetch.seconds:.1f} s"
            got += f" by {self.fetch.num_ranks} ranks" if dist.world_size() > 1 or self.fetch.num_ranks > 1 else ""
        passed = [f"  passed over    {each}" for each in self.skipped] or ["  passed over    nothing"]
        return "\n".join([f"resuming from step {self.step}", f"  source         {self.path} ({got})", *passed])


@dataclass(frozen=True)
class Selection:
    """What `checkpoint.resume` asks for, the same on all ranks."""

    resumed: Resumed | None = None  # None: a fresh start
    protect: frozenset[CommitRef] = frozenset()  # this run's that must stay: this one, and one named in the recipe
    saved: bool = False  # it lies in the main store, and so need not be saved again
    damaged: frozenset[CommitRef] = frozenset()  # this run's that were passed over


def select(
    mode: str,
    storage: LocalStorage,
    remote: Storage | None,
    *,
    together: Callable[[], list[int]],
    log: Log,
) -> Selection:
    """mode: `checkpoint.resume`; another run's place counts until this run has a checkpoint. storage, remote: this
    run's. An older one of this run is gone back to once: the same line again, a requeue, goes on from the newest.
    together: the ranks that see this rank's `storage`. log: on rank 0, how far a fetch is, and when nothing is whole.

    CheckpointError when there must be one and none is whole, or where one cannot be read. UserError for a path
    that holds no checkpoints.
    """
    if mode == "never":
        return Selection()
    own = mode in ("auto", "must")
    only: CommitRef | None = None
    named: frozenset[CommitRef] = frozenset()
    places = Places(storage, remote, storage)
    if not own:
        place, only, own = dist.on_main(lambda: _located(mode, storage, remote))
        if not own:
            # the same line again, a requeue: what this run has done since is not done a second time
            mine = select("auto", storage, remote, together=together, log=lambda text: None)
            if mine.resumed is not None:
                if dist.is_main():
                    log(f"checkpoint.resume ({mode}): this run has checkpoints of its own and goes on from them")
                return mine
            elsewhere = open_storage(place)
            there = isinstance(elsewhere, LocalStorage)  # a folder is read where it is
            places = Places(elsewhere, None, elsewhere) if there else Places(None, elsewhere, storage)  # type: ignore[arg-type]
        elif only is not None:
            named = frozenset([only])
            if dist.on_main(lambda: _gone_back_already(mode, places)):
                only = None
                if dist.is_main():
                    log(
                        f"checkpoint.resume ({mode}): this run has gone back there before, and goes on from its newest "
                        "checkpoint; to go back once more, name it in the other way (its commit/*.json, its ckpt/*/*)"
                    )
    found, skipped = resolve(places, only, together=together, log=log)
    damaged = frozenset(each.ref for each in skipped) if own else frozenset()
    if found is None:
        _nothing_found(mode, places, skipped, log)
        return Selection(damaged=damaged)
    protect = named | {found.ref} if own else named
    return Selection(found, protect, own and (remote is None or found.in_remote), damaged)


def _gone_back_already(mode: str, places: Places) -> bool:
    """Whether the newest checkpoint is from a process with the same `checkpoint.resume`. CheckpointError."""
    newest = max(itertools.chain(*list_places(places)), default=None)
    main = places.remote or places.local  # where leases are taken
    if newest is None or main is None:
        return False
    return readable(main, lambda main: lease.resume_of(main, newest.epoch)) == mode


def _nothing_found(mode: str, places: Places, skipped: list[Skipped], log: Log) -> None:
    where = " and ".join(each.url for each in places[:2] if each is not None)
    reasons = "".join(f"\n  {each}" for each in skipped)
    what = f"none of the checkpoints under {where} is whole:{reasons}" if reasons else ""
    if mode != "auto":
        remedy = "set checkpoint.resume to auto to start fresh" if mode == "must" else "choose another"
        raise CheckpointError(f"{what or f'there is no checkpoint under {where}'}\n{remedy}")
    if what and dist.is_main():
        log(f"{what}\nSTARTING FRESH, from step 0")


def list_places(places: Places) -> tuple[list[CommitRef], list[CommitRef]]:
    """The commits of the local disk and of the remote store, newest first. CheckpointError."""
    local, remote = ([] if each is None else readable(each, list_commits) for each in places[:2])
    return local, remote


def resolve(
    places: Places,
    only: CommitRef | None = None,
    *,
    together: Callable[[], list[int]] | None = None,
    log: Log = lambda text: None,
) -> tuple[Resumed | None, list[Skipped]]:
    """Called by all ranks: rank 0 looks, all ranks share hashing and fetching, all get the same answer: it, and
    the newer ones that are not whole.

    only: consider this checkpoint alone. together: the ranks that see this rank's `places.cache`, to which a remote one
    is fetched; None: nothing is written there, and each block is verified when it is read. CheckpointError, on all
    ranks, where one cannot read.
    """
    for _ in range(_LISTINGS):
        found, skipped = _resolve_listed(places, only, together, log)
        passed_over = {each.ref for each in skipped}
        if not passed_over or passed_over <= set(dist.on_main(lambda: list(itertools.chain(*list_places(places))))):
            break  # else a process that still runs has removed one while we looked, and there are newer ones
    return found, skipped


def _resolve_listed(
    places: Places, only: CommitRef | None, together: Callable[[], list[int]] | None, log: Log
) -> tuple[Resumed | None, list[Skipped]]:
    """Among the commits that are there now."""
    known = dist.on_main(lambda: list_places(places))
    skipped: list[Skipped] = []
    for ref in sorted(set(known[0]) | set(known[1]), reverse=True):
        if only is None or ref == only:
            try:
                return _open(places, ref, ref in known[0], ref in known[1], together, log, skipped), skipped
            except DamagedError as e:  # on all ranks
                skipped.append(Skipped(ref, str(e)))
    return None, skipped


def _open(
    places: Places, ref: CommitRef, in_local: bool, in_remote: bool, together: Callable[[], list[int]] | None,
    log: Log, skipped: list[Skipped],
) -> Resumed:  # fmt: skip
    """One checkpoint, all of it verified unless it is only looked at. Collective; DamagedError, CheckpointError, on all
    ranks."""
    world_size = dist.world_size()
    found, layout, reason = dist.on_main(lambda: _read_small_files(places, ref, in_local, in_remote))
    if found is None:
        raise DamagedError(reason)
    if together is None:  # nothing is written to the run's own folders
        remote = places.remote if in_remote else None
        files = dist.agreed(lambda: CheckpointFiles(found, places.local, remote, to_look=True))
    else:
        ranks = [*range(world_size)] if places.remote is None else together()
        if len(ranks) < world_size and not in_remote:
            if (why := dist.on_main(lambda: _upload(places, found))) is not None:
                raise DamagedError(why)
            in_remote = True
        remote = places.remote if in_remote else None
        files = dist.agreed(lambda: CheckpointFiles(found, places.cache, remote, ranks=ranks, log=log))
        if (why := files.verify_all()) is not None:
            raise DamagedError(why)
        if remote is not None and places.local is not None and not in_local and len(ranks) == world_size:
            local = places.local  # all files lie there now
            dist.on_main(lambda: copy_commit(remote, local, found))
    main = places.remote if in_remote else places.local
    assert main is not None
    where = f"{main.url}/{found.commit.prefix}"
    same_world = found.manifest.world_size == world_size
    reader = dist.agreed(lambda: FragmentReader(layout, files, where))
    reader.prepare_named(dist.rank() if same_world else None)
    return Resumed(
        step=found.manifest.step,
        state=found.manifest.state,
        reader=reader,
        rank_tensors=dist.agreed(lambda: reader.rank_tensors(dist.rank()) if same_world else None),
        world_size=found.manifest.world_size,
        path=where,
        ref=ref,
        in_remote=in_remote,
        skipped=skipped,
        fetch=Fetched(*files.total_fetched()),
    )


def _read_small_files(
    places: Places, ref: CommitRef, in_local: bool, in_remote: bool
) -> tuple[Found | None, bytes, str]:
    """All that can be found out without reading the data: (found, layout, ""), or (None, b"", what is wrong)."""
    reasons: list[str] = []
    for storage, there in ((places.remote, in_remote), (places.local, in_local)):
        if storage is None or not there:
            continue

        def look(storage: Storage) -> tuple[Found, bytes]:
            found = read_found(storage, ref)
            check_sizes(storage, found.commit.prefix, found.manifest.files)
            return found, read_layout(storage, found)

        try:
            return *readable(storage, look), ""
        except DamagedError as e:
            reasons.append(str(e) if not (in_local and in_remote) else f"{storage.url}: {e}")
    return None, b"", "; ".join(reasons)


def _upload(places: Places, found: Found) -> str | None:
    """Rank 0's disk alone has it, as its upload was abandoned, and other ranks do not see that disk: it is completed.

    What is damaged. CheckpointError where the store does not take it.
    """
    local, remote = places.local, places.remote
    assert local is not None and remote is not None
    files = CheckpointFiles(found, local, None)
    try:
        files.verify()
    except DamagedError as e:
        return str(e)

    def put(remote: Storage) -> None:
        for entry in found.manifest.files:
            name = f"{found.commit.prefix}/{entry.name}"
            remote.put_file(local.path(name), name)
        copy_commit(local, remote, found)

    readable(remote, put)
    return None


def _located(path: str, storage: LocalStorage, remote: Storage | None) -> tuple[str, CommitRef | None, bool]:
    """As `locate`, and whether the place is this run's own."""
    place, only = locate(path)
    own = [
        each.root.resolve().as_posix() if isinstance(each, LocalStorage) else each.url
        for each in (storage, remote)
        if each is not None
    ]
    return place, only, place in own
