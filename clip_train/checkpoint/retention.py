"""Remove old checkpoints and the leftovers of killed saves. No torch."""

import contextlib
import shutil
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

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
# Files of saves that were never committed are removed when they are older than this.
ORPHAN_SECONDS = 3600.0
HEADROOM = 64 << 20  # bytes that must stay free beside a checkpoint, for manifests and others


@dataclass(frozen=True)
class Policy:
    """What to keep, and where: the first message to a checkpoint writer."""

    config: CheckpointConfig
    lease: Lease = NO_LEASE  # of this run's process
    folder: str = ""
    shared: bool = True  # all ranks see `folder`, so checkpoints are committed there too
    protect: set[CommitRef] = field(default_factory=set)  # never removed: the one resumed from
    orphan_seconds: float = ORPHAN_SECONDS


def commits_to_keep(
    commits: list[CommitRef], policy: Policy, scores: dict[CommitRef, float]
) -> set[CommitRef]:
    """The checkpoints to keep; the next save removes the others. commits: newest first.

    scores: the evaluations of `keep_best` so far.
    """
    config = policy.config
    keep = set(commits[: config.keep_last]) | policy.protect
    if config.keep_every is not None:
        keep |= {ref for ref in commits if ref.step % config.keep_every == 0}
    scored = [ref for ref in commits if ref in scores]
    if scored:
        sign = -1 if (config.keep_best or "").startswith("-") else 1
        keep.add(max(scored, key=lambda ref: (sign * scores[ref], ref.step)))
    return keep


def apply_retention(
    storage: Storage,
    policy: Policy,
    scores: dict[CommitRef, float],
    in_flight: Collection[str] = (),
) -> Failures:
    """Remove old checkpoints and orphans (attempts without a marker). Called by rank 0's checkpoint
    writer after a commit.

    scores: as in `commits_to_keep`. in_flight: attempts that may still be committed in another
    store, from their files here. Returns what could not be removed. OSError if nothing can be
    listed, or if a remote store is down; FencedError.

    It removes the marker first and the data second, so a kill in between leaves an orphan, not a
    broken checkpoint. It never removes a checkpoint with a higher epoch than this writer's: another
    process may have taken the lease since this one read it.
    """
    commits = list_commits(storage)
    failures: Failures = {}
    if not commits:
        return failures
    check_lease(storage, policy.lease)
    keep = commits_to_keep(commits, policy, scores)
    epoch = policy.lease.epoch
    removed = set()
    for ref in commits:
        if ref in keep or ref.epoch > epoch:
            continue
        check_lease(storage, policy.lease)
        with noting_failure(storage, ref.name, failures):
            storage.delete(ref.name)
            removed.add(ref)
    newest = max([ref.step for ref in commits if ref.epoch == epoch], default=-1)
    now = time.time()
    # by commit that is kept: the folder that its marker names; None if that cannot be read
    named: dict[CommitRef, str | None] = dict.fromkeys(ref for ref in commits if ref in keep)
    for ref in named:
        with noting_failure(storage, ref.name, failures):
            named[ref] = prefix_of(storage, ref)
    for (ref, attempt), files in attempts(storage, failures).items():
        # Pending: a successor or this process may still commit it. No rank still writes an attempt
        # older than this process's newest commit, because each rank writes one save at a time.
        pending = ref.epoch > epoch or (ref.epoch == epoch and ref.step >= newest)
        if pending or attempt in in_flight or is_named(named, ref, attempt):
            continue
        grace = 0.0 if ref.epoch == epoch else policy.orphan_seconds
        modified = max(entry.modified for entry in files)
        if ref not in removed and now - modified < grace:
            continue
        with noting_failure(storage, attempt, failures):
            # a marker may have been written since the commits were listed
            if (
                ref not in removed
                and storage.exists(ref.name)
                and is_named({ref: prefix_of(storage, ref)}, ref, attempt)
            ):
                continue
            _remove(storage, attempt)
    return failures


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


def attempts(storage: Storage, failures: Failures) -> dict[tuple[CommitRef, str], list[Entry]]:
    """The files of each attempt, by commit marker and folder. Includes attempts that are still
    being written. failures: gets the folders on a disk that cannot be listed. OSError.
    """
    files: dict[tuple[CommitRef, str], list[Entry]] = defaultdict(list)
    entries: list[Entry] = []
    if isinstance(storage, LocalStorage):
        for parent in ("ckpt", f"{FETCHED}ckpt"):
            for folder in sorted(storage.path(parent).glob("*/*")):
                name = folder.relative_to(storage.root).as_posix()
                with noting_failure(storage, name, failures):
                    entries += storage.list(name, unfinished=True)
    else:
        entries = storage.list("ckpt")
    for entry in entries:
        attempt = "/".join(entry.name.removeprefix(FETCHED).split("/")[:3])
        ref = parse_prefix(attempt)
        if ref is not None:
            files[ref, attempt].append(entry)
    return files


def is_named(named: dict[CommitRef, str | None], ref: CommitRef, attempt: str) -> bool:
    """Whether a marker names the attempt. An unreadable marker (None) may name any attempt of its
    step."""
    return ref in named and named[ref] in (attempt, None)


def _remove(storage: Storage, attempt: str) -> None:
    storage.delete_tree(attempt)
    if isinstance(storage, LocalStorage):
        storage.delete_tree(FETCHED + attempt)
        with contextlib.suppress(OSError):  # not empty: the step has another attempt
            storage.path(attempt).parent.rmdir()


def remove_leftovers(storage: LocalStorage, epoch: int) -> Failures:
    """On a disk that not all ranks share: remove the files that earlier processes (with a lower
    epoch) wrote or fetched. Returns what could not be removed."""
    failures: Failures = {}
    for ref, attempt in attempts(storage, failures):
        with noting_failure(storage, attempt, failures):
            if ref.epoch < epoch and not storage.exists(ref.name):
                _remove(storage, attempt)
    return failures


def check_space(folder: Path, needed: int) -> None:
    """Make `folder`. CheckpointError if `needed` bytes do not fit on its disk."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed + HEADROOM > free:
        raise CheckpointError(
            f"not enough space for a checkpoint at {folder}: {needed / 1e9:.3f} GB needed "
            f"(and {HEADROOM / 1e9:.3f} GB to spare), {free / 1e9:.3f} GB free; make room, or "
            "lower checkpoint.keep_last"
        )
