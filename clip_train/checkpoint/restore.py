"""Choose the checkpoint to resume from: the newest complete one, local or in the remote store.

Checkpoints are tried from the newest to the oldest. For each, rank 0 reads the marker and checks
the sha256 of the manifest and the layout and the size of every file. Then the ranks share the
verification of every block (`reader.py`). At the first mismatch all ranks continue with the next
older checkpoint, and report why. A read error with another cause (permission, network, a broken
disk) is not damage. It stops the run, which would otherwise silently lose work.
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
    CommittedCheckpoint,
    DamagedError,
    in_parallel,
    list_commits,
    read_checkpoint,
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
_SELECTION_TRIES = 5  # a checkpoint that is removed during the selection costs one
Log = Callable[[str], None]


Skipped = dict[CommitRef, str]
"""Committed checkpoints that are not whole, newest first, and why."""


class Stores(NamedTuple):
    """The stores of one run's checkpoints; None: there is no such store."""

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
    ref: CommitRef
    in_remote: bool = False  # it is committed in the remote store
    from_this_run: bool = True  # False: `checkpoint.resume` names another run
    skipped: Skipped = field(default_factory=dict)  # damaged checkpoints that are newer
    fetched: int = 0  # bytes fetched from the remote store, sum over all ranks

    def describe(self) -> str:
        """The step, its source, and the checkpoints that were skipped."""
        fetched = "nothing fetched"
        if self.fetched:
            fetched = f"{self.fetched / 1e6:,.1f} MB fetched"
        lines = [f"resuming from step {self.step}", f"  source         {self.path} ({fetched})"]
        for reason in describe_skipped(self.skipped) or ["nothing"]:
            lines.append(f"  passed over    {reason}")
        return "\n".join(lines)


