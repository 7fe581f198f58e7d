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
    check,
    explain,
    list_commits,
    prefix_of,
)
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manifest import FETCHED, CommitRef, parse_prefix
from clip_train.errors import CheckpointError
from clip_train.storage.base import Entry, Storage
from clip_train.storage.local import LocalStorage

Failures = dict[str, str]  # what could not be removed, and why
# Files of saves that were never committed are removed when they are older than this.
ORPHAN_SECONDS = 3600.0
HEADROOM = 64 << 20  # bytes left free beside a checkpoint: manifests, and other writers


@dataclass(frozen=True)
class Policy:
    """What to keep, and where: the first message to a checkpoint writer."""

    config: CheckpointConfig
    lease: Lease = NO_LEASE  # the writer's
    folder: str = ""
    shared: bool = True  # all ranks see `folder`, so checkpoints are committed there too
    protect: set[CommitRef] = field(default_factory=set)  # stay always (the one resumed from)
    orphan_seconds: float = ORPHAN_SECONDS


def kept(
    commits: list[CommitRef], policy: Policy, scores: dict[CommitRef, float]
) -> set[CommitRef]:
    """The checkpoints to keep; the next save removes the others. commits: newest first.

    scores: the evaluations of `keep_best` so far.
    """
    config = policy.config
    stay = set(commits[: config.keep_last]) | policy.protect
    if config.keep_every is not None:
        stay |= {ref for ref in commits if ref.step % config.keep_every == 0}
    scored = [ref for ref in commits if ref in scores]
    if scored:
        sign = -1 if (config.keep_best or "").startswith("-") else 1
        stay.add(max(scored, key=lambda ref: (sign * scores[ref], ref.step)))
    return stay


def apply_retention(
    storage: Storage,
    policy: Policy,
    scores: dict[CommitRef, float],
    in_flight: Collection[str] = (),
) -> Failures:
    """Remove old checkpoints and orphans; rank 0's checkpoint writer, after a commit.

    scores: as in `kept`. in_flight: attempts that may still be committed in another store, from
    their files here. Returns what could not be removed; all else was. OSError if nothing can be
    listed, or if a remote store is down; FencedError.

    It removes the marker first and the data second, so a kill in between leaves an orphan, not a
    broken checkpoint. Never removes anything with a higher epoch than this writer's: the writer may
    have slept since it asked for its lease.
    """
    commits = list_commits(storage)
    failures: Failures = {}
    if not commits:
        return failures
    check(storage, policy.lease)
    stay = kept(commits, policy, scores)
    epoch = policy.lease.epoch
    removed = set()
    for old in commits:
        if old in stay or old.epoch > epoch:
            continue
        check(storage, policy.lease)
        with one_of_many(storage, old.name, failures):
            storage.delete(old.name)
            removed.add(old)
    newest = max([ref.step for ref in commits if ref.epoch == epoch], default=-1)
    now = time.time()
    # by commit: the folder that its marker names
    named: dict[CommitRef, str | None] = dict.fromkeys(ref for ref in commits if ref in stay)
    for ref in named:
        with one_of_many(storage, ref.name, failures):
            named[ref] = prefix_of(storage, ref)
    for (ref, attempt), files in attempts(storage, failures).items():
        # A successor or this process may still commit it. No rank still writes an attempt older
        # than this process's newest commit, because each rank writes its saves one at a time.
        pending = ref.epoch > epoch or (ref.epoch == epoch and ref.step >= newest)
        if pending or attempt in in_flight or is_named(named, ref, attempt):
            continue
        grace = 0.0 if ref.epoch == epoch else policy.orphan_seconds
        modified = max(entry.modified for entry in files)
        if ref not in removed and now - modified < grace:
            continue
        with one_of_many(storage, attempt, failures):
            # a marker may have appeared since the commits were listed
            if (
                ref not in removed
                and storage.exists(ref.name)
                and is_named({ref: prefix_of(storage, ref)}, ref, attempt)
            ):
                continue
            _remove(storage, attempt)
    return failures


@contextlib.contextmanager
def one_of_many(storage: Storage, name: str, failures: Failures) -> Iterator[None]:
    """An OSError inside the block is about `name` alone, and is noted: the others are removed.

    In a remote store that holds for a denied request only. If the store is down, each further
    request would be retried for minutes.
    """
    try:
        yield
    except OSError as e:
        if not isinstance(storage, LocalStorage) and not isinstance(e, PermissionError):
            raise
        failures[name] = explain(e)


def attempts(storage: Storage, failures: Failures) -> dict[tuple[CommitRef, str], list[Entry]]:
    """The files of each attempt, by commit marker and folder. Includes attempts that are still
    being written. failures: gets the folders on a disk that cannot be listed. OSError.
    """
    files: dict[tuple[CommitRef, str], list[Entry]] = defaultdict(list)
    entries: list[Entry] = []
    if isinstance(storage, LocalStorage):
        for place in ("ckpt", f"{FETCHED}ckpt"):
            for folder in sorted(storage.path(place).glob("*/*")):
                name = folder.relative_to(storage.root).as_posix()
                with one_of_many(storage, name, failures):
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
    """Whether a marker names the attempt; an unreadable one (None) may name any of its step."""
    return ref in named and named[ref] in (attempt, None)


def _remove(storage: Storage, attempt: str) -> None:
    storage.delete_tree(attempt)
    if isinstance(storage, LocalStorage):
        storage.delete_tree(FETCHED + attempt)
        with contextlib.suppress(OSError):  # the step has another attempt
            storage.path(attempt).parent.rmdir()


def remove_leftovers(storage: LocalStorage, epoch: int) -> Failures:
    """On a disk that not all ranks share: remove what was written or fetched before. Returns what
    could not be removed."""
    failures: Failures = {}
    for ref, attempt in attempts(storage, failures):
        with one_of_many(storage, attempt, failures):
            if ref.epoch < epoch and not storage.exists(ref.name):
                _remove(storage, attempt)
    return failures


def check_space(folder: Path, needed: int) -> None:
    """CheckpointError when `needed` bytes will not fit on the disk of `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed + HEADROOM > free:
        raise CheckpointError(
            f"not enough space for a checkpoint at {folder}: {needed / 1e9:.3f} GB needed "
            f"(and {HEADROOM / 1e9:.3f} GB to spare), {free / 1e9:.3f} GB free; make room, or "
            "lower checkpoint.keep_last"
        )
