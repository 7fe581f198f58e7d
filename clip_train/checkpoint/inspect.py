"""Looking at checkpoints without changing anything: all of them, or one to export or evaluate."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from clip_train import dist
from clip_train.checkpoint.commit import (
    DamagedError,
    in_parallel,
    list_commits,
    read_found,
    readable,
)
from clip_train.checkpoint.config import locate
from clip_train.checkpoint.manifest import CommitRef, FormatError, blocks_of
from clip_train.checkpoint.reader import PARALLEL_BLOCKS, fetch_block
from clip_train.checkpoint.restore import (
    Places,
    Resumed,
    list_places,
    places_at,
    resolve,
)
from clip_train.errors import UserError
from clip_train.storage.base import Storage


@dataclass(frozen=True)
class Line:
    """One committed checkpoint."""

    step: int
    epoch: int
    where: str  # "local", "remote"
    problem: str | None = None  # None: it is whole, as far as was looked
    num_bytes: int = 0
    created: str = ""  # ISO 8601, UTC; "": not known
    ranks: int | None = None
    engine: dict[str, Any] | None = None  # its section of the recipe; None: not known


def list_checkpoints(places: Places, *, verify: bool) -> list[Line]:
    """Those of each store, newest first. verify: read every byte. CheckpointError."""
    lines: list[Line] = []
    for where, storage in zip(("local", "remote"), places, strict=True):
        if storage is not None:
            with readable(storage.url):
                for ref in list_commits(storage):
                    lines.append(_examine(storage, where, ref, verify=verify))
    return sorted(lines, key=lambda line: (-line.epoch, -line.step))


def _examine(storage: Storage, where: str, ref: CommitRef, *, verify: bool) -> Line:
    """OSError where it cannot be determined whether the checkpoint is whole."""
    line = Line(ref.step, ref.epoch, where)
    try:
        found = read_found(storage, ref)
        whole = found.manifest
        line = replace(
            line,
            num_bytes=sum(entry.size for entry in whole.files),
            created=whole.created,
            ranks=whole.world_size,
            engine=whole.state.get("recipe", {}).get("engine", {}),
        )
        if verify:
            check = partial(fetch_block, storage, found.commit.prefix)
            blocks = list(chain(*blocks_of(whole.files)))
            for _ in in_parallel(check, blocks, PARALLEL_BLOCKS):
                pass
    except (DamagedError, FormatError) as e:
        line = replace(line, problem=str(e))
    return line


# -- one checkpoint


def open_to_look(
    places: Places,
    step: int | None = None,
    only: CommitRef | None = None,
) -> Resumed:
    """The newest committed checkpoint, or that of `step`, to export or evaluate. Collective.

    The run's folders stay as they are. Only what is read is verified and fetched.
    UserError if the newest is damaged; CheckpointError.
    """
    where = " or ".join(each.url for each in places if each is not None)
    if step is not None:
        refs = [*dist.on_main(list_places, places)]
        only = next((ref for ref in refs if ref.step == step), None)
        if only is None:
            there = sorted({ref.step for ref in refs})
            raise UserError(
                f"--step ({step}): {where} has no such checkpoint; it has {there or 'none'}"
            )
    found, skipped = resolve(places, only)
    reasons = "".join(f"\n  {each}" for each in skipped)
    if found is None:
        why = f"there is no whole checkpoint under {where}{reasons}"
        raise UserError(f"{why}; train first, or correct the place")
    if skipped:
        raise UserError(
            f"the newest checkpoint under {where} cannot be read{reasons}\n"
            f"restore it, or take the one of step {found.step}, which is older, by --step or by "
            "its commit/*.json"
        )
    return found


def places_of(place: str) -> tuple[Places, CommitRef | None]:
    """What a folder or a URL means, to look at it. UserError where there are no checkpoints."""
    root, only = dist.on_main(locate, place)
    return places_at(root), only
