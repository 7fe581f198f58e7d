"""Remove old checkpoints and the leftovers of killed saves. No torch."""

import contextlib
import shutil
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from clip_train.checkpoint.commit import (
    NO_LEASE,
    Lease,
    check_lease,
    error_text,
    list_commits,
    prefix_of,
)
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manifest import FETCHED, CommitRef, parse_prefix
from clip_train.errors import CheckpointError
from clip_train.storage.base import Entry, Storage
from clip_train.storage.local import LocalStorage

Failures = dict[str, str]  # by name of a file or folder: why it could not be removed
# Files that an earlier process wrote for a save without a commit are removed when they are older.
ORPHAN_SECONDS = 3600.0
HEADROOM = 64 << 20  # bytes that must stay free beside a checkpoint, for manifests and others


@dataclass(frozen=True)
class WriterSettings:
    """The settings of a checkpoint writer. Its rank sends them first."""

    config: CheckpointConfig
    lease: Lease = NO_LEASE  # of this run's process
    folder: str = ""  # `<run.dir>/checkpoints`
    shared: bool = True  # all ranks see `folder`, so checkpoints are committed there too
    protect: set[CommitRef] = field(default_factory=set)  # never removed: the one resumed from
    orphan_seconds: float = ORPHAN_SECONDS


class Attempt(NamedTuple):
    """One save that was begun, whether it was committed or not."""

    ref: CommitRef  # the marker that commits it
    folder: str  # such as ckpt/s0000000300/e000002-3f9ac07d


def commits_to_keep(
    commits: list[CommitRef], settings: WriterSettings, scores: dict[CommitRef, float]
) -> set[CommitRef]:
    """The checkpoints to keep; the next save removes the others. commits: newest first.

    scores: the evaluations of `keep_best` so far.
    """
    config = settings.config
    keep = set(commits[: config.keep_last]) | settings.protect
    if config.keep_every is not None:
        keep |= {ref for ref in commits if ref.step % config.keep_every == 0}
    scored = [ref for ref in commits if ref in scores]
    if scored:
        sign = 1
        if config.keep_best is not None and config.keep_best.startswith("-"):
            # `keep_best: -image_to_text_median_rank` keeps the checkpoint with the lowest rank
            sign = -1
        keep.add(max(scored, key=lambda ref: (sign * scores[ref], ref.step)))
    return keep


def apply_retention(
    storage: Storage,
    settings: WriterSettings,
    scores: dict[CommitRef, float],
    in_flight: Collection[str] = (),
) -> Failures:
    """Remove old checkpoints and orphans (attempts without a marker). Called by rank 0's checkpoint
    writer after each save, also after a local commit that failed.

    It removes the marker first and the data second, so a kill in between leaves an orphan, not a
    broken checkpoint. It never removes a checkpoint with a higher epoch than this writer's: another
    process may have taken the lease since this one read it.

    Args:
        scores: as in `commits_to_keep`.
        in_flight: folders of attempts that this process may still commit, in this store or another
            one. Their files stay.

    Returns:
        What could not be removed.

    Raises:
        OSError: nothing can be listed, or a remote store is down.
        FencedError: another process has taken the lease.
    """
    commits = list_commits(storage)
    failures: Failures = {}
    if not commits:
        return failures
    check_lease(storage, settings.lease)
    keep = commits_to_keep(commits, settings, scores)
    epoch = settings.lease.epoch
    removed = set()
    for ref in commits:
        if ref in keep or ref.epoch > epoch:
            continue
        check_lease(storage, settings.lease)
        with noting_failure(storage, ref.name, failures):
            storage.delete(ref.name)
            removed.add(ref)
    newest_step = max([ref.step for ref in commits if ref.epoch == epoch], default=-1)
    now = time.time()
    # by commit that is kept: the folder that its marker names; None if the marker cannot be read
    marker_folders: dict[CommitRef, str | None] = {}
    for ref in commits:
        if ref in keep:
            marker_folders[ref] = None
            with noting_failure(storage, ref.name, failures):
                marker_folders[ref] = prefix_of(storage, ref)
    for attempt, files in attempts(storage, failures).items():
        ref, folder = attempt
        # it may still be committed
        if is_pending(ref, epoch, newest_step) or folder in in_flight:
            continue
        # it is a checkpoint that is kept
        if ref in marker_folders and may_be_committed(folder, marker_folders[ref]):
            continue
        # All ranks of this process have finished the attempts that are not pending. A rank of an
        # earlier process may still be writing.
        grace = 0.0 if ref.epoch == epoch else settings.orphan_seconds
        modified = max(entry.modified for entry in files)
        if ref not in removed and now - modified < grace:
            continue
        with noting_failure(storage, folder, failures):
            # a marker may have been written since the commits were listed
            has_marker = ref not in removed and storage.exists(ref.name)
            if not (has_marker and may_be_committed(folder, prefix_of(storage, ref))):
                _remove(storage, folder)
    return failures


