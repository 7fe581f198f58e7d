"""What `checkpoint.resume` asks for, made out of what is there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from clip_train import dist
from clip_train.checkpoint import lease
from clip_train.checkpoint.layout import CommitRef
from clip_train.checkpoint.locate import locate
from clip_train.checkpoint.marks import readable
from clip_train.checkpoint.opening import Resumed, open_found
from clip_train.checkpoint.resume import Places, Resolution, keep_locally, list_places, resolve
from clip_train.errors import CheckpointError
from clip_train.storage import LocalStorage, Storage, open_storage


@dataclass(frozen=True)
class Choice:
    """The same on all ranks."""

    resumed: Resumed | None = None  # None: a fresh start
    protect: frozenset[CommitRef] = frozenset()  # this run's that must stay: this one, and one named in the recipe
    saved: bool = False  # it lies in the main store, and so need not be saved again
    damaged: frozenset[CommitRef] = frozenset()  # this run's that were passed over


def choose(
    mode: str,
    storage: LocalStorage,
    remote: Storage | None,
    *,
    all_see_folder: Callable[[], bool],
    log: Callable[[str], None],
) -> Choice:
    """mode: `checkpoint.resume`; another run's place counts until this run has a checkpoint. storage, remote: this
    run's. An older one of this run is gone back to once: the same line again, a requeue, goes on from the newest.
    log: on rank 0, how far it is, and when nothing is whole.

    CheckpointError when there must be one and none is whole, or where one cannot be read. UserError for a path
    that holds no checkpoints.
    """
    if mode == "never":
        return Choice()
    own = mode in ("auto", "must")
    only: CommitRef | None = None
    named: frozenset[CommitRef] = frozenset()
    places = Places(storage, remote, storage)
    if not own:
        place, only, own = dist.on_main(lambda: _located(mode, storage, remote))
        if not own:
            # the same line again, a requeue: what this run has done since is not done a second time
            mine = choose("auto", storage, remote, all_see_folder=all_see_folder, log=lambda text: None)
            if mine.resumed is not None:
                if dist.is_main():
                    log(f"checkpoint.resume ({mode}): this run has checkpoints of its own and goes on from them")
                return mine
            places = _elsewhere(place, storage)
        elif only is not None:
            named = frozenset([only])
            if dist.on_main(lambda: _gone_back_already(mode, places)):
                only = None
                if dist.is_main():
                    log(
                        f"checkpoint.resume ({mode}): this run has gone back there before, and goes on from its newest "
                        "checkpoint; to go back once more, name it in the other way (its commit/*.json, its ckpt/*/*)"
                    )
    answer = resolve(places, only, shared=all_see_folder, log=log)
    damaged = frozenset(each.ref for each in answer.skipped) if own else frozenset()
    if answer.found is None:
        _nothing_found(mode, places, answer, log)
        return Choice(damaged=damaged)
    resumed = _open(places, answer, all_see_folder)
    protect = named | {answer.found.commit.ref} if own else named
    return Choice(resumed, protect, own and (remote is None or answer.in_remote), damaged)


def _located(path: str, storage: LocalStorage, remote: Storage | None) -> tuple[str, CommitRef | None, bool]:
    """As `locate`, and whether the place is this run's own."""
    place, only = locate(path)
    own = [
        each.root.resolve().as_posix() if isinstance(each, LocalStorage) else each.url
        for each in (storage, remote)
        if each is not None
    ]
    return place, only, place in own


def _gone_back_already(mode: str, places: Places) -> bool:
    """Whether the newest checkpoint is from a process with the same `checkpoint.resume`. CheckpointError."""
    newest = max(itertools.chain(*list_places(places)), default=None)
    main = places.remote or places.local  # where leases are taken
    if newest is None or main is None:
        return False
    return readable(main, lambda main: lease.resume_of(main, newest.epoch)) == mode


def _elsewhere(place: str, fetch_to: LocalStorage) -> Places:
    """Another run's checkpoints: a folder is read where it is, a remote one fetched to this run's folder."""
    storage = open_storage(place)
    return Places(storage, None, storage) if isinstance(storage, LocalStorage) else Places(None, storage, fetch_to)


def _open(places: Places, answer: Resolution, all_see_folder: Callable[[], bool]) -> Resumed:
    local, remote, found = places.local, places.remote, answer.found
    here = answer.in_remote and all_see_folder()
    if here and local is not None and remote is not None and found is not None and not answer.in_local:
        dist.on_main(lambda: keep_locally(local, remote, found))
    return open_found(places, answer)


def _nothing_found(mode: str, places: Places, answer: Resolution, log: Callable[[str], None]) -> None:
    where = " and ".join(each.url for each in places[:2] if each is not None)
    reasons = "".join(f"\n  {each}" for each in answer.skipped)
    what = f"none of the checkpoints under {where} is whole:{reasons}" if reasons else ""
    if mode != "auto":
        remedy = "set checkpoint.resume to auto to start fresh" if mode == "must" else "choose another"
        raise CheckpointError(f"{what or f'there is no checkpoint under {where}'}\n{remedy}")
    if what and dist.is_main():
        log(f"{what}\nSTARTING FRESH, from step 0")
