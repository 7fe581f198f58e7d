"""What may be removed: old checkpoints, and what killed saves left behind."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from clip_train.checkpoint import lease as leases
from clip_train.checkpoint import manifest
from clip_train.checkpoint.commit import list_commits, prefix_of, read_checked
from clip_train.checkpoint.manifest import CommitRef, attempt_of, parse_prefix
from clip_train.errors import CheckpointError
from clip_train.storage.base import Storage
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

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "protect": sorted(self.protect), "damaged": sorted(self.damaged)}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Policy:
        sets = {key: {CommitRef(*ref) for ref in body[key]} for key in ("protect", "damaged")}
        return cls(**{**body, **sets})


class Attempts(NamedTuple):
    """What the writer knows of its own attempts to save."""

    in_flight: set[str]  # they may still be committed
    done: int  # with those at this step and at earlier ones all ranks have finished, but for those in flight
    patience_seconds: float  # any other of this process may still be under way so long


def verdicts(commits: list[CommitRef], policy: Policy, metrics: dict[CommitRef, float]) -> dict[CommitRef, str]:
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
        elif ref in policy.damaged and (len(good) < policy.keep_last or ref > good[policy.keep_last - 1]):
            why.setdefault(ref, f"damaged; goes when {policy.keep_last} good ones are newer")
    return why


def read_metrics(storage: Storage, commits: Collection[CommitRef], name: str | None) -> dict[CommitRef, float]:
    """What the evaluation `name` came to, of the checkpoints that have one. OSError."""
    out: dict[CommitRef, float] = {}
    if name is None:
        return out
    there = {entry.name for entry in storage.list("metric")}
    for ref in commits:
        if ref.metric_name not in there:
            continue
        try:
            value = read_checked(storage, ref.metric_name)["values"].get(name.removeprefix("-"))
        except (FileNotFoundError, ValueError):
            continue
        if value is not None:
            out[ref] = float(value)
    return out


def apply_retention(
    storage: Storage,
    policy: Policy,
    own: Callable[[], Attempts] = lambda: Attempts(set(), -1, 0.0),
    note: Callable[[str], None] = lambda text: None,
) -> list[CommitRef]:
    """Rank 0's checkpoint writer, after a commit: returns the checkpoints removed. OSError; FencedError.

    note: takes what cannot be removed and does not matter for the rest.

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
    _remove_orphans(storage, policy, [ref for ref in commits if ref in kept], own, set(removed))
    _remove_small_orphans(storage, policy, own)
    leases.forget_old(storage, policy.epoch)
    _sweep(storage, policy, own, note)
    return removed


def _remove_orphans(
    storage: Storage, policy: Policy, kept: list[CommitRef], own: Callable[[], Attempts], removed: set[CommitRef]
) -> None:
    """Attempts that no marker names: those just removed, and those that nobody has written to for the grace."""
    files = storage.list("ckpt")
    attempts = own()  # after the listing: what is in it and has begun since is known to be in flight
    newest: dict[str, float] = {}  # attempt -> when it was last written to, by the store's clock
    for entry in files:
        attempt = attempt_of(entry.name)
        newest[attempt] = max(newest.get(attempt, 0.0), entry.modified)
    named = {ref: prefix_of(storage, ref) for ref in kept}
    now = storage.clock()
    for attempt, modified in sorted(newest.items()):
        ref = parse_prefix(attempt)
        if ref is None or _is_anothers(attempt, policy, attempts):
            continue
        # a marker that makes no sense could mean any attempt of its epoch and step: leave them all
        if ref in named and named[ref] in (attempt, None):
            continue
        grace = policy.orphan_grace_seconds
        if ref.epoch == policy.epoch:
            grace = 0.0 if ref.step <= attempts.done else max(grace, attempts.patience_seconds)
        # a listing may hide the marker: it is asked for by its name as well
        if ref in removed or (now - modified >= grace and not _is_named(storage, ref, attempt)):
            storage.delete_tree(attempt)
    if isinstance(storage, LocalStorage):
        _tidy_folders(storage, now - policy.orphan_grace_seconds, own, kept[0])


def _sweep(storage: Storage, policy: Policy, own: Callable[[], Attempts], note: Callable[[str], None]) -> None:
    """Unfinished uploads, which only cost: where they cannot be listed the rest goes on without."""
    now, spared = storage.clock(), own()
    try:
        storage.sweep(
            now - max(policy.orphan_grace_seconds, 1.0),
            lambda name: _is_anothers(attempt_of(name), policy, spared),
            # a bucket may be others' as well, and only data are large enough for an upload in parts
            prefix="" if isinstance(storage, LocalStorage) else "ckpt",
        )
    except OSError as e:
        remedy = f" ({SWEEP_RIGHT}), {SWEEP_REMEDY}" if "the right" in str(e) else ""
        note(f"unfinished uploads under {storage.url} cannot be listed: {type(e).__name__}: {e}{remedy}")


