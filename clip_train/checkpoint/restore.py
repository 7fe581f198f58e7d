"""Choose the checkpoint to resume from: the newest complete one, here or in the remote store.

Newest first: the marker is read; the manifest and the layout must have their sha256; every file its
size; every block its sha256 (`reader.py`; the ranks share that work). At the first mismatch all
ranks step back together to the next older one, and report why. A read error with another cause
(permission, network, a broken disk) is not damage. It stops the run, which would otherwise silently
lose work.
"""

import contextlib
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from clip_train import dist
from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import (
    DamagedError,
    Found,
    in_parallel,
    list_commits,
    read_found,
    readable,
    writable,
)
from clip_train.checkpoint.config import locate
from clip_train.checkpoint.manifest import CommitRef, FormatError, blocks_of
from clip_train.checkpoint.reader import PARALLEL_BLOCKS, FragmentReader, fetch_block
from clip_train.errors import CheckpointError, UserError
from clip_train.storage.base import Storage
from clip_train.storage.local import LocalStorage
from clip_train.storage.urls import open_storage

SHARED_SECONDS = 40.0  # until all ranks see a new file: NFS caches folders for 30 s
_LISTINGS = 5  # how often the selection is started again
Log = Callable[[str], None]


Skipped = dict[CommitRef, str]
"""Committed checkpoints that are not whole, newest first, and why."""


class Places(NamedTuple):
    """Where checkpoints may be."""

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
    path: str  # a folder or a URL
    ref: CommitRef  # its marker
    in_remote: bool = False  # it is committed in the remote store
    from_this_run: bool = True  # it is this run's, not from another place
    skipped: Skipped = field(default_factory=dict)  # newer ones
    fetched: int = 0  # bytes that came from the remote store, over all ranks

    def describe(self) -> str:
        """The step, its source, and the checkpoints that were skipped."""
        got = "nothing fetched"
        if self.fetched:
            got = f"{self.fetched / 1e6:,.1f} MB fetched"
        lines = [f"resuming from step {self.step}", f"  source         {self.path} ({got})"]
        reasons = describe_skipped(self.skipped) or ["nothing"]
        return "\n".join([*lines, *(f"  passed over    {each}" for each in reasons)])


def is_shared(storage: LocalStorage, *, required: bool) -> bool:
    """Collective: whether all ranks see the files that rank 0 writes there. CheckpointError, on all
    ranks.

    required: UserError on all ranks if one of them does not, even after a while. Rank 0 publishes
    it in its own folder, which the batch script's controller reads.
    """
    if dist.world_size() == 1:
        return True
    name = dist.broadcast_object(f".seen-{uuid.uuid4().hex}")

    def write() -> None:
        with writable(storage):
            storage.put_bytes(name, b"")

    def look() -> bool:
        end = time.monotonic() + (SHARED_SECONDS if required else 0.0)
        with writable(storage):
            while not storage.exists(name) and time.monotonic() < end:
                time.sleep(0.2)
            return storage.exists(name)

    try:
        dist.on_main(write)
        seen, host = dist.agreed(look), socket.gethostname()
        blind = dict.fromkeys(filter(None, dist.gather_objects("" if seen else host)))
    finally:
        with contextlib.suppress(OSError):
            storage.delete(name)
    if required and blind:
        raise UserError(
            f"run.dir ({storage.root.parent}) is not shared: {', '.join(blind)} cannot see what "
            "rank 0 writes; choose a run.dir on a disk that all nodes mount, or set "
            "checkpoint.remote"
        )
    return not blind


