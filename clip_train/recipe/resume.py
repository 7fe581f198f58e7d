"""Check that a checkpoint belongs to this recipe's run. The field itself declares the meaning of a
change (`AtResume`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from clip_train.checkpoint.restore import Resumed
from clip_train.engines.config import describe_sharding
from clip_train.errors import UserError
from clip_train.models.clip import parse_saved
from clip_train.recipe.recipe import SECTIONS, Recipe, known_keys
from clip_train.settings import AtResume
from clip_train.storage.redact import redact


def at_resume(path: str, metadata: list[Any], config: Recipe) -> str:
    """The effect of a difference in this key: see `AtResume`. metadata: of its field."""
    if path.startswith("loss.bank_") and config.loss.kind == "memory_bank":
        return "refused"
    section, _, _ = path.partition(".")
    for annotation in [*metadata, *Recipe.model_fields[section].metadata]:
        if isinstance(annotation, AtResume):
            return annotation.change
    return "reported"


def optimizer_changed(config: Recipe, resumed: Resumed) -> bool:
    """Whether another optimizer wrote the checkpoint, so that its state cannot be used."""
    then = resumed.state["recipe"].get("optim", {}).get("name")
    return then is not None and then != config.optim.name


@dataclass(frozen=True)
class Change:
    """One key that differs from the recipe in the checkpoint."""

    path: str
    before: Any
    after: Any
    kind: str  # of `AtResume`

    def __str__(self) -> str:
        return f"{self.path} was {self.before!r}, is {self.after!r}"


def values_at(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The values of a recipe's keys in the run that saved `state`, by section: the recipe's, and in
    place of `auto` those that its ranks chose. Newer keys may be missing."""
    return with_chosen(state["recipe"], state.get("chosen_values", {}))


def with_chosen(recipe: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The recipe's values by section, with those of `chosen` in their place."""
    return {section: {**keys, **chosen.get(section, {})} for section, keys in recipe.items()}


def find_changes(
    config: Recipe,
    now: Mapping[str, Any],
    then: Mapping[str, Any],
    architecture: Mapping[str, Any],
) -> list[Change]:
    """Every key whose value differs from the checkpoint's, and every difference of the model.

    now, then: as `values_at` returns them. architecture: the checkpoint's.
    """
    then = redact(then)  # a URL that was signed again is the same
    model_changes = other_architecture(config, architecture)
    changes = []
    for path, field in known_keys():
        section, key = path.split(".")
        default = None
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
        if isinstance(default, tuple):
            default = list(default)  # as in JSON
        before = then.get(section, {}).get(key, default)
        after = now[section][key]
        if isinstance(before, str) and before.startswith("~"):  # written by an earlier version
            before = os.path.expanduser(before)
        kind = at_resume(path, field.metadata, config)
        if path == "model.name":
            if model_changes:  # they say more than the name
                continue
            kind = "reported"  # the same model: its file was moved
        if before != after:
            changes.append(Change(path, before, after, kind))
    return changes + removed_since(then) + model_changes


def removed_since(then: Mapping[str, Any]) -> list[Change]:
    """Keys of an earlier version whose value in the checkpoint changed something."""
    return [
        Change(f"{section}.{key}", then[section][key], "no key any more", "reported")
        for section, model in SECTIONS.items()
        for key, removed in model.removed.items()
        if key in then.get(section, {}) and not removed.ignored(then[section][key])
    ]


def other_architecture(config: Recipe, then: Mapping[str, Any]) -> list[Change]:
    """Differences of the model itself, whatever its name."""

    def parts(architecture: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{f"vision_cfg.{name}": size for name, size in architecture["vision_cfg"].items()},
            **{f"text_cfg.{name}": size for name, size in architecture["text_cfg"].items()},
            "embed_dim": architecture["embed_dim"],
            "quick_gelu": architecture["quick_gelu"],
            "image_mean": architecture["image_mean"],
            "image_std": architecture["image_std"],
            "built by OpenCLIP": "open_clip" in architecture,
            "class": architecture.get("own"),
        }

    before = parts(parse_saved(then, config.model.name).model_dump(mode="json"))
    after = parts(config.model.architecture().model_dump(mode="json"))
    keys = list(after)
    if before["class"] != after["class"]:
        keys = ["class"]  # the sizes of a user's own model are placeholders
    return [
        Change(f"model.name ({config.model.name}): {key}", before[key], after[key], "refused")
        for key in keys
        if key != "vision_cfg.patch_dropout" and before.get(key, after[key]) != after[key]
    ]


def compare_with(
    config: Recipe,
    resumed: Resumed,
    world_size: int,
    digests: Mapping[str, str | None] = {},
    chosen_values: Mapping[str, Any] = {},
) -> list[str]:
    """The report about resuming from this checkpoint, after the line with its source.

    config: the recipe as given. chosen_values: as `Resolved` has them. UserError if the checkpoint
    belongs to another run, unless `checkpoint.allow_changed_recipe` is set.
    """
    now = with_chosen(config.to_keep(), chosen_values)
    then = values_at(resumed.state)
    changes = find_changes(config, now, then, resumed.state["architecture"])
    for key, digest in digests.items():  # the content of a place may change
        before, place = resumed.state.get(key), getattr(config.model, key)
        if before != digest:
            changes.append(Change(f"model.{key} ({place}): its digest", before, digest, "refused"))
    refused = [change for change in changes if change.kind == "refused"]
    if refused and not config.checkpoint.allow_changed_recipe:
        raise UserError(
            f"the checkpoint of step {resumed.step} ({resumed.path}) belongs to another run: "
            f"{'; '.join(map(str, refused))}. Restore the recipe, or start over with another "
            "run.name or with checkpoint.resume=never; or resume anyway with "
            "checkpoint.allow_changed_recipe=true"
        )
    reported = [change for change in changes if change.kind == "reported"]
    rounding = [change.path for change in changes if change.kind == "rounding"]
    paths = [path.split(".") for path in config.chosen]
    by_memory = [key for section, key in paths if now[section][key] == "auto"]
    before = describe_layout(resumed.world_size, then.get("engine", {}))
    after = describe_layout(world_size, now["engine"])
    layout = f"  layout         {before} -> {after}"
    if before == after:
        layout = f"  layout         the same ({after})"
    if rounding:
        layout += f"; {', '.join(rounding)} changed: equal within rounding"
    elif before == after and not (reported or refused or by_memory):
        if config.engine.deterministic or not torch.cuda.is_available():
            layout += ": bitwise equal to an uninterrupted run"
        else:
            layout += (
                ": equal within rounding to an uninterrupted run; bitwise with "
                "engine.deterministic=true"
            )
    samples = resumed.state["samples"]
    seen = f"  samples seen   {samples:,}"
    if config.data.num_samples:
        seen += f" ({samples / config.data.num_samples:.2f} epochs)"
    lines = [layout, seen]
    lines += [f"  changed since  {change}" for change in reported]
    lines += [f"  WARNING        this is a different run now: {change}" for change in refused]
    if optimizer_changed(config, resumed):
        lines.append(f"  optimizer      the state of {config.optim.name} starts anew")
    return lines


def describe_layout(ranks: int, engine: Mapping[str, Any]) -> str:
    """The number of ranks, the sharding and the precision."""
    return (
        f"{ranks} rank{'s' * (ranks > 1)} at {describe_sharding(engine)}, {engine.get('precision')}"
    )
