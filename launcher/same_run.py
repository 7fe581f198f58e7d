"""Is the checkpoint one of this recipe's run? Field by field: what may differ, what is told, what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clip_train.checkpoint.opening import Resumed
from clip_train.errors import UserError
from launcher.config import RunConfig, known_keys

# What makes it another run: the gradient would not go on as it began. (That the data and its order do is
# the loader's to check, by the fingerprint in its cursors: a folder may move.)
IDENTITY = (
    "run.seed", "model.name", "model.dropout", "model.patch_dropout", "model.teacher", "data.aug_scale",
    "batch.global_size", "batch.schedule", "batch.accumulation", "loss.kind", "optim.name",
)  # fmt: skip
BANK = ("loss.bank_size", "loss.bank_warmup_steps", "loss.bank_mode")  # where there are memory banks
# What the curve cannot tell: where and how it is computed, what is written about it.
HARMLESS = (
    "log.", "checkpoint.", "evaluate.", "storage.", "run.name", "run.dir", "data.workers", "data.val",
    "batch.micro_size", "batch.kept_graphs", "engine.activation_checkpointing", "engine.compile",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One key that differs from the recipe in the checkpoint."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path} was {self.before!r}, is {self.after!r}"


def changes(config: RunConfig, then: dict[str, Any]) -> list[Change]:
    """Every key that differs. then: the recipe in the checkpoint; an older version's lacks newer keys."""
    now = config.model_dump(mode="json")
    found = []
    for path, field in known_keys():
        section, key = path.split(".")
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        before = then.get(section, {}).get(key, default)
        after = now.get(section, {}).get(key)
        if before != after:
            found.append(Change(path, before, after))
    return found


def compare_with(config: RunConfig, resumed: Resumed, world_size: int) -> list[str]:
    """What to tell about going on from this checkpoint. UserError where it belongs to another run.

    With `checkpoint.allow_changed_recipe` that is told as well, and not refused.
    """
    found = changes(config, resumed.state["recipe"])
    identity = [*IDENTITY, *(BANK if config.loss.kind == "memory_bank" else ())]
    another = [change for change in found if change.path in identity]
    if another and not config.checkpoint.allow_changed_recipe:
        raise UserError(
            f"the checkpoint of step {resumed.step} ({resumed.path}) belongs to another run: "
            f"{'; '.join(map(str, another))}. Restore the recipe, or begin anew with another run.name, or with "
            "checkpoint.resume=never; or go on all the same with checkpoint.allow_changed_recipe=true"
        )
    told = [change for change in found if change not in another and not change.path.startswith(HARMLESS)]
    lines = [_layout(config, resumed, world_size)]
    if told:
        lines.append(f"  changed since: {'; '.join(map(str, told))}")
    if another:
        lines.append(f"  WARNING: this is another run now: {'; '.join(map(str, another))}")
    return lines


def _layout(config: RunConfig, resumed: Resumed, world_size: int) -> str:
    stage = resumed.state["recipe"].get("engine", {}).get("zero_stage")
    before = f"{resumed.world_size} rank{'s' * (resumed.world_size > 1)} at ZeRO {stage}"
    after = f"{world_size} rank{'s' * (world_size > 1)} at ZeRO {config.engine.zero_stage}"
    same = "the same layout, bitwise as if never stopped" if before == after else f"layout: {before} -> {after}"
    samples = resumed.state["samples"]
    epochs = config.data.num_samples and f", {samples / config.data.num_samples:.2f} epochs"
    return f"  {samples:,} samples seen{epochs or ''}; {same}"
