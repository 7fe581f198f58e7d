"""Which checkpoint to resume from: the newest that is committed, here or in the remote store, and proves whole.

In this order, newest first: the marker is read; the manifest and the layout must have their sha256; every file must
have its size; every block its sha256 (`fetch.py`; the ranks share that work). At the first thing that does not fit, all
ranks step back together to the next older one, and report why. Something that cannot be read for another reason
(permission, network, a broken disk) is no damage: it stops the run, which would else silently lose its work.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import lease
from clip_train.checkpoint.commit import (
    DamagedError,
    Found,
    check_sizes,
    copy_commit,
    explain,
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
from clip_train.storage.redact import redact
from clip_train.storage.urls import open_storage

_LISTINGS = 5  # how often the selection is begun anew
T = TypeVar("T")
Log = Callable[[str], None]


class Skipped(NamedTuple):
    """A committed checkpoint that is not whole."""

    ref: CommitRef
    reason: str

    def __str__(self) -> str:
        return f"step {self.ref.step}: {self.reason}"


class Places(NamedTuple):
    """Where checkpoints may lie."""

    local: LocalStorage | None
    remote: Storage | None


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to continue from."""

    step: int
    state: dict[str, Any]  # as given to `save`; tuples are lists
    reader: FragmentReader
    rank_tensors: dict[str, Tensor] | None  # this rank's; None if the number of ranks has changed
    world_size: int  # of the run that wrote it
    path: str  # where it lies: a folder or a URL
    ref: CommitRef  # its marker
    in_remote: bool = False  # it is committed in the remote store
    skipped: list[Skipped] = field(default_factory=list)  # newer ones that are not whole, and why
    fetched: int = 0  # bytes that came from the remote store, over all ranks
    fetch_seconds: float = 0.0
    fetch_ranks: int = 0  # that fetched something

    def describe(self) -> str:
        """Which step, from where, and instead of what."""
        got = "nothing fetched"
        if self.fetched:
            got = f"{self.fetched / 1e6:,.1f} MB fetched in {self.fetch_seconds:.1f} s"
            got += f" by {self.fetch_ranks} ranks" if self.fetch_ranks > 1 else ""
        passed = [f"  passed over    {each}" for each in self.skipped] or [
            "  passed over    nothing"
        ]
        return "\n".join(
            [f"resuming from step {self.step}", f"  source         {self.path} ({got})", *passed]
        )


@dataclass(frozen=True)
class Selection:
    """What `checkpoint.resume` asks for, the same on all ranks."""

    resumed: Resumed | None = None  # None: a fresh start
    protect: frozenset[CommitRef] = (
        frozenset()
    )  # this run's that must stay: this one, and one named in the recipe
    saved: bool = False  # it lies in the main store, and so need not be saved again
    damaged: frozenset[CommitRef] = frozenset()  # this run's that were passed over


def ranks_of_folder(storage: LocalStorage) -> list[int]:
    """Collective: the ranks that see the same folder as this one. CheckpointError, on all ranks.

    The first of them leaves a file there with its number; rank 0 before the others, which most disks show to all.
    """
    if dist.world_size() == 1:
        return [0]
    name = str(dist.broadcast_object(f".seen-{time.time_ns()}"))

    def claim() -> str:
        storage.put_bytes(name, str(dist.rank()).encode(), if_absent=True)
        return storage.read_bytes(name).decode()

    try:
        dist.on_main(lambda: writable(storage, claim))
        claims = dist.gather_objects(dist.agreed(lambda: writable(storage, claim)))
    finally:
        with contextlib.suppress(OSError):  # of this rank alone
            storage.delete(name)
    return [rank for rank, claimed in enumerate(claims) if claimed == claims[dist.rank()]]


def writable(storage: Storage, action: Callable[[], T]) -> T:
    """`action()`; CheckpointError where the store does not take it."""
    try:
        return action()
    except OSError as e:
        raise CheckpointError(
            f"checkpoints cannot be written to {storage.url}: {explain(e)}"
        ) from e


