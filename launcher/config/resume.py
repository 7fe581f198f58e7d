"""Is the checkpoint one of this recipe's run? Field by field: what may differ, what is told, what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from clip_train.checkpoint.restore import Resumed
from clip_train.errors import UserError
from launcher.config.recipe import RunConfig, known_keys
from launcher.engines import describe

# refused: it is another run, whose gradient would not go on as this one's began; unless it is forced
# told:    allowed, and named at the resume
# layout:  told in the line about ranks and stage
# rounds:  how it is computed: the curve cannot tell but by rounding
# silent:  what is written about it, and where
Class = Literal["refused", "told", "layout", "rounds", "silent"]

SECTIONS: dict[str, Class] = {  # all their keys, new ones too
    "log": "silent", "checkpoint": "silent", "evaluate": "silent", "storage": "silent", "launch": "silent",
}  # fmt: skip

# That the data and its order go on is also checked by `clip_train.data.resume_data` (data.train, its weights, lanes,
# ...): a folder may move. A test wants every key of a recipe here.
CLASSES: dict[str, Class] = {
    "run.name": "silent", "run.dir": "silent", "run.seed": "refused", "run.steps": "told", "run.epochs": "told",
    "model.name": "refused", "model.dropout": "refused", "model.patch_dropout": "refused", "model.teacher": "refused",
    "model.teacher_name": "refused", "model.init_from": "told", "model.init_logit_scale": "told",
    "model.init_logit_bias": "refused",  # null or not: whether there is such a parameter
    "data.train": "told", "data.train_weights": "told", "data.resampled": "told", "data.lanes": "told",
    "data.shuffle_block": "told", "data.caption_key": "told", "data.num_samples": "told", "data.aug_scale": "refused",
    "data.verify": "silent", "data.workers": "silent", "data.prefetch": "silent", "data.val": "silent",
    "data.allow_changed_shards": "silent", "data.bad_sample_limit": "silent",
    "batch.global_size": "refused", "batch.schedule": "refused", "batch.accumulation": "refused",
    "batch.micro_size": "rounds", "batch.kept_graphs": "rounds", "batch.memory_limit": "rounds",
    "loss.kind": "refused", "loss.exchange": "rounds", "loss.tile": "rounds",
    "loss.bank_size": "told", "loss.bank_warmup_steps": "told", "loss.bank_mode": "told",
    "engine.kind": "layout", "engine.zero_stage": "layout", "engine.shard_ranks": "layout",
    "engine.precision": "layout", "engine.activation_checkpointing": "rounds",
    "engine.offload": "rounds", "engine.reduce_gradients": "rounds", "engine.compile": "rounds",
    "engine.ds_config": "told",
    "optim.name": "refused", "optim.lr": "told", "optim.beta1": "told", "optim.beta2": "told", "optim.eps": "told",
    "optim.weight_decay": "told", "optim.momentum": "told", "optim.grad_clip_norm": "told", "optim.lr_scaling": "told",
    "optim.reference_batch": "told",
    "schedule.name": "told", "schedule.warmup_steps": "told", "schedule.cooldown_steps": "told",
    "schedule.cooldown_power": "told", "schedule.final_lr": "told",
}  # fmt: skip


def class_of(path: str, config: RunConfig) -> Class:
    """What a difference in this key means. A key that has no class is told."""
    if path.startswith("loss.bank_") and config.loss.kind == "memory_bank":
        return "refused"
    if path == "batch.micro_size" and config.batch.accumulation == "local":
        return "refused"  # it says which samples are each other's negatives
    return CLASSES.get(path) or SECTIONS.get(path.split(".", maxsplit=1)[0], "told")


@dataclass(frozen=True)
class Change:
    """One key that differs from the recipe in the checkpoint."""

    path: str
    before: Any
    after: Any
    kind: Class

    def __str__(self) -> str:
        return f"{self.path} was {self.before!r}, is {self.after!r}"


def changes(config: RunConfig, state: Mapping[str, Any]) -> list[Change]:
    """Every key that differs. state: the checkpoint's; the recipe of an older version lacks newer keys."""
    now, then = config.model_dump(mode="json"), state["recipe"]
    found = []
    architecture = list(_other_architecture(config, state))
    for path, field in known_keys():
        section, key = path.split(".")
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        before = then.get(section, {}).get(key, default)
        after = now.get(section, {}).get(key)
        kind = class_of(path, config)
        if path == "model.name" and "architecture" in state:
            kind = "told"  # a file may move; what is in it is compared instead
        if before != after and not (path == "model.name" and architecture):
            found.append(Change(path, before, after, kind))
    return found + architecture


def _other_architecture(config: RunConfig, state: Mapping[str, Any]) -> Iterator[Change]:
    """What of the model itself differs, whatever it is called; of older checkpoints only the name is known."""
    if "architecture" not in state:
        return
    now = config.model.architecture().model_dump(mode="json")
    then = state["architecture"]
    for key in ("vision_cfg", "text_cfg"):
        for name in now[key]:
            if name != "patch_dropout" and name in then[key] and then[key][name] != now[key][name]:
                path = f"model.name ({config.model.name}): {key}.{name}"
                yield Change(path, then[key][name], now[key][name], "refused")
    for key in ("embed_dim", "quick_gelu", "image_mean", "image_std"):
        if key in then and then[key] != now[key]:
            yield Change(f"model.name ({config.model.name}): {key}", then[key], now[key], "refused")


def compare_with(config: RunConfig, resumed: Resumed, world_size: int) -> list[str]:
    """What to tell about going on from this checkpoint, below where it is from. UserError where it is another run's.

    With `checkpoint.allow_changed_recipe` that is told as well, and not refused.
    """
    found = changes(config, resumed.state)
    another = [change for change in found if change.kind == "refused"]
    if another and not config.checkpoint.allow_changed_recipe:
        raise UserError(
            f"the checkpoint of step {resumed.step} ({resumed.path}) belongs to another run: "
            f"{'; '.join(map(str, another))}. Restore the recipe, or begin anew with another run.name, or with "
            "checkpoint.resume=never; or go on all the same with checkpoint.allow_changed_recipe=true"
        )
    told = [change for change in found if change.kind == "told"]
    rounds = [change.path for change in found if change.kind == "rounds"]
    lines = [f"  layout         {_layout(config, resumed, world_size)}"]
    if rounds:
        lines[0] += f"; {', '.join(rounds)} changed: equal within rounding"
    elif not (told or another or config.chosen) and "->" not in lines[0]:
        lines[0] += ": bitwise as if never stopped"
    lines.append(f"  samples seen   {_samples(config, resumed)}")
    lines += [f"  changed since  {change}" for change in told]
    lines += [f"  WARNING        this is another run now: {change}" for change in another]
    return lines


def _layout(config: RunConfig, resumed: Resumed, world_size: int) -> str:
    engine = resumed.state["recipe"].get("engine", {})
    before = _ranks(resumed.world_size, engine)
    after = _ranks(world_size, config.engine.model_dump())
    return f"the same ({after})" if before == after else f"{before} -> {after}"


def _ranks(count: int, engine: Mapping[str, Any]) -> str:
    held = describe(engine)
    return f"{count} rank{'s' * (count > 1)} at {held}, {engine.get('precision')}"


def _samples(config: RunConfig, resumed: Resumed) -> str:
    samples = resumed.state["samples"]
    epochs = config.data.num_samples and f" ({samples / config.data.num_samples:.2f} epochs)"
    return f"{samples:,}{epochs or ''}"
