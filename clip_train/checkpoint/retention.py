"""What may be removed: old checkpoints, and what killed saves left behind."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clip_train.checkpoint import layout, lease, marks
from clip_train.checkpoint.layout import CommitRef
from clip_train.storage import LocalStorage, Storage


@dataclass(frozen=True)
class Policy:
    """What stays. protect: whatever happens (the one resumed from). damaged: they do not count as kept."""

    keep_last: int
    keep_every: int | None = None  # steps
    keep_best: str | None = None  # a metric's name; with a minus in front the lowest is best
    orphan_grace_seconds: float = 3600.0
    epoch: int = 0  # of the writer
    protect: set[CommitRef] = field(default_factory=set)
    damaged: set[CommitRef] = field(default_factory=set)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "protect": sorted(self.protect), "damaged": sorted(self.damaged)}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Policy:
        sets = {key: {CommitRef(*ref) for ref in body[key]} for key in ("protect", "damaged")}
        return cls(**{**body, **sets})


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
    scored = {ref: metrics[ref] for ref in good if ref in metrics}
    if scored:
        lowest = (policy.keep_best or "").startswith("-")
        best = min(scored, key=lambda ref: (scored[ref] if lowest else -scored[ref], -ref.step))
        why.setdefault(best, f"the best {policy.keep_best} ({scored[best]:.6g})")
    for ref in commits:
        if ref in policy.protect:
            why.setdefault(ref, "the one resumed from")
        elif good and ref in policy.damaged and ref > good[: policy.keep_last][-1]:
            why.setdefault(ref, "damaged, and newer than what is kept")
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
            value = marks.read_sealed(storage, ref.metric_name)["values"].get(name.removeprefix("-"))
        except (FileNotFoundError, ValueError):
            continue
        if value is not None:
            out[ref] = float(value)
    return out


def apply_retention(storage: Storage, policy: Policy, *, in_flight: Collection[str] = ()) -> list[CommitRef]:
    """Rank 0's saver, after a commit: returns the checkpoints removed. OSError; FencedError.

    The marker goes first and the data second, so a kill in between leaves rubbish for the next time, not a
    broken checkpoint. in_flight: attempts of this process that may still be committed.
    """
    commits = marks.list_commits(storage)
    if not any(ref not in policy.damaged for ref in commits):
        return []
    lease.check(storage, policy.epoch)
    kept = verdicts(commits, policy, read_metrics(storage, commits, policy.keep_best))
    removed = [ref for ref in commits if ref not in kept]
    for ref in removed:
        storage.delete(ref.name)
        storage.delete(ref.metric_name)
    _remove_orphans(storage, policy, [ref for ref in commits if ref in kept], in_flight, set(removed))
    _remove_metrics(storage, policy, commits, in_flight)
    lease.forget_old(storage, policy.epoch)
    return removed


def _remove_orphans(
    storage: Storage, policy: Policy, kept: list[CommitRef], in_flight: Collection[str], removed: set[CommitRef]
) -> None:
    """Attempts that no marker names: those just removed, and those that nobody has written to for the grace."""
    files = storage.list("ckpt")
    newest: dict[str, float] = {}  # attempt -> when it was last written to, by the store's clock
    for entry in files:
        attempt = "/".join(entry.name.split("/")[:3])
        newest[attempt] = max(newest.get(attempt, 0.0), entry.modified)
    named = {ref: marks.prefix_of(storage, ref) for ref in kept}
    now = storage.clock()
    for attempt, modified in sorted(newest.items()):
        ref = layout.parse_prefix(attempt)
        if ref is None or attempt in in_flight:
            continue
        # a marker that makes no sense could mean any attempt of its epoch and step: leave them all
        if ref in named and named[ref] in (attempt, None):
            continue
        if ref in removed or now - modified >= policy.orphan_grace_seconds:
            storage.delete_tree(attempt)
    storage.sweep(now - max(policy.orphan_grace_seconds, 1.0))
    if isinstance(storage, LocalStorage):
        _tidy_folders(storage, now - policy.orphan_grace_seconds, in_flight, kept[0])


def _remove_metrics(
    storage: Storage, policy: Policy, commits: Collection[CommitRef], in_flight: Collection[str]
) -> None:
    """Those of saves that were never committed."""
    meant = {*commits, *(layout.parse_prefix(attempt) for attempt in in_flight)}
    older_than = storage.clock() - policy.orphan_grace_seconds
    for entry in storage.list("metric"):
        ref = CommitRef.parse(entry.name.replace("metric/", "commit/", 1))  # they are named alike
        if ref is not None and ref not in meant and entry.modified <= older_than:
            storage.delete(entry.name)


def _tidy_folders(storage: LocalStorage, older_than: float, in_flight: Collection[str], newest: CommitRef) -> None:
    """Empty folders, and files that a kill left half written."""
    for left in storage.path("tmp").glob("ckpt+*"):
        if not left.name.replace("+", "/").startswith(tuple(in_flight)) and _modified(left) < older_than:
            left.unlink(missing_ok=True)
    _remove_empty_folders(storage, newest)


def _remove_empty_folders(storage: LocalStorage, newest: CommitRef) -> None:
    """Not of what is newer: another rank may be about to write there. What is older all ranks have written."""
    for folder in storage.path("ckpt").glob("s*/e*"):
        ref = layout.parse_prefix(folder.relative_to(storage.root).as_posix())
        if ref is not None and ref <= newest:
            _remove_if_empty(folder)
    for folder in storage.path("ckpt").glob("s*"):
        if folder.name[1:].isdigit() and int(folder.name[1:]) <= newest.step:
            _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def remove_own_files(storage: LocalStorage, rank: int, keep_last: int, in_flight: Collection[str]) -> None:
    """Where ranks do not share the disk, each clears up after itself: all but its newest files go, and halves."""
    own = re.compile(rf"(ckpt/s\d+/e\d+-[0-9a-f]+)/({layout.rank_file(rank)}|{layout.rank_manifest(rank)})")
    found = [match for entry in storage.list("ckpt") if (match := own.fullmatch(entry.name))]
    attempts = {match[1]: layout.parse_prefix(match[1]) for match in found}
    newest = sorted((ref for ref in attempts.values() if ref is not None), reverse=True)[:keep_last]
    for match in found:
        if attempts[match[1]] not in newest and match[1] not in in_flight:
            storage.delete(match[0])
    for half in storage.path("tmp").glob(f"ckpt+*+{layout.rank_file(rank)}"):
        if not half.name.replace("+", "/").startswith(tuple(in_flight)):
            half.unlink(missing_ok=True)
    if newest:
        _remove_empty_folders(storage, newest[0])


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf  # gone since
