"""What PLACE of `evaluate`, `embed` and `caption` names: a run's checkpoint, or weights."""

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from clip_tools.openclip.command import model_name
from clip_train import dist
from clip_train.checkpoint.restore import Resumed, open_read_only
from clip_train.errors import UserError
from clip_train.evaluate.config import IMAGENET
from clip_train.models.clip import parse_saved
from clip_train.models.config import AnyArchitecture, load_architecture
from clip_train.models.files import CONFIG_NAME
from clip_train.models.loading import file_at, names_of_models, silent
from clip_train.models.openclip.config import PREFIX, TRANSFORMERS
from clip_train.models.transformers import is_transformers
from clip_train.models.weights import WholeState, initial_weights, resize_of
from clip_train.recipe.recipe import (
    Recipe,
    apply_overrides,
    check_config,
    load_config,
    without_removed,
)
from clip_train.recipe.weights import find_run, holds_weights, on_base, recipe_in, weights_here
from clip_train.settings import as_yaml
from clip_train.storage.urls import is_remote, local_path
from clip_train.task import FragmentSource
from launcher.runtime.log import log

OWN_CODE = ("data.inputs", "data.stages")
LOOKED_AT = (
    "data.val",
    "evaluate.zero_shot_classes",
    "evaluate.zero_shot_data",
    "evaluate.sets",
)
# The recipe of weights without a run: keys that are required, and of no use here.
NO_RUN = {"run": {"steps": 1}, "schedule": {"warmup_steps": 0}, "data": {"train": "none.tar"}}


@dataclass(frozen=True)
class Weights:
    """Weights that can be read, their model, and the recipe whose data they are used on."""

    config: Recipe
    architecture: AnyArchitecture
    source: FragmentSource
    where: str  # for messages


def weights_at(
    place: str,
    overrides: list[str],
    weights: str | None = None,
    step: int | None = None,
    ema: bool = False,
) -> Weights:
    """Collective. For a run: its newest checkpoint, the one of `step`, the moving average in it, or
    `weights`. For weights alone, `overrides` say what to measure. UserError, CheckpointError.
    """
    bare = weights is None and dist.on_main(partial(holds_weights, place))
    if weights is None and not bare:
        config, found = run_at(place, overrides, step)
        source: FragmentSource = found.reader
        if ema or config.model.lora is not None:
            like, read = found.reader.open_weights(ema)
            state = {name: read(name) for name in like}
            source = WholeState(on_base(found, state, config))
        architecture = parse_saved(found.state["architecture"], config.model.name)
        architecture = config.resized(architecture)
        return Weights(config, architecture, source, f"step {found.step} of {found.path}")
    if ema:
        raise UserError(
            f"--ema requires a training checkpoint, not weights ({weights or place}); leave it out"
        )
    if bare:
        config = check_config(apply_overrides(NO_RUN, overrides), place)
    else:
        config = load_config(recipe_in(place) or place, overrides)
    where = weights or place
    sources = {"init_from": where, "init_image_from": None, "init_text_from": None}
    say = log if dist.is_main() else silent
    with weights_here(config.model.model_copy(update=sources), config.storage) as model:
        if bare and "name" not in config.model.model_fields_set:
            name = dist.agreed(partial(described, model.init_from or "", place))
            model = model.model_copy(update={"name": name})  # noqa: PLW2901
        architecture = config.architecture(model, dist.agreed(partial(resize_of, model, say)))
        initial = dist.agreed(partial(initial_weights, model, config.run.seed, say))
        return Weights(config, architecture, initial, where)


def described(weights: str, place: str) -> str:
    """The `model.name` of local weights, from the description beside them, else from their tag.
    UserError without.
    """
    path = local_path(weights)
    folder = path if path.is_dir() else path.parent
    if place.startswith(TRANSFORMERS):
        return place
    if not (folder / CONFIG_NAME).is_file():
        if path.is_dir() and is_transformers(folder):
            return str(folder)
        if place.startswith("open_clip:"):
            return model_name(place.removeprefix("open_clip:").rpartition("/")[0])
        fitting = names_of_models(file_at(path, "weights"))
        name, *others = fitting or ["ViT-B-32"]
        by_size = f"; {' and '.join([name, *others])} would fit its sizes" if fitting else ""
        raise UserError(
            f"{place} has no {CONFIG_NAME} beside it, so its model is unknown; name it, for example "
            f"with clip-train evaluate {place} model.name={name}{by_size}"
        )
    try:
        load_architecture(str(folder))
        return str(folder)
    except UserError:  # not one of ours
        return f"open_clip:{folder}"


def run_at(place: str, overrides: list[str], step: int | None = None) -> tuple[Recipe, Resumed]:
    """The recipe and the newest complete checkpoint. With a URL or a bare folder of
    checkpoints, the recipe comes from the checkpoint: no file of the run is needed. UserError,
    CheckpointError."""
    config, places, only = find_run(place, overrides)
    found = open_read_only(places, step, only)
    if config is not None:
        return config, found
    recipe_there = without_removed(found.state["recipe"])
    said = {override.partition("=")[0] for override in overrides}
    refused = [*OWN_CODE]
    if is_remote(place):
        refused += LOOKED_AT
    for name in refused:
        section, key = name.split(".")
        url = recipe_there[section].get(key)
        # a remote recipe must not make this machine open or import anything
        if url not in (None, IMAGENET) and name not in said:
            value = as_yaml(url) if isinstance(url, dict) else url
            raise UserError(
                f"the recipe in {found.path} names {name}={value}, which is used only if you "
                f"allow it: add {name}={value}, another, or {name}=null"
            )
    if "evaluate.functions" not in said:  # code is imported only if the command line names it
        recipe_there["evaluate"].pop("functions", None)
    config = check_config(apply_overrides(recipe_there, overrides), f"the recipe in {found.path}")
    # a class of the user's own is imported only if the command line names it
    parse_saved(found.state["architecture"], config.model.name if "model.name" in said else None)
    if is_remote(place):
        check_names(found, config.model.name, said="model.name" in said)
    return config, found


def check_names(found: Resumed, model: str, *, said: bool) -> None:
    """UserError if the model of a remote checkpoint refers to files that the user has not named.

    These are a tokenizer or model of the hub, or a local folder. The ones that OpenCLIP's model of
    this name or a model on the command line refers to are allowed.
    """

    foreign = _names(found.state["architecture"])
    openclips = model.startswith(PREFIX) and not os.path.exists(model.removeprefix(PREFIX))
    if foreign and (said or openclips):
        foreign -= _names(load_architecture(model).model_dump())
    if foreign:
        raise UserError(
            f"the model in {found.path} names {', '.join(sorted(foreign))}, which is opened only "
            "if you allow it: add model.name=<OpenCLIP's model, or a JSON, that names it as well>"
        )


def _names(architecture: dict[str, Any]) -> set[str]:
    """The tokenizer and models of the hub's, or folders, that an architecture names."""
    text, trunk = architecture["text_cfg"], architecture["vision_cfg"].get("timm_model_name") or ""
    names = {
        text.get("hf_tokenizer_name"),
        text.get("hf_model_name"),
        trunk if ":" in trunk else None,
    }
    return names - {None}
