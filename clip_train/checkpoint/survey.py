"""All there is of a run's checkpoints, for a person to look at: whole or why not, and what retention will do."""

from __future__ import annotations

import math
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from clip_train.checkpoint import layout, marks
from clip_train.checkpoint.files import PARALLEL_BLOCKS, DamagedBlockError, fetch_block
from clip_train.checkpoint.layout import BLOCK_BYTES, CommitRef, FileEntry
from clip_train.checkpoint.marks import DamagedError, Found, readable
from clip_train.checkpoint.resume import Places
from clip_train.checkpoint.retention import Policy, read_metrics, verdicts
from clip_train.storage import Storage


@dataclass(frozen=True)
class Line:
    """One attempt to save."""

    step: int
    epoch: int
    where: str  # "local", "remote", "both"
    created: str  # ISO 8601, UTC; "" where nobody knows
    num_bytes: int
    ranks: int | None
    engine: dict[str, Any]  # its section of the recipe: how the model was held; {} where nobody knows
    committed: bool  # there is a marker, whatever has become of the rest
    problem: str | None  # None: it is whole, as far as was looked
    future: str  # what the next save's retention does with it, and why


def survey(places: Places, policy: Policy, *, verify: bool) -> list[Line]:
    """Newest first, of both stores; those without a commit last. verify: read every byte. CheckpointError, OSError."""
    by_ref: dict[CommitRef, Line] = {}
    strays: list[Line] = []
    for name, storage in (("local", places.local), ("remote", places.remote)):
        if storage is None:
            continue
        lines, uncommitted = readable(storage, lambda storage, name=name: _one_store(storage, name, policy, verify))  # type: ignore[misc]
        strays += uncommitted
        for ref, line in lines.items():
            other = by_ref.get(ref)
            by_ref[ref] = line if other is None else _both(other, line)
    return [by_ref[ref] for ref in sorted(by_ref, reverse=True)] + strays


def _both(local: Line, remote: Line) -> Line:
    problem = None
    if local.problem or remote.problem:
        problem = "; ".join(
            f"{which}: {line.problem}" for which, line in (("local", local), ("remote", remote)) if line.problem
        )
    known = local if local.ranks is not None else remote
    future = local.future if local.future == remote.future else f"local: {local.future}; remote: {remote.future}"
    return replace(known, where="both", problem=problem, future=future)


def _one_store(storage: Storage, name: str, policy: Policy, verify: bool) -> tuple[dict[CommitRef, Line], list[Line]]:
    commits = marks.list_commits(storage)
    found: dict[CommitRef, Found] = {}
    problems: dict[CommitRef, str] = {}
    for ref in commits:
        try:
            found[ref] = marks.read_found(storage, ref)
            marks.check_sizes(storage, found[ref])
            if verify:
                _verify(storage, found[ref])
        except (DamagedError, layout.NewerFormatError) as e:
            problems[ref] = str(e)
    policy = replace(policy, damaged=set(problems))
    kept = verdicts(commits, policy, read_metrics(storage, commits, policy.keep_best))
    lines = {}
    for ref in commits:
        manifest = found[ref].manifest if ref in found else None
        engine = manifest.state.get("recipe", {}).get("engine", {}) if manifest else {}
        lines[ref] = Line(
            step=ref.step,
            epoch=ref.epoch,
            where=name,
            created=manifest.created if manifest else "",
            num_bytes=sum(entry.size for entry in manifest.files) if manifest else 0,
            ranks=manifest.world_size if manifest else None,
            engine=engine,
            committed=True,
            problem=problems.get(ref),
            future=f"stays: {kept[ref]}" if ref in kept else "goes at the next save",
        )
    named = {ref: marks.prefix_of(storage, ref) for ref in commits}
    return lines, _strays(storage, name, named, policy)


def _strays(storage: Storage, name: str, named: dict[CommitRef, str | None], policy: Policy) -> list[Line]:
    """Attempts that no marker names: under way, or left behind. One that makes no sense may mean any of its step."""
    sizes: dict[str, int] = defaultdict(int)
    newest: dict[str, float] = defaultdict(float)
    for entry in storage.list("ckpt"):
        attempt = "/".join(entry.name.split("/")[:3])
        sizes[attempt] += entry.size
        newest[attempt] = max(newest[attempt], entry.modified)
    now = storage.clock() if sizes else 0.0
    out = []
    for attempt in sorted(sizes):
        ref = layout.parse_prefix(attempt)
        if ref is not None and not (ref in named and named[ref] in (attempt, None)):
            age = now - newest[attempt]
            old = age >= policy.orphan_grace_seconds
            future = "goes at the next save" if old else f"goes {policy.orphan_grace_seconds / 60:g} min after its end"
            problem = f"never committed; last written to {age / 60:.0f} min ago"
            out.append(Line(ref.step, ref.epoch, name, "", sizes[attempt], None, {}, False, problem, future))
    return out


def _verify(storage: Storage, found: Found) -> None:
    """Every byte. DamagedError; OSError."""
    for entry in found.manifest.files:
        name = f"{found.commit.prefix}/{entry.name}"
        try:
            _verify_file(storage, name, entry)
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        except DamagedBlockError as e:
            raise DamagedError(str(e)) from None


def _verify_file(storage: Storage, name: str, entry: FileEntry) -> None:
    if entry.blocks:

        def check(i: int) -> None:
            fetch_block(storage, name, entry, i)

        with ThreadPoolExecutor(PARALLEL_BLOCKS) as pool:
            for _ in pool.map(check, range(math.ceil(entry.size / BLOCK_BYTES))):
                pass
    elif layout.sha256_of(storage.read_bytes(name)) != entry.sha256:
        raise DamagedBlockError(f"{name} does not have its sha256")
