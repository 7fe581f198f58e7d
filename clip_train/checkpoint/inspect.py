"""Looking at checkpoints without changing anything: all of them, or one to export or evaluate."""

from dataclasses import dataclass, replace
from typing import Any

from clip_train import dist
from clip_train.checkpoint.commit import (
    DamagedError,
    Found,
    check_sizes,
    in_parallel,
    list_commits,
    prefix_of,
    read_found,
    readable,
)
from clip_train.checkpoint.config import locate
from clip_train.checkpoint.fetch import PARALLEL_BLOCKS, fetch_block
from clip_train.checkpoint.manifest import CommitRef, FileEntry, FormatError, parse_prefix
from clip_train.checkpoint.restore import (
    Places,
    Resumed,
    list_places,
    places_at,
    read_scores,
    resolve,
)
from clip_train.checkpoint.retention import Policy, attempts, is_named, verdicts
from clip_train.errors import UserError
from clip_train.storage.base import Storage


@dataclass(frozen=True)
class Line:
    """One attempt to save."""

    step: int
    epoch: int
    where: str  # "local", "remote"
    committed: bool  # there is a marker, whatever became of the rest
    problem: str | None  # None: it is whole, as far as was looked
    future: str  # what the next save's retention does with it, and why
    num_bytes: int = 0
    created: str = ""  # ISO 8601, UTC; "": not known
    ranks: int | None = None
    engine: dict[str, Any] | None = None  # its section of the recipe; None: not known


def list_checkpoints(places: Places, policy: Policy, *, verify: bool) -> list[Line]:
    """Those of each store, newest first, then those without a commit. verify: read every byte.

    CheckpointError.
    """
    committed: list[Line] = []
    orphans: list[Line] = []
    for where, storage in zip(("local", "remote"), places, strict=True):
        if storage is not None:
            with readable(storage.url):
                lines = _list_commits(storage, where, policy, verify=verify)
                orphans += _list_orphans(storage, where, policy, [*lines])
            committed += lines.values()
    return sorted(committed, key=lambda line: (-line.epoch, -line.step)) + orphans


def _list_commits(
    storage: Storage, where: str, policy: Policy, *, verify: bool
) -> dict[CommitRef, Line]:
    lines: dict[CommitRef, Line] = {}
    scores: dict[CommitRef, float] = {}
    for ref in list_commits(storage):
        line = Line(ref.step, ref.epoch, where, True, None, "goes at the next save")
        try:
            found = read_found(storage, ref)
            whole = found.manifest
            scores = scores or read_scores(whole.state, policy.keep_best)
            line = replace(
                line,
                num_bytes=sum(entry.size for entry in whole.files),
                created=whole.created,
                ranks=whole.world_size,
                engine=whole.state.get("recipe", {}).get("engine", {}),
            )
            check_sizes(storage, found.commit.prefix, whole.files)
            if verify:
                _verify(storage, found)
        except (DamagedError, FormatError) as e:
            line = replace(line, problem=str(e))
        lines[ref] = line
    damaged = {ref for ref, line in lines.items() if line.problem is not None}
    for ref, why in verdicts([*lines], replace(policy, damaged=damaged), scores).items():
        lines[ref] = replace(lines[ref], future=f"stays: {why}")
    return lines


def _list_orphans(
    storage: Storage, where: str, policy: Policy, commits: list[CommitRef]
) -> list[Line]:
    """Attempts that no marker names: under way, or left behind."""
    named = {ref: prefix_of(storage, ref) for ref in commits}
    now, grace = storage.clock(), policy.orphan_grace_seconds
    lines = []
    for attempt, files in attempts(storage).items():
        ref = parse_prefix(attempt)
        if ref is None or is_named(named, ref, attempt):
            continue
        age = now - max(entry.modified for entry in files)
        future = f"goes {grace / 60:g} min after its end"
        if age >= grace:
            future = "goes at the next save"
        problem = f"never committed; last written to {age / 60:.0f} min ago"
        size = sum(entry.size for entry in files)
        lines.append(Line(ref.step, ref.epoch, where, False, problem, future, size))
    return lines


def _verify(storage: Storage, found: Found) -> None:
    """Every byte of the data. DamagedError; OSError."""

    def check(block: tuple[FileEntry, int]) -> None:
        fetch_block(storage, f"{found.commit.prefix}/{block[0].name}", *block)

    files = found.manifest.files
    blocks = [(entry, number) for entry in files for number in range(len(entry.blocks))]
    list(in_parallel(check, blocks, PARALLEL_BLOCKS))


# -- one checkpoint


def open_to_look(
    places: Places,
    step: int | None = None,
    only: CommitRef | None = None,
    *,
    newest_whole: bool = False,
    otherwise: str = "name an older one by its commit/*.json",
) -> Resumed:
    """The newest committed checkpoint, or that of `step`, to export or evaluate. Collective.

    The run's folders stay as they are. Only what is read is verified and fetched. newest_whole:
    newer ones that are damaged are passed over (`Resumed.skipped`), and all of the chosen one is
    verified. otherwise: how to take an older one, for messages.
    UserError if the newest is damaged; CheckpointError.
    """
    where = " or ".join(each.url for each in places if each is not None)
    if step is not None:
        local, remote = dist.on_main(list_places, places)
        refs = sorted({*local, *remote}, reverse=True)
        only = next((ref for ref in refs if ref.step == step), None)
        if only is None:
            there = sorted({ref.step for ref in refs})
            raise UserError(
                f"--step ({step}): {where} has no such checkpoint; it has {there or 'none'}"
            )
    found, skipped = resolve(places, only, verify=newest_whole)
    reasons = "".join(f"\n  {each}" for each in skipped)
    if found is None:
        why = f"there is no whole checkpoint under {where}{reasons}"
        raise UserError(f"{why}; train first, or correct the place")
    if skipped and not newest_whole:
        raise UserError(
            f"the newest checkpoint under {where} cannot be read{reasons}\n"
            f"restore it, or take the one of step {found.step}, which is older: {otherwise}"
        )
    return found


def places_of(place: str) -> tuple[Places, CommitRef | None]:
    """What a folder or a URL means, to look at it. UserError where there are no checkpoints."""
    root, only = dist.on_main(locate, place)
    return places_at(root), only