def select(mode: str, storage: LocalStorage, remote: Storage | None, log: Log) -> Selection:
    """mode: `checkpoint.resume`; another run's place counts until this run has a checkpoint. storage, remote: this
    run's. An older one of this run is gone back to once: the same line again, a requeue, goes on from the newest.
    log: how far a fetch is, and what a user should know.

    CheckpointError when there must be one and none is whole, or where one cannot be read. UserError for a path
    that holds no checkpoints.
    """
    if mode == "never":
        return Selection()
    places, own = Places(storage, remote), mode in ("auto", "must")
    only: CommitRef | None = None
    named: frozenset[CommitRef] = frozenset()
    if not own:
        place, only = dist.on_main(lambda: locate(mode))
        own = place in [_place(each) for each in (storage, remote) if each is not None]
        if not own:
            # the same line again, a requeue: what this run has done since is not done a second time
            mine = select("auto", storage, remote, lambda text: None)
            if mine.resumed is not None:
                log(
                    f"checkpoint.resume ({mode}): this run has checkpoints of its own and goes on from them"
                )
                return mine
            places = places_at(place)
        elif only is not None:
            named = frozenset([only])
            if dist.on_main(lambda: _gone_back_already(mode, places)):
                only = None
                log(
                    f"checkpoint.resume ({mode}): this run has gone back there before, and goes on from its newest "
                    "checkpoint; to go back once more, name it in the other way (its commit/*.json, its ckpt/*/*)"
                )
    found, skipped = resolve(places, only, storage, log)
    damaged = frozenset(each.ref for each in skipped) if own else frozenset()
    if found is None:
        _nothing_found(mode, places, skipped, log)
        return Selection(damaged=damaged)
    protect = named | {found.ref} if own else named
    return Selection(found, protect, own and (remote is None or found.in_remote), damaged)


def places_at(root: str) -> Places:
    """A folder is read where it is."""
    storage = open_storage(root)
    return Places(storage, None) if isinstance(storage, LocalStorage) else Places(None, storage)


def _place(storage: Storage) -> str:
    """As `locate` has it."""
    return storage.root.resolve().as_posix() if isinstance(storage, LocalStorage) else storage.url


def _gone_back_already(mode: str, places: Places) -> bool:
    """Whether the newest checkpoint is from a process with the same `checkpoint.resume`. CheckpointError."""
    newest = max(itertools.chain(*list_places(places)), default=None)
    main = places.remote or places.local  # where leases are taken
    if newest is None or main is None:
        return False
    return readable(main, lambda main: lease.resume_of(main, newest.epoch)) == redact(mode)


def _nothing_found(mode: str, places: Places, skipped: list[Skipped], log: Log) -> None:
    where = " and ".join(each.url for each in places if each is not None)
    reasons = "".join(f"\n  {each}" for each in skipped)
    what = f"none of the checkpoints under {where} is whole:{reasons}" if reasons else ""
    if mode != "auto":
        remedy = (
            "set checkpoint.resume to auto to start fresh" if mode == "must" else "choose another"
        )
        raise CheckpointError(f"{what or f'there is no checkpoint under {where}'}\n{remedy}")
    if what:
        log(f"{what}\nSTARTING FRESH, from step 0")


def list_places(places: Places) -> tuple[list[CommitRef], list[CommitRef]]:
    """The commits of the local disk and of the remote store, newest first. CheckpointError."""
    local, remote = ([] if each is None else readable(each, list_commits) for each in places)
    return local, remote


