"""What may be removed: old checkpoints, and what killed saves left behind."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from clip_train.checkpoint import layout
from clip_train.checkpoint.layout import CommitRef
from clip_train.checkpoint.resume import list_commits, prefix_of
from clip_train.storage import Storage


def apply_retention(
    storage: Storage,
    staging: Path,
    keep_last: int,
    *,
    protect: Collection[CommitRef] = (),
    damaged: Collection[CommitRef] = (),
) -> list[CommitRef]:
    """Rank 0, after a commit: keep the `keep_last` newest checkpoints; returns those removed. OSError.

    protect: never removed (the one resumed from). damaged: not counted as kept; they go when older ones do.
    The marker goes first and the data second, so a kill in between leaves rubbish for the next time (at
    worst an empty folder for good), not a broken checkpoint.
    """
    commits = list_commits(storage)
    good = [ref for ref in commits if ref not in damaged]
    if not good:
        return []
    oldest_kept = good[:keep_last][-1]
    removed = [ref for ref in commits if ref < oldest_kept and ref not in protect]
    for ref in removed:
        storage.delete(ref.name)
    kept = [ref for ref in commits if ref not in removed]
    _remove_orphans(storage, staging, kept, newest=commits[0])
    return removed


def _remove_orphans(storage: Storage, staging: Path, kept: list[CommitRef], newest: CommitRef) -> None:
    """Attempts that no marker names. Those newer than the newest commit stay: they may be in the making."""
    prefixes = {ref: prefix_of(storage, ref) for ref in kept}
    attempts = {"/".join(entry.name.split("/")[:3]) for entry in storage.list("ckpt")}
    orphans = set()
    for attempt in attempts:
        ref = layout.parse_prefix(attempt)
        if ref is None or ref > newest:
            continue
        # a marker that makes no sense could mean any attempt of its epoch and step: leave them all
        if ref in prefixes and prefixes[ref] in (attempt, None):
            continue
        orphans.add(attempt)
    for orphan in sorted(orphans):
        step_folder = orphan.rsplit("/", 1)[0]
        alone = all(other in orphans for other in attempts if other.startswith(step_folder + "/"))
        storage.delete_tree(step_folder if alone else orphan)
    if staging.is_dir():
        for left in staging.iterdir():
            ref = layout.parse_prefix("/".join(left.name.split("+")[:3]))
            if ref is not None and ref <= newest:
                left.unlink(missing_ok=True)
