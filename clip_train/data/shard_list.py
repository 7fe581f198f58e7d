"""Which shards a run reads, kept small in its checkpoints: a resumed run notices that they are not the same."""

from __future__ import annotations

import base64
import zlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from clip_train.data.index import ShardIndex, split
from clip_train.data.lanes import LanePlan
from clip_train.data.mixture import Mixture
from clip_train.errors import UserError

NAMES_SHOWN = 5


@dataclass(frozen=True)
class ShardList:
    """Names in order, without their folders, which may move; and what the index says of each."""

    rows: tuple[tuple[str, str], ...]  # (name, 16 digits of its sha256, or "" where it has no index)

    @classmethod
    def of(cls, index: ShardIndex) -> ShardList:
        entries = index.entries
        return cls(tuple((split(s)[1], entries[s].sha256[:16] if s in entries else "") for s in index.shards))

    def pack(self) -> str:
        """As text: some 25 bytes for each indexed shard, 2 for another."""
        text = "\n".join(f"{name}\t{digits}" for name, digits in self.rows)
        return base64.b64encode(zlib.compress(text.encode("utf-8", "surrogateescape"), 9)).decode()

    @classmethod
    def unpack(cls, packed: str) -> ShardList:
        text = zlib.decompress(base64.b64decode(packed)).decode("utf-8", "surrogateescape")
        rows = (line.rsplit("\t", 1) for line in text.split("\n"))
        return cls(tuple((name, digits) for name, digits in rows))

    def changes_since(self, then: ShardList) -> str:
        """What was added, removed, changed or reordered; "" where nothing was, as far as indexes tell."""
        before, after = then._by_name(), self._by_name()
        added = [name for name in after for _ in after[name][len(before.get(name, ())) :]]
        removed = [name for name in before for _ in before[name][len(after.get(name, ())) :]]
        changed = [
            name
            for name in after
            for a, b in zip(before.get(name, ()), after[name], strict=False)
            if a and b and a != b
        ]
        if not (added or removed or changed) and [n for n, _ in then.rows] != [n for n, _ in self.rows]:
            return "the same shards are in another order"
        kinds = (("added", added), ("removed", removed), ("changed in content", changed))
        return "; ".join(f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds if names)

    def _by_name(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for name, digits in self.rows:
            found[name].append(digits)
        return dict(found)


def go_on(
    cursors: dict[int, dict[str, Any]], then: str | None, index: ShardIndex, plan: LanePlan | Mixture, allowed: bool
) -> dict[int, dict[str, Any]]:
    """The checkpoint's cursors; where the shards have changed and that is allowed, at the start of another epoch.

    Raises:
        UserError: they have changed, and it is not allowed; they are more sources now, or fewer.
    """
    changes = ShardList.of(index).changes_since(ShardList.unpack(then)) if then else ""
    if not changes:
        return cursors
    try:
        at: dict[int, Any] = {
            lane: plan.parse({k: v for k, v in cursor.items() if k != "source"}) for lane, cursor in cursors.items()
        }
    except (LookupError, TypeError, ValueError) as e:
        raise UserError(
            f"data.train has another number of sources than the checkpoint was written with: {changes}. Restore it and "
            "data.train_weights, or set checkpoint.allow_changed_recipe=true to go on with the weights and begin the "
            "data anew (not with batch.schedule)"
        ) from e
    if not allowed:
        raise UserError(
            f"data.train is not the list of shards that the checkpoint was written with: {changes}. Restore it, or set "
            "data.allow_changed_shards=true to go on with the new one, from the start of an epoch"
        )
    return {lane: {**cursor.to_dict(), "source": plan.fingerprint()} for lane, cursor in plan.in_new_epoch(at).items()}


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
