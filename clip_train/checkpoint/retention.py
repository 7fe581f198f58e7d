"""What may be removed: old checkpoints, and what killed saves left behind."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from clip_train.checkpoint import lease as leases
from clip_train.checkpoint.commit import list_commits, prefix_of, read_checked
from clip_train.checkpoint.manifest import CommitRef, attempt_of, parse_prefix
from clip_train.errors import CheckpointError
from clip_train.storage.base import Entry, Storage
from clip_train.storage.local import LocalStorage

HEADROOM = 64 << 20  # bytes left free beside a checkpoint: manifests, and whoever else writes there
SWEEP_RIGHT = "s3:ListBucketMultipartUploads"
SWEEP_REMEDY = "or let a lifecycle rule of the bucket end incomplete uploads: their parts cost, and are not listed"


@dataclass(frozen=True)
class Policy:
    """What stays. protect: whatever happens (the one resumed from). damaged: they do not count as kept."""

    keep_last: int
    keep_every: int | None = None  # steps
    keep_best: str | None = None  # a metric's name; with a minus in front the lowest is best
    orphan_grace_seconds: float = 3600.0
    epoch: int = 0  # of the writer
    token: str = ""  # its lease's
    protect: set[CommitRef] = field(default_factory=set)
    damaged: set[CommitRef] = field(default_factory=set)

    @property
    def lease(self) -> leases.Lease:
        return leases.Lease(self.epoch, self.token)


def verdicts(
    commits: list[CommitRef], policy: Policy, metrics: dict[CommitRef, float]
) -> dict[CommitRef, str]:
    """Why each checkpoint stays; those that are not in it go at the next save. commits: newest first."""
    why: dict[CommitRef, str] = {}
    good = [ref for ref in commits if ref not in policy.damaged]
    for ref in good[: policy.keep_last]:
        why[ref] = f"one of the {policy.keep_last} newest"
    if policy.keep_every is not None:
        for ref in good:
            if ref.step % policy.keep_every == 0:
                why.setdefault(ref, f"a multiple of {policy.keep_every} steps")
    scored = {ref: metrics[ref] for ref in good if math.isfinite(metrics.get(ref, math.nan))}
    if scored:
        lowest = (policy.keep_best or "").startswith("-")
        best = min(scored, key=lambda ref: (scored[ref] if lowest else -scored[ref], -ref.step))
        why.setdefault(best, f"the best {policy.keep_best} ({scored[best]:.6g})")
    for ref in commits:
        if ref in policy.protect:
            why.setdefault(ref, "the one resumed from")
        elif ref in policy.damaged and (
            len(good) < policy.keep_last or ref > good[policy.keep_last - 1]
        ):
            why.setdefault(ref, f"damaged; goes when {policy.keep_last} good ones are newer")
    return why


def read_metrics(
    storage: Storage, commits: Collection[CommitRef], name: str | None
) -> dict[CommitRef, float]:
    """What the evaluation `name` came to, of the checkpoints that have one. OSError."""
    out: dict[CommitRef, float] = {}
    there = {entry.name for entry in storage.list("metric")} if name is not None else set()
    for ref in commits:
        if name is not None and ref.metric_name in there:
            with contextlib.suppress(FileNotFoundError, ValueError):
                value = read_checked(storage, ref.metric_name)["values"].get(name.removeprefix("-"))
                if value is not None:
                    out[ref] = float(value)
    return out


def apply_retention(
    storage: Storage,
    policy: Policy,
    in_flight: Collection[str] = (),
    note: Callable[[str], None] = lambda text: None,
) -> list[CommitRef]:
    """Rank 0's checkpoint writer, after a commit: returns the checkpoints removed. OSError; FencedError.

    in_flight: attempts that may still be committed in another store, from their files here. note: takes what cannot be
    removed and does not matter for the rest.

    The marker goes first and the data second, so a kill in between leaves an orphan for the next time, not a
    broken checkpoint. What has a higher epoch than this writer's is never touched: it may have slept since it
    asked for its lease.
    """
    commits = list_commits(storage)
    if not any(ref not in policy.damaged for ref in commits):
        return []
    leases.check(storage, policy.lease)
    kept = verdicts(commits, policy, read_metrics(storage, commits, policy.keep_best))
    removed = [ref for ref in commits if ref not in kept and ref.epoch <= policy.epoch]
    for ref in removed:
        leases.check(storage, policy.lease)
        storage.delete(ref.name)
        storage.delete(ref.metric_name)
    newest = max((ref.step for ref in commits if ref.epoch == policy.epoch), default=-1)
    _remove_orphans(
        storage, policy, newest, [ref for ref in commits if ref in kept], set(removed), in_flight
    )
    try:
        storage.sweep(
            storage.clock() - max(policy.orphan_grace_seconds, 1.0),
            lambda name: (
                attempt_of(name) in in_flight
                or _under_way(parse_prefix(attempt_of(name)), policy, newest)
            ),
            # a bucket may be others' as well, and only data are large enough for an upload in parts
            prefix="" if isinstance(storage, LocalStorage) else "ckpt",
        )
    except OSError as e:  # unfinished uploads only cost
        remedy = f" ({SWEEP_RIGHT}), {SWEEP_REMEDY}" if "the right" in str(e) else ""
        note(
            f"unfinished uploads under {storage.url} cannot be listed: {type(e).__name__}: {e}{remedy}"
        )
    return removed


def _under_way(ref: CommitRef | None, policy: Policy, newest: int) -> bool:
    """Still to be committed: by a successor, or by this process, whose ranks have all done with what is older than its
    newest commit: each rank's saves go one by one."""
    if ref is None:
        return False
    return ref.epoch > policy.epoch or (ref.epoch == policy.epoch and ref.step >= newest)


