"""Looking at checkpoints without changing anything: what there is, whole or why not; or one, to export or evaluate."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
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
    read_layout,
    readable,
)
from clip_train.checkpoint.config import locate
from clip_train.checkpoint.fetch import PARALLEL_BLOCKS, fetch_block
from clip_train.checkpoint.manifest import (
    CommitRef,
    FileEntry,
    FormatError,
    attempt_of,
    parse_prefix,
)
from clip_train.checkpoint.restore import Places, Resumed, list_places, places_at, resolve
from clip_train.checkpoint.retention import Policy, read_metrics, verdicts
from clip_train.errors import UserError
from clip_train.storage.base import Entry, Storage


@dataclass(frozen=True)
class Line:
    """One attempt to save."""

    step: int
    epoch: int
    where: str  # "local", "remote", "both"
    created: str  # ISO 8601, UTC; "" where nobody knows
    num_bytes: int
    ranks: int | None
    engine: dict[
        str, Any
    ]  # its section of the recipe: how the model was held; {} where nobody knows
    committed: bool  # there is a marker, whatever has become of the rest
    problem: str | None  # None: it is whole, as far as was looked
    future: str  # what the next save's retention does with it, and why


def list_checkpoints(places: Places, policy: Policy, *, verify: bool) -> list[Line]:
    """Newest first, of both stores; those without a commit last. verify: read every byte. CheckpointError, OSError."""
    lines: list[Line] = []
    for name, storage in zip(("local", "remote"), places, strict=True):
        if storage is not None:
            lines += readable(storage, partial(_one_store, name=name, policy=policy, verify=verify))
    committed: dict[tuple[int, int], Line] = {}
    for line in lines:
        if line.committed:
            ref = (line.epoch, line.step)
            committed[ref] = _both(committed[ref], line) if ref in committed else line
    return [committed[ref] for ref in sorted(committed, reverse=True)] + [
        each for each in lines if not each.committed
    ]


def _both(local: Line, remote: Line) -> Line:
    problems = [f"{each.where}: {each.problem}" for each in (local, remote) if each.problem]
    future = (
        local.future
        if local.future == remote.future
        else f"local: {local.future}; remote: {remote.future}"
    )
    known = local if local.ranks is not None else remote
    return replace(known, where="both", problem="; ".join(problems) or None, future=future)


def _one_store(storage: Storage, name: str, policy: Policy, verify: bool) -> list[Line]:
    commits = list_commits(storage)
    found: dict[CommitRef, Found] = {}
    problems: dict[CommitRef, str] = {}
    for ref in commits:
        try:
            found[ref] = read_found(storage, ref)
            check_sizes(storage, found[ref].commit.prefix, found[ref].manifest.files)
            if verify:
                _verify(storage, found[ref])
        except (DamagedError, FormatError) as e:
            problems[ref] = str(e)
    policy = replace(policy, damaged=set(problems))
    kept = verdicts(commits, policy, read_metrics(storage, commits, policy.keep_best))
    lines = []
    for ref in commits:
        future = f"stays: {kept[ref]}" if ref in kept else "goes at the next save"
        line = Line(ref.step, ref.epoch, name, "", 0, None, {}, True, problems.get(ref), future)
        if ref in found:
            manifest = found[ref].manifest
            size = sum(entry.size for entry in manifest.files)
            engine = manifest.state.get("recipe", {}).get("engine", {})
            line = replace(
                line,
                created=manifest.created,
                num_bytes=size,
                ranks=manifest.world_size,
                engine=engine,
            )
        lines.append(line)
    return lines + _orphans(
        storage, name, {ref: prefix_of(storage, ref) for ref in commits}, policy
    )


def _orphans(
    storage: Storage, name: str, named: dict[CommitRef, str | None], policy: Policy
) -> list[Line]:
    """Attempts that no marker names: under way, or left behind. One that makes no sense may mean any of its step."""
    files: dict[str, list[Entry]] = defaultdict(list)
    for entry in storage.list("ckpt"):
        files[attempt_of(entry.name)].append(entry)
    now, grace = storage.clock() if files else 0.0, policy.orphan_grace_seconds
    lines = []
    for attempt, entries in sorted(files.items()):
        ref = parse_prefix(attempt)
        if ref is not None and not (ref in named and named[ref] in (attempt, None)):
            age = now - max(entry.modified for entry in entries)
            future = (
                "goes at the next save"
                if age >= grace
                else f"goes {grace / 60:g} min after its end"
            )
            problem = f"never committed; last written to {age / 60:.0f} min ago"
            size = sum(entry.size for entry in entries)
            lines.append(
                Line(ref.step, ref.epoch, name, "", size, None, {}, False, problem, future)
            )
    return lines


def _verify(storage: Storage, found: Found) -> None:
    """Every byte. DamagedError; OSError."""
    read_layout(storage, found)
    blocks = [
        (entry, number) for entry in found.manifest.files for number in range(len(entry.blocks))
    ]

    def check(block: tuple[FileEntry, int]) -> None:
        fetch_block(storage, f"{found.commit.prefix}/{block[0].name}", *block)

    for _ in in_parallel(check, blocks, PARALLEL_BLOCKS):
        pass


# -- one checkpoint


def open_to_look(
    places: Places,
    step: int | None = None,
    only: CommitRef | None = None,
    *,
    newest_whole: bool = False,
    otherwise: str = "name an older one by its commit/*.json",
) -> Resumed:
    """The newest committed checkpoint, or that of `step`, to export or evaluate; the run's folders stay as they are.

    Only what is read is verified, and of a remote one fetched. newest_whole: newer ones that are damaged are passed
    over (`Resumed.skipped`), and all of the chosen one is verified. otherwise: how to take an older one, for messages.
    UserError where the newest is damaged; CheckpointError.
    """
    where = " or ".join(each.url for each in places if each is not None)
    if step is not None:
        local, remote = dist.on_main(lambda: list_places(places))
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
        raise UserError(
            f"there is no whole checkpoint under {where}{reasons}; train first, or correct the place"
        )
    if skipped and not newest_whole:
        raise UserError(
            f"the newest checkpoint under {where} cannot be read{reasons}\n"
            f"restore it, or take the one of step {found.step}, which is older: {otherwise}"
        )
    return found


def places_of(place: str) -> tuple[Places, CommitRef | None]:
    """What a folder or a URL means, to look at it. UserError where there are no checkpoints."""
    root, only = dist.on_main(lambda: locate(place))
    return places_at(root), only