def select(mode: str, places: Places, cache: LocalStorage | None, log: Log) -> Resumed | None:
    """The checkpoint to resume, None for a fresh start. Collective.

    mode: `checkpoint.resume`. places: this run's. cache: its folder, also if not shared; None: look
    only.

    If it names another run, this run starts there. Later it continues from its own checkpoints,
    because a requeued job uses the same command. log: called with progress and notices for the
    user.

    CheckpointError if a checkpoint is required and none is complete, or if one cannot be read.
    UserError for a path without checkpoints, or with one of this run.
    """
    if mode == "never":
        return None
    other: str | None = None
    only: CommitRef | None = None
    if mode not in ("auto", "must"):
        other, only = dist.on_main(locate, mode)
        own_places = [  # as `locate` names them
            each.root.resolve().as_posix() if isinstance(each, LocalStorage) else each.url
            for each in (cache, places.remote)
            if each is not None
        ]
        if other in own_places:
            other = None
            if only is not None:
                raise UserError(
                    f"checkpoint.resume ({mode}) is a checkpoint of this run, which continues from "
                    "its newest one. To go back, start another run there: set another run.name "
                    "(and checkpoint.remote) beside this checkpoint.resume; or remove the newer "
                    "commit/*.json"
                )
    found, skipped = resolve(places, cache=cache, log=log)
    if found is not None and other is not None:
        log(f"checkpoint.resume ({mode}): this run has checkpoints and continues from its own")
    if found is not None or mode == "auto":
        if found is None and skipped:
            log(f"{_describe_damage(places, skipped)}\nSTARTING FRESH, from step 0")
        return found
    if other is not None:
        places = places_at(other)
        found, skipped = resolve(places, only, cache, log)
    if found is None:
        what = _describe_damage(places, skipped)
        remedy = "set checkpoint.resume to auto to start fresh"
        raise CheckpointError(f"{what}\n{remedy if mode == 'must' else 'choose another'}")
    return replace(found, from_this_run=False)


def places_at(root: str) -> Places:
    """A folder is read in place."""
    storage = open_storage(root)
    return Places(storage, None) if isinstance(storage, LocalStorage) else Places(None, storage)


def describe_skipped(skipped: Skipped) -> list[str]:
    return [f"step {ref.step}: {reason}" for ref, reason in skipped.items()]


def _describe_damage(places: Places, skipped: Skipped) -> str:
    where = " and ".join(each.url for each in places if each is not None)
    if not skipped:
        return f"no checkpoint was found under {where}"
    reasons = "\n  ".join(["", *describe_skipped(skipped)])
    return f"none of the checkpoints under {where} is whole:{reasons}"


def list_places(places: Places) -> dict[CommitRef, list[str]]:
    """The URLs of the places that have each commit, newest first. CheckpointError."""
    urls: dict[CommitRef, list[str]] = defaultdict(list)
    for storage in places:
        if storage is not None:
            with readable(storage.url):
                for ref in list_commits(storage):
                    urls[ref].append(storage.url)
    return dict(sorted(urls.items(), reverse=True))


def resolve(
    places: Places,
    only: CommitRef | None = None,
    cache: LocalStorage | None = None,
    log: Log = lambda text: None,
) -> tuple[Resumed | None, Skipped]:
    """The newest complete checkpoint, and the damaged ones that are newer. Collective.

    Rank 0 looks, all ranks share hashing and fetching and get the same answer. only: consider this
    checkpoint alone. cache: what the remote store has is fetched to `places.local`, or else to this
    folder; None: nothing is fetched; blocks are read from the local disk or the store and verified
    when they are read. CheckpointError, on all ranks, if one cannot read.
    """
    local = places.local
    for _ in range(_LISTINGS):
        listed = dist.on_main(list_places, places)
        resumed: Resumed | None = None
        skipped: Skipped = {}
        for ref, urls in listed.items():
            if only is not None and ref != only:
                continue
            found = dist.on_main(_read_small_files, places, ref, urls)
            if isinstance(found, str):
                skipped[ref] = found
                continue
            folder, remote = _folders(places, urls, cache, found.url, found.commit.prefix)
            shared = local is not None and cache is not None
            reader = dist.agreed(FragmentReader, found, folder, remote, shared=shared, log=log)
            damage = reader.verify_all() if cache is not None else None
            if damage is not None:
                skipped[ref] = damage
                continue
            dist.agreed(reader.tensors)  # fetched now, while an error still reaches all ranks
            same_ranks = found.manifest.world_size == dist.world_size()
            resumed = Resumed(
                step=found.manifest.step,
                state=found.manifest.state,
                reader=reader,
                rank_tensors=dist.agreed(reader.tensors, dist.rank()) if same_ranks else None,
                world_size=found.manifest.world_size,
                path=reader.path,
                ref=ref,
                in_remote=remote is not None,
                skipped=skipped,
                fetched=int(dist.sum_scalars(reader.fetched)[0]),
            )
            break
        listed = dist.on_main(list_places, places) if skipped else {}
        if skipped.keys() <= listed.keys():
            break
        # a process that still runs has removed one while we looked: there are newer ones
    return resumed, skipped


