"""`clip-train evaluate` and `clip-train export`: what a run has learned, without its engine."""

from __future__ import annotations

import argparse
import os
from functools import partial

from clip_train import dist
from clip_train.checkpoint.inspect import open_to_look, places_of
from clip_train.checkpoint.restore import Resumed
from clip_train.data.tokenizer import huggingface_files
from clip_train.engine import PlainEngine
from clip_train.errors import UserError
from clip_train.models import hub
from clip_train.models.clip import build_model, parse_saved
from clip_train.models.config import AnyArchitecture, Architecture
from clip_train.models.export import export_openclip, save_texts
from clip_train.models.transformers import check_transformers, export_transformers
from clip_train.models.weights import CONFIG_NAME, WEIGHTS_NAMES, WholeState, initial_weights
from clip_train.protocols import FragmentSource
from clip_train.storage.urls import is_remote
from launcher.config.recipe import RunConfig, apply_overrides, check_config, load_config
from launcher.parts import evaluation
from launcher.runtime import environment as ranks
from launcher.runtime import rendezvous
from launcher.runtime.heartbeat import Heartbeat
from launcher.runtime.log import log
from launcher.weights import places_of_run, recipe_in, weights_here


def evaluate_run(args: argparse.Namespace) -> int:
    """Print zero-shot and retrieval on data.val; under torchrun the samples are split over the ranks.

    --weights: an export instead of the checkpoint; then the place is a recipe. --ema: its moving average.
    """
    place, overrides, weights = args.place, args.overrides, args.weights
    env = ranks.detect(os.environ)
    device, _ = ranks.take_device(env)
    args.outcome.heartbeat = Heartbeat(env, args.outcome.publish)
    rendezvous.start(env, device, args.outcome.heartbeat)
    try:
        if weights is not None:
            if args.ema:
                raise UserError(f"--ema is of a run's checkpoint, not of --weights {weights}; leave one of them out")
            config = load_config(recipe_in(place) or place, overrides)
            architecture = config.model.architecture()
            with weights_here(config.model.model_copy(update={"init_from": weights}), config.storage) as here:
                source: FragmentSource = dist.agreed(partial(initial_weights, here, config.run.seed))
            where = weights
        else:
            config, found = run_at(place, overrides)
            architecture, where = architecture_of(found), f"step {found.step} of {found.path}"
            source = WholeState(found.reader.full_state(ema=True)) if args.ema else found.reader
        if config.data.val is None:
            raise UserError("data.val is null: there is nothing to evaluate on; add data.val=<shards>")
        model = build_model(architecture)
        PlainEngine(model).load_fragments(source, {})
        evaluate_once = evaluation(config, architecture, PlainEngine(model.to(device)))
        assert evaluate_once is not None
        results = evaluate_once()
        if dist.is_main():
            log(f"{config.run.name}, {where}:")
            for name, value in results.items():
                print(f"{name}: {value:.6g}")
        return 0
    finally:
        rendezvous.stop()


def run_at(place: str, overrides: list[str], step: int | None = None) -> tuple[RunConfig, Resumed]:
    """The recipe and the newest complete checkpoint, or that of `step`. Of a URL, or a bare folder of checkpoints,
    the recipe is the one in the checkpoint: none of the run's files are needed. UserError, CheckpointError."""
    recipe = recipe_in(place)
    if recipe is not None:
        config = load_config(recipe, overrides)
        return config, open_to_look(places_of_run(config), step)
    places, only = places_of(place)
    found = open_to_look(places, step, only)
    recipe_there, said = found.state["recipe"], {override.partition("=")[0] for override in overrides}
    for section, key in (("data", "val"), ("evaluate", "zero_shot_classes")) if is_remote(place) else ():
        url, name = recipe_there[section][key], f"{section}.{key}"
        if url is not None and name not in said:  # whoever may write there must not choose what is opened here
            raise UserError(
                f"the recipe in {found.path} names {name}={url}, which is opened only if you say so: add {name}={url}, "
                f"another, or {name}=null"
            )
    return check_config(apply_overrides(recipe_there, overrides), f"the recipe in {found.path}"), found


def export_run(args: argparse.Namespace) -> int:
    """Write a checkpoint's weights as a folder that `open_clip` loads."""
    place, overrides, output, step = args.place, args.overrides, args.output, args.step
    if args.push is not None:
        hub.check_push(args.push)
    if recipe_in(place) is None:
        if overrides:
            raise UserError(f"{overrides[0]}: a checkpoint is exported as it is; leave it out, or name the recipe")
        places, only = places_of(place)
        found, folder = open_to_look(places, step, only), output or "export"
    else:
        config, found = run_at(place, overrides, step)
        folder = output or str(config.run_dir / "export")
    architecture = architecture_of(found)
    if args.format == "transformers":
        if not isinstance(architecture, Architecture):
            raise UserError(
                f"--format transformers holds CLIP's own towers, not {architecture.open_clip}'s: export with --format "
                "open_clip"
            )
        check_transformers(architecture)  # before the weights are fetched
        written = export_transformers(found.reader.full_state(args.ema), architecture, folder)
        tokenizer = huggingface_files(architecture.text_cfg.context_length)
        save_texts(tokenizer, written)
        names = ["model.safetensors", "config.json", "preprocessor_config.json", *tokenizer]
        line = f"transformers.CLIPModel.from_pretrained('{written.resolve()}')"
    else:
        written = export_openclip(found.reader.full_state(args.ema), architecture, folder)
        names = [WEIGHTS_NAMES[0], CONFIG_NAME]
        line = f"open_clip.create_model_and_transforms('local-dir:{written.resolve()}')"
    log(f"step {found.step} of {found.path} exported to {written}; load it with")
    print(line)
    if args.push is not None:
        log(f"uploaded to {hub.push(written, names, args.push)}")
    return 0


def architecture_of(found: Resumed) -> AnyArchitecture:
    """As the checkpoint has it, whatever has become of the recipe's files."""
    return parse_saved(found.state["architecture"])