def _is_anothers(attempt: str, policy: Policy, own: Attempts) -> bool:
    """Still to be committed by this process or by its successor."""
    ref = parse_prefix(attempt)
    return attempt in own.in_flight or (ref is not None and ref.epoch > policy.epoch)


def _is_named(storage: Storage, ref: CommitRef, attempt: str) -> bool:
    return storage.exists(ref.name) and prefix_of(storage, ref) in (attempt, None)


def _remove_small_orphans(storage: Storage, policy: Policy, own: Callable[[], Attempts]) -> None:
    """What preflights and evaluations of runs that were killed have left behind."""
    found = [*storage.list("preflight"), *storage.list("metric")]
    attempts, now = own(), storage.clock()
    under_way = {parse_prefix(attempt) for attempt in attempts.in_flight}
    for entry in found:
        ref = CommitRef.of_metric(entry.name)
        if now - entry.modified < max(policy.orphan_grace_seconds, attempts.patience_seconds) or ref in under_way:
            continue
        if ref is None or (ref.epoch <= policy.epoch and not storage.exists(ref.name)):
            storage.delete(entry.name)


def _tidy_folders(storage: LocalStorage, older_than: float, own: Callable[[], Attempts], newest: CommitRef) -> None:
    """Empty folders, and files that a kill left half written."""
    left = list(storage.path("tmp").glob("ckpt+*"))
    in_flight = tuple(own().in_flight)
    for path in left:
        ref = parse_prefix(attempt_of(path.name.replace("+", "/")))
        newer = (
            ref is not None and ref.epoch == newest.epoch and ref.step > newest.step
        )  # another rank may write it now
        if not newer and not path.name.replace("+", "/").startswith(in_flight) and _modified(path) < older_than:
            path.unlink(missing_ok=True)
    _remove_empty_folders(storage, newest)


def _remove_empty_folders(storage: LocalStorage, newest: CommitRef) -> None:
    """Not of what is newer: another rank may be about to write there. What is older all ranks have written."""
    for folder in storage.path("ckpt").glob("s*/e*"):
        ref = parse_prefix(folder.relative_to(storage.root).as_posix())
        if ref is not None and ref <= newest:
            _remove_if_empty(folder)
    for folder in storage.path("ckpt").glob("s*"):
        if folder.name[1:].isdigit() and int(folder.name[1:]) <= newest.step:
            _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def remove_own_files(storage: LocalStorage, rank: int, policy: Policy, in_flight: Collection[str]) -> None:
    """Where ranks do not share the disk, each clears up after itself: all but its newest files go, and halves.
    Of what was there before this process no rank has any more use: it may be of ranks that are elsewhere now."""
    own = re.compile(r"(ckpt/s\d+/e\d+-[0-9a-f]+)/_?rank(\d+)\.(?:safetensors|json)")
    found = [match for entry in storage.list("ckpt") if (match := own.fullmatch(entry.name))]
    attempts = {match[1]: parse_prefix(match[1]) for match in found}
    newest = sorted((ref for ref in attempts.values() if ref is not None), reverse=True)[: policy.keep_last]
    for match in found:
        ref = attempts[match[1]]
        mine = int(match[2]) == rank or (ref is not None and ref.epoch < policy.epoch)
        if mine and ref not in newest and match[1] not in in_flight:
            storage.delete(match[0])
    for left in storage.path("tmp").glob("ckpt+*"):
        attempt = attempt_of(left.name.replace("+", "/"))
        ref = parse_prefix(attempt)
        mine = left.name.endswith(f"+{manifest.rank_file(rank)}") or (ref is not None and ref.epoch < policy.epoch)
        if mine and attempt not in in_flight:
            left.unlink(missing_ok=True)
    storage.sweep(storage.clock() - max(policy.orphan_grace_seconds, 1.0), lambda name: attempt_of(name) in in_flight)
    if newest:
        _remove_empty_folders(storage, newest[0])


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf  # gone since


def free_bytes(folder: Path) -> int:
    """Free space on the disk of `folder`, which need not exist yet."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_space(folder: str | Path, needed: int, free: int) -> None:
    """CheckpointError when `needed` bytes will not fit into `free`."""
    if needed + HEADROOM > free:
        raise CheckpointError(
            f"not enough space for a checkpoint at {folder}: {needed / 1e9:.3f} GB needed "
            f"(and {HEADROOM / 1e9:.3f} GB to spare), {free / 1e9:.3f} GB free; make room, or lower "
            "checkpoint.keep_last"
        )