def _read_small_files(places: Places, ref: CommitRef, urls: list[str]) -> Found | str:
    """Facts that need no data, or the reason why it is damaged."""
    reasons: list[str] = []
    for storage in places:
        if storage is None or storage.url not in urls:
            continue
        try:
            with readable(storage.url):
                return read_found(storage, ref)
        except DamagedError as e:
            reasons.append(str(e))
    return "; ".join(reasons)


def _folders(
    places: Places, urls: list[str], cache: LocalStorage | None, url: str, prefix: str
) -> tuple[Path | None, Storage | None]:
    """Where the files of a checkpoint are read or fetched to (None: a temporary folder), and where
    missing ones come from (None: nowhere). url: of the store that its small files are from.
    """
    local, remote = places
    is_local = local is not None and url == local.url
    if remote is not None and (remote.url not in urls or (cache is None and is_local)):
        remote = None
    if local is not None and (cache is not None or is_local):
        return local.path(prefix), remote
    return cache.path(manifest.FETCHED + prefix) if cache is not None else None, remote


# -- looking, without changing anything


def list_checkpoints(places: Places, *, verify: bool) -> list[dict[str, Any]]:
    """The checkpoints of each store, newest first, as JSON. verify: read every byte.
    CheckpointError.

    `problem` is null if the checkpoint is complete, as far as it was checked. Unknown fields of a
    damaged one are null or empty: `num_bytes`, `created` (ISO 8601, UTC), `ranks`, and `engine`,
    the section of its recipe.
    """
    lines = []
    for where, storage in zip(("local", "remote"), places, strict=True):
        if storage is not None:
            with readable(storage.url):
                for ref in list_commits(storage):
                    known = _examine(storage, ref, verify=verify)
                    lines.append({"step": ref.step, "epoch": ref.epoch, "where": where, **known})
    return sorted(lines, key=lambda line: (-line["epoch"], -line["step"]))


def _examine(storage: Storage, ref: CommitRef, *, verify: bool) -> dict[str, Any]:
    """OSError if it cannot be determined whether the checkpoint is complete."""
    known: dict[str, Any] = {
        "problem": None,
        "num_bytes": 0,
        "created": "",
        "ranks": None,
        "engine": None,
    }
    try:
        found = read_found(storage, ref)
        whole = found.manifest
        recipe, chosen = whole.state.get("recipe", {}), whole.state.get("chosen_values", {})
        known |= {
            "num_bytes": sum(entry.size for entry in whole.files),
            "created": whole.created,
            "ranks": whole.world_size,
            "engine": {**recipe.get("engine", {}), **chosen.get("engine", {})},
        }
        if verify:
            check = partial(fetch_block, storage, found.commit.prefix)
            blocks = list(chain(*blocks_of(whole.files)))
            for _ in in_parallel(check, blocks, PARALLEL_BLOCKS):
                pass
    except (DamagedError, FormatError) as e:
        known["problem"] = str(e)
    return known


def open_read_only(
    places: Places,
    step: int | None = None,
    only: CommitRef | None = None,
) -> Resumed:
    """The newest committed checkpoint, or that of `step`, to export or evaluate. Collective.

    The run's folders are not changed. Only what is read is verified and fetched. UserError if the
    newest is damaged; CheckpointError.
    """
    where = " or ".join(each.url for each in places if each is not None)
    if step is not None:
        refs = [*dist.on_main(list_places, places)]
        only = next((ref for ref in refs if ref.step == step), None)
        if only is None:
            there = sorted({ref.step for ref in refs})
            raise UserError(f"{where} has no checkpoint of step {step}; it has {there or 'none'}")
    found, skipped = resolve(places, only)
    reasons = "\n  ".join(["", *describe_skipped(skipped)])
    if found is None:
        why = f"no whole checkpoint was found under {where}{reasons}"
        raise UserError(f"{why}; train first, or correct the place")
    if skipped:
        raise UserError(
            f"the newest checkpoint under {where} cannot be read{reasons}\n"
            f"restore it, or take the one of step {found.step}, which is older, by --step or by "
            "its commit/*.json"
        )
    return found