def _remove_orphans(
    storage: Storage,
    policy: Policy,
    newest: int,
    kept: list[CommitRef],
    removed: set[CommitRef],
    in_flight: Collection[str],
) -> None:
    """Attempts that no marker names: those just removed, and those that nobody has written to for the grace. Also what
    preflights and evaluations have left behind."""
    local = isinstance(storage, LocalStorage)
    files: dict[str, list[Entry]] = defaultdict(list)  # of each attempt
    for entry in [*storage.list("ckpt"), *(storage.list("tmp") if local else [])]:
        files[attempt_of(entry.name)].append(entry)
    named = {ref: prefix_of(storage, ref) for ref in kept}
    now = storage.clock()
    for attempt, entries in sorted(files.items()):
        ref, modified = parse_prefix(attempt), max(entry.modified for entry in entries)
        if ref is None or attempt in in_flight or _under_way(ref, policy, newest):
            continue
        # a marker that makes no sense could mean any attempt of its epoch and step: leave them all
        if ref in named and named[ref] in (attempt, None):
            continue
        grace = 0.0 if ref.epoch == policy.epoch else policy.orphan_grace_seconds
        # its marker may have come since they were listed
        late = now - modified >= grace and not (
            storage.exists(ref.name) and prefix_of(storage, ref) in (attempt, None)
        )
        if late or ref in removed:
            storage.delete_tree(attempt)
            for entry in entries if local else []:
                _delete(storage, entry.name)
    for entry in [*storage.list("preflight"), *storage.list("metric")]:
        ref, old = (
            CommitRef.of_metric(entry.name),
            now - entry.modified >= policy.orphan_grace_seconds,
        )
        over = old or (ref is not None and ref.epoch == policy.epoch)
        if (
            over
            and not _under_way(ref, policy, newest)
            and not (ref is not None and storage.exists(ref.name))
        ):
            storage.delete(entry.name)


def _delete(storage: Storage, name: str) -> None:
    """A file of an attempt; on a disk with the folders that are empty without it."""
    storage.delete(name)
    if isinstance(storage, LocalStorage) and not name.startswith("tmp/"):
        with contextlib.suppress(OSError):  # another file is there
            storage.path(name).parent.rmdir()
        with contextlib.suppress(OSError):
            storage.path(name).parent.parent.rmdir()


def remove_own_files(
    storage: LocalStorage, rank: int, policy: Policy, in_flight: Collection[str]
) -> None:
    """Where ranks do not share the disk, each clears up after itself: all but its newest files go, and halves.
    Of what was there before this process no rank has any more use: it may be of ranks that are elsewhere now."""
    files: list[tuple[str, str, CommitRef]] = []
    for entry in [*storage.list("ckpt"), *storage.list("tmp")]:
        attempt = attempt_of(entry.name)
        if (ref := parse_prefix(attempt)) is not None:
            files.append((entry.name, attempt, ref))
    newest = sorted({ref for name, _, ref in files if name.startswith("ckpt/")}, reverse=True)[
        : policy.keep_last
    ]
    for name, attempt, ref in files:
        mine = f"rank{rank:05d}." in name or ref.epoch < policy.epoch
        if mine and attempt not in in_flight and (ref not in newest or name.startswith("tmp/")):
            _delete(storage, name)
    storage.sweep(
        storage.clock() - max(policy.orphan_grace_seconds, 1.0),
        lambda name: attempt_of(name) in in_flight,
    )


def free_bytes(folder: Path) -> int:
    """Free space on the disk of `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(folder).free


def check_space(folder: str | Path, needed: int, free: int) -> None:
    """CheckpointError when `needed` bytes will not fit into `free`."""
    if needed + HEADROOM > free:
        raise CheckpointError(
            f"not enough space for a checkpoint at {folder}: {needed / 1e9:.3f} GB needed "
            f"(and {HEADROOM / 1e9:.3f} GB to spare), {free / 1e9:.3f} GB free; make room, or lower "
            "checkpoint.keep_last"
        )