def resolve(
    places: Places,
    only: CommitRef | None = None,
    cache: LocalStorage | None = None,
    log: Log = lambda text: None,
    *,
    verify: bool = False,
) -> tuple[Resumed | None, list[Skipped]]:
    """Called by all ranks: rank 0 looks, all ranks share hashing and fetching, all get the same answer: it, and
    the newer ones that are not whole.

    only: consider this checkpoint alone. cache: where a remote one is fetched to; None: nothing is written, and each
    block is verified when it is read, unless `verify`. CheckpointError, on all ranks, where one cannot read.
    """
    everyone = cache is None or places.remote is None
    ranks = [*range(dist.world_size())] if everyone else ranks_of_folder(cache)  # type: ignore[arg-type]
    for _ in range(_LISTINGS):
        local, remote = dist.on_main(lambda: list_places(places))
        found: Resumed | None = None
        skipped: list[Skipped] = []
        for ref in sorted({*local, *remote}, reverse=True):
            if only is None or ref == only:
                try:
                    found = _open(
                        places, ref, ref in local, ref in remote, cache, ranks, log, skipped, verify
                    )
                    break
                except DamagedError as e:  # on all ranks
                    skipped.append(Skipped(ref, str(e)))
        passed_over = {each.ref for each in skipped}
        if not passed_over or passed_over <= set(
            dist.on_main(lambda: list(itertools.chain(*list_places(places))))
        ):
            break  # else a process that still runs has removed one while we looked, and there are newer ones
    return found, skipped


def _open(
    places: Places, ref: CommitRef, in_local: bool, in_remote: bool, cache: LocalStorage | None, ranks: list[int],
    log: Log, skipped: list[Skipped], verify: bool,
) -> Resumed:  # fmt: skip
    """One checkpoint, all of it verified unless it is only looked at. Collective; DamagedError, CheckpointError, on all
    ranks."""
    world_size = dist.world_size()
    small = dist.on_main(lambda: _read_small_files(places, ref, in_local, in_remote))
    if isinstance(small, str):
        raise DamagedError(small)
    found, layout = small
    if len(ranks) < world_size and not in_remote:
        if (why := dist.on_main(lambda: _upload(places, found))) is not None:
            raise DamagedError(why)
        in_remote = True
    remote, copies = places.remote if in_remote else None, places.local or cache
    files = dist.agreed(
        lambda: CheckpointFiles(found, copies, remote, to_look=cache is None, ranks=ranks, log=log)
    )
    if cache is not None or verify:
        if (why := files.verify_all()) is not None:
            raise DamagedError(why)
        if (
            cache is not None
            and remote is not None
            and places.local is not None
            and not in_local
            and len(ranks) == world_size
        ):
            dist.on_main(lambda: copy_commit(remote, cache, found))  # all files lie there now
    main = places.remote if in_remote else places.local
    assert main is not None
    where = f"{main.url}/{found.commit.prefix}"
    mine = dist.rank() if found.manifest.world_size == world_size else None
    reader = dist.agreed(lambda: FragmentReader(layout, files, where))
    reader.prepare_named(mine)
    tensors = dist.agreed(lambda: reader.rank_tensors(mine) if mine is not None else None)
    return Resumed(
        found.manifest.step, found.manifest.state, reader, tensors, found.manifest.world_size, where, ref, in_remote,
        skipped, *files.total_fetched(),
    )  # fmt: skip


def _read_small_files(
    places: Places, ref: CommitRef, in_local: bool, in_remote: bool
) -> tuple[Found, bytes] | str:
    """All that can be found out without reading the data, and the layout; or what is wrong."""

    def look(storage: Storage) -> tuple[Found, bytes]:
        found = read_found(storage, ref)
        check_sizes(storage, found.commit.prefix, found.manifest.files)
        return found, read_layout(storage, found)

    reasons: list[str] = []
    for storage, there in ((places.remote, in_remote), (places.local, in_local)):
        if storage is not None and there:
            try:
                return readable(storage, look)
            except DamagedError as e:
                reasons.append(f"{storage.url}: {e}" if in_local and in_remote else str(e))
    return "; ".join(reasons)


def _upload(places: Places, found: Found) -> str | None:
    """Rank 0's disk alone has it, as its upload was abandoned, and other ranks do not see that disk: it is completed.

    What is damaged. CheckpointError where the store does not take it.
    """
    local, remote = places.local, places.remote
    assert local is not None and remote is not None
    try:
        CheckpointFiles(found, local, None).verify()
    except DamagedError as e:
        return str(e)

    def put(remote: Storage) -> None:
        for entry in found.manifest.files:
            name = f"{found.commit.prefix}/{entry.name}"
            remote.put_file(local.path(name), name)
        copy_commit(local, remote, found)

    readable(remote, put)
    return None