def is_shared(storage: LocalStorage, *, required: bool) -> bool:
    """Whether all ranks see the files that rank 0 writes there. Collective; every error is raised on
    all ranks.

    required: wait up to SHARED_SECONDS until they do.

    Raises:
        CheckpointError: rank 0 cannot write, or a rank cannot look.
        UserError: `required`, and a rank does not see them.
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
        seen = dist.agreed(look)
        blind_host = "" if seen else socket.gethostname()
        hosts = [host for host in dist.gather_objects(blind_host) if host]
        blind_hosts = list(dict.fromkeys(hosts))  # each once, in the order of ranks
    finally:
        with contextlib.suppress(OSError):
            storage.delete(name)
    if required and blind_hosts:
        raise UserError(
            f"run.dir ({storage.root.parent}) is not shared: {', '.join(blind_hosts)} cannot see "
            "what rank 0 writes; choose a run.dir on a disk that all nodes mount, or set "
            "checkpoint.remote"
        )
    return not blind_hosts


def select(mode: str, stores: Stores, cache: LocalStorage | None, log: Log) -> Resumed | None:
    """The checkpoint to resume, None for a fresh start. Collective.

    If `mode` names another run, this run starts from that run's checkpoint. Later it continues from
    its own checkpoints, because a requeued job uses the same command.

    Args:
        mode: `checkpoint.resume`.
        stores: this run's.
        cache: this run's folder of checkpoints, also if the ranks do not share it; None: nothing
            is fetched or verified.
        log: called with progress and notices for the user.

    Raises:
        CheckpointError: a checkpoint is required and none is complete, or one cannot be read.
        UserError: the path has no checkpoints, or is a checkpoint of this run.
    """
    if mode == "never":
        return None
    other: tuple[str, CommitRef | None] | None = None
    if mode not in ("auto", "must"):
        other = _place_of_other_run(mode, stores, cache)
    resumed, skipped = find_newest(stores, cache=cache, log=log)
    if resumed is not None:
        if other is not None:
            log(f"checkpoint.resume ({mode}): this run has checkpoints and continues from its own")
        return resumed
    damage = _describe_damage(stores, skipped)
    if mode == "must":
        raise CheckpointError(f"{damage}\nset checkpoint.resume to auto to start fresh")
    if mode == "auto":
        if skipped:
            log(f"{damage}\nSTARTING FRESH, from step 0")
        return None
    if other is None:  # `mode` is this run's own folder
        raise CheckpointError(f"{damage}\nchoose another")
    if skipped:
        log(f"{damage}\nSTARTING AGAIN from checkpoint.resume ({mode})")
    root, only = other
    stores = stores_at(root)
    resumed, skipped = find_newest(stores, only, cache, log)
    if resumed is None:
        raise CheckpointError(f"{_describe_damage(stores, skipped)}\nchoose another")
    return replace(resumed, from_this_run=False)


def _place_of_other_run(
    path: str, stores: Stores, cache: LocalStorage | None
) -> tuple[str, CommitRef | None] | None:
    """The root of another run's checkpoints, and the checkpoint if `path` names one (else None). If
    `path` is the root of this run's own checkpoints: None.

    UserError if it is one of this run's checkpoints, or has none; CheckpointError. Collective.
    """
    root, only = dist.on_main(locate, path, "checkpoint.resume")
    own_roots = []  # as `locate` names them
    if cache is not None:
        own_roots.append(cache.root.resolve().as_posix())
    if isinstance(stores.remote, LocalStorage):
        own_roots.append(stores.remote.root.resolve().as_posix())
    elif stores.remote is not None:
        own_roots.append(stores.remote.url)
    if root not in own_roots:
        return root, only
    if only is not None:
        raise UserError(
            f"checkpoint.resume ({path}) is a checkpoint of this run, which continues from its "
            "newest one. To go back, start another run there: set another run.name (and "
            "checkpoint.remote) beside this checkpoint.resume; or remove the newer commit/*.json"
        )
    return None


def stores_at(root: str) -> Stores:
    """The checkpoints under a folder, which is read in place, or under a URL."""
    storage = open_storage(root)
    return Stores(storage, None) if isinstance(storage, LocalStorage) else Stores(None, storage)


def describe_skipped(skipped: Skipped) -> list[str]:
    return [f"step {ref.step}: {reason}" for ref, reason in skipped.items()]


def _describe_damage(stores: Stores, skipped: Skipped) -> str:
    where = " and ".join(store.url for store in stores if store is not None)
    if not skipped:
        return f"no checkpoint was found under {where}"
    reasons = "\n  ".join(["", *describe_skipped(skipped)])
    return f"none of the checkpoints under {where} is whole:{reasons}"


def commit_urls(stores: Stores) -> dict[CommitRef, list[str]]:
    """By commit, newest first: the URLs of the stores that have it. CheckpointError."""
    urls: dict[CommitRef, list[str]] = defaultdict(list)
    for store in stores:
        if store is not None:
            with readable(store.url):
                for ref in list_commits(store):
                    urls[ref].append(store.url)
    return dict(sorted(urls.items(), reverse=True))


def find_newest(
    stores: Stores,
    only: CommitRef | None = None,
    cache: LocalStorage | None = None,
    log: Log = lambda text: None,
) -> tuple[Resumed | None, Skipped]:
    """The newest complete checkpoint, and the damaged ones that are newer. Collective.

    Rank 0 lists the checkpoints and reads their small files. All ranks share the hashing and
    fetching of blocks, and get the same answer.

    Args:
        only: consider this checkpoint alone.
        cache: missing blocks are fetched from the remote store to `stores.local`, or else to this
            folder. None: nothing is verified or fetched now; each block is when it is read.

    Raises:
        CheckpointError: one rank cannot read. On all ranks.
    """
    for _ in range(_SELECTION_TRIES):
        listed = dist.on_main(commit_urls, stores)
        resumed: Resumed | None = None
        skipped: Skipped = {}
        for ref, urls in listed.items():
            if only is not None and ref != only:
                continue
            checkpoint = dist.on_main(_read_small_files, stores, ref, urls)
            if isinstance(checkpoint, str):  # damaged
                skipped[ref] = checkpoint
                continue
            source = _source_of_blocks(stores, urls, cache, checkpoint)
            # the ranks share `stores.local`; `cache` or a temporary folder is each rank's own
            shared = stores.local is not None and cache is not None
            reader = dist.agreed(
                FragmentReader, checkpoint, source.folder, source.remote, shared=shared, log=log
            )
            damage = None
            if cache is not None:
                damage = reader.verify_all()
            if damage is not None:
                skipped[ref] = damage
                continue
            # fetch the tensors of all ranks now, while an error still reaches every rank
            dist.agreed(reader.tensors, rank=None)
            rank_tensors = None
            if checkpoint.manifest.world_size == dist.world_size():
                rank_tensors = dist.agreed(reader.tensors, dist.rank())
            resumed = Resumed(
                step=checkpoint.manifest.step,
                state=checkpoint.manifest.state,
                reader=reader,
                rank_tensors=rank_tensors,
                world_size=checkpoint.manifest.world_size,
                path=reader.path,
                ref=ref,
                in_remote=stores.remote is not None and stores.remote.url in urls,
                skipped=skipped,
                fetched=int(dist.sum_scalars(reader.fetched)[0]),
            )
            break
        if not skipped:
            break
        removed_meanwhile = skipped.keys() - dist.on_main(commit_urls, stores).keys()
        if not removed_meanwhile:
            break
        # They were not damaged: another process removed them, because there are newer ones. Select
        # again.
    return resumed, skipped


def _read_small_files(stores: Stores, ref: CommitRef, urls: list[str]) -> CommittedCheckpoint | str:
    """The small files of a checkpoint, from the first store where they are whole; else the reasons
    why they are damaged."""
    reasons: list[str] = []
    for store in stores:
        if store is None or store.url not in urls:
            continue
        try:
            with readable(store.url):
                return read_checkpoint(store, ref)
        except DamagedError as e:
            reasons.append(str(e))
    return "; ".join(reasons)


class BlockSource(NamedTuple):
    """Where the blocks of a checkpoint are."""

    folder: Path | None  # the files are there, or are fetched to it; None: a temporary folder
    remote: Storage | None  # has the blocks that are missing in `folder`; None: no store has


def _source_of_blocks(
    stores: Stores, urls: list[str], cache: LocalStorage | None, checkpoint: CommittedCheckpoint
) -> BlockSource:
    """urls: of the stores that have this commit. cache: as in `find_newest`."""
    local, remote = stores
    prefix = checkpoint.commit.prefix
    if remote is not None and remote.url not in urls:
        remote = None
    if cache is None:
        if local is not None and checkpoint.url == local.url:
            return BlockSource(local.path(prefix), None)
        return BlockSource(None, remote)
    if local is not None:
        # also a checkpoint that is committed in the remote store alone: fetched to its own folder
        return BlockSource(local.path(prefix), remote)
    return BlockSource(cache.path(manifest.FETCHED + prefix), remote)


# -- looking, without changing anything


def list_checkpoints(stores: Stores, *, verify: bool) -> list[dict[str, Any]]:
    """The checkpoints of all stores, newest first, as JSON; one that is in two stores is there
    twice. verify: read every byte. CheckpointError.

    `problem` is null if the checkpoint is complete, as far as it was checked. Unknown fields of a
    damaged one are null or empty: `num_bytes`, `created` (ISO 8601, UTC), `ranks`, and `engine`,
    the section of its recipe.
    """
    found = []
    for where, storage in zip(("local", "remote"), stores, strict=True):
        if storage is not None:
            with readable(storage.url):
                for ref in list_commits(storage):
                    content = _examine(storage, ref, verify=verify)
                    found.append({"step": ref.step, "epoch": ref.epoch, "where": where, **content})
    return sorted(found, key=lambda each: (-each["epoch"], -each["step"]))


def _examine(storage: Storage, ref: CommitRef, *, verify: bool) -> dict[str, Any]:
    """A checkpoint for `list_checkpoints`. OSError if it is unknown whether it is complete."""
    content: dict[str, Any] = {
        "problem": None,
        "num_bytes": 0,
        "created": "",
        "ranks": None,
        "engine": None,
    }
    try:
        checkpoint = read_checkpoint(storage, ref)
        files = checkpoint.manifest.files
        state = checkpoint.manifest.state
        # `chosen_values` has what the run made of each `auto` of its recipe
        recipe, chosen = state.get("recipe", {}), state.get("chosen_values", {})
        content |= {
            "num_bytes": sum(entry.size for entry in files),
            "created": checkpoint.manifest.created,
            "ranks": checkpoint.manifest.world_size,
            "engine": {**recipe.get("engine", {}), **chosen.get("engine", {})},
        }
        if verify:
            check = partial(fetch_block, storage, checkpoint.commit.prefix)
            blocks = list(chain(*blocks_of(files)))
            for _ in in_parallel(check, blocks, PARALLEL_BLOCKS):
                pass
    except (DamagedError, FormatError) as e:
        content["problem"] = str(e)
    return content


def open_read_only(
    stores: Stores,
    step: int | None = None,
    only: CommitRef | None = None,
) -> Resumed:
    """The newest committed checkpoint, or that of `step`, to export or evaluate. Collective.

    The run's folders are not changed. Blocks are verified and fetched when they are read. only: the
    commit to open. UserError if there is none, or if that one is damaged; CheckpointError.
    """
    where = " or ".join(store.url for store in stores if store is not None)
    if step is not None:
        refs = [*dist.on_main(commit_urls, stores)]
        only = next((ref for ref in refs if ref.step == step), None)
        if only is None:
            steps = sorted({ref.step for ref in refs})
            raise UserError(f"{where} has no checkpoint of step {step}; it has {steps or 'none'}")
    resumed, skipped = find_newest(stores, only)
    reasons = "\n  ".join(["", *describe_skipped(skipped)])
    if resumed is None and only is not None and skipped:
        raise UserError(
            f"the checkpoint of step {only.step} under {where} is damaged:{reasons}\n"
            "restore it, or take another one, by --step or by its commit/*.json"
        )
    if resumed is None:
        raise UserError(
            f"no whole checkpoint was found under {where}{reasons}\n"
            "train first, or correct the place"
        )
    if skipped:
        raise UserError(
            f"the newest checkpoint under {where} cannot be read{reasons}\n"
            f"restore it, or take the one of step {resumed.step}, which is older, by --step or by "
            "its commit/*.json"
        )
    return resumed