def is_pending(ref: CommitRef, epoch: int, newest_step: int) -> bool:
    """Whether a process may still write and commit an attempt of `ref`.

    - A higher epoch is a successor's: it may commit.
    - A lower epoch's process may not commit any more.
    - In this process's own epoch, all ranks have finished each attempt older than the newest
      commit, because a rank writes one save at a time.

    epoch: of this process. newest_step: of its newest commit; -1 if it has none.
    """
    return ref.epoch > epoch or (ref.epoch == epoch and ref.step >= newest_step)


@contextlib.contextmanager
def noting_failure(storage: Storage, name: str, failures: Failures) -> Iterator[None]:
    """Note an OSError inside the block as the failure of `name`, so that the caller continues with
    other names.

    In a remote store, only a denied request is noted; other errors are raised. If the store is
    down, each further request would be retried for minutes.
    """
    try:
        yield
    except OSError as e:
        if not isinstance(storage, LocalStorage) and not isinstance(e, PermissionError):
            raise
        failures[name] = error_text(e)


def attempts(storage: Storage, failures: Failures) -> dict[Attempt, list[Entry]]:
    """The files of each attempt, also of attempts that are still being written. Raises OSError.

    failures: gets the folders on a disk that cannot be listed.
    """
    files: dict[Attempt, list[Entry]] = defaultdict(list)
    entries: list[Entry] = []
    if isinstance(storage, LocalStorage):
        for parent in ("ckpt", f"{FETCHED}ckpt"):
            for path in sorted(storage.path(parent).glob("*/*")):
                name = path.relative_to(storage.root).as_posix()
                with noting_failure(storage, name, failures):
                    entries += storage.list(name, unfinished=True)
    else:
        entries = storage.list_all("ckpt")
    for entry in entries:
        # ckpt/s0000000300/e000002-3f9ac07d/rank00000.safetensors: the first three parts
        parts = entry.name.removeprefix(FETCHED).split("/")
        folder = "/".join(parts[:3])
        ref = parse_prefix(folder)
        if ref is not None:
            files[Attempt(ref, folder)].append(entry)
    return files


def may_be_committed(folder: str, marker_folder: str | None) -> bool:
    """Whether an attempt may be the one that the marker of its step commits.

    marker_folder: the folder that the marker names; None: the marker cannot be read.
    """
    return marker_folder is None or marker_folder == folder


def _remove(storage: Storage, folder: str) -> None:
    storage.delete_tree(folder)
    if isinstance(storage, LocalStorage):
        storage.delete_tree(FETCHED + folder)
        for name in (folder, FETCHED + folder):
            # not empty if the step has another attempt
            with contextlib.suppress(OSError):
                storage.path(name).parent.rmdir()


def remove_leftovers(storage: LocalStorage, epoch: int) -> Failures:
    """On a disk that not all ranks share: remove the files that earlier processes (with a lower
    epoch) wrote or fetched. Attempts with a marker stay: the ranks shared the disk when they were
    committed. Returns what could not be removed."""
    failures: Failures = {}
    for ref, folder in attempts(storage, failures):
        with noting_failure(storage, folder, failures):
            if ref.epoch < epoch and not storage.exists(ref.name):
                _remove(storage, folder)
    return failures


def check_space(folder: Path, needed: int) -> None:
    """Make `folder`. Raises CheckpointError if `needed` bytes do not fit on its disk."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed + HEADROOM > free:
        raise CheckpointError(
            f"not enough space for a checkpoint at {folder}: {needed / 1e9:.3f} GB needed "
            f"(and {HEADROOM / 1e9:.3f} GB to spare), {free / 1e9:.3f} GB free; make room, or "
            "lower checkpoint.keep_last"
        )
