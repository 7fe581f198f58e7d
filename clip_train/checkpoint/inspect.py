"""Looking at checkpoints without changing anything: all of them, or one to export or evaluate."""

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
from clip_train.checkpoint.manifest import CommitRef, FormatError, blocks_of
from clip_train.checkpoint.reader import PARALLEL_BLOCKS, fetch_block
from clip_train.checkpoint.restore import (
    Places,
    Resumed,
    describe_skipped,
    list_places,
    resolve,
)
from clip_train.errors import UserError
from clip_train.storage.base import Storage


def list_checkpoints(places: Places, *, verify: bool) -> list[dict[str, Any]]:
    """Those of each store, newest first, as JSON. verify: read every byte. CheckpointError.

    `problem` is null where the checkpoint is whole, as far as was looked. What is not known of a
    damaged one is null or empty: `num_bytes`, `created` (ISO 8601, UTC), `ranks`, and `engine`, the
    section of its recipe.
    """
    lines = []
    for where, storage in zip(("local", "remote"), places, strict=True):
        if storage is not None:
            with readable(storage.url):
                for ref in list_commits(storage):
                    known = _examine(storage, ref, verify=verify)
                    lines.append({"step": ref.step, "epoch": ref.epoch, "where": where, **known})
    return sorted(lines, key=lambda line: (-line["epoch"], -line["step"]))


def _examine(storage: Storage, ref: CommitRef, *, verify: bool) -> dict[str, Any]:
    """OSError where it cannot be determined whether the checkpoint is whole."""
    known = {"problem": None, "num_bytes": 0, "created": "", "ranks": None, "engine": None}
    try:
        found = read_found(storage, ref)
        whole = found.manifest
        known |= {
            "num_bytes": sum(entry.size for entry in whole.files),
            "created": whole.created,
            "ranks": whole.world_size,
            "engine": whole.state.get("recipe", {}).get("engine", {}),
        }
        if verify:
            check = partial(fetch_block, storage, found.commit.prefix)
            blocks = list(chain(*blocks_of(whole.files)))
            for _ in in_parallel(check, blocks, PARALLEL_BLOCKS):
                pass
    except (DamagedError, FormatError) as e:
        known["problem"] = str(e)
    return known


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
    reasons = "\n  ".join(["", *describe_skipped(skipped)])
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
