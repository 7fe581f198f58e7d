"""`clip-train evaluate` and `clip-train export`: what a run has learned, without DeepSpeed's engine."""

from __future__ import annotations

import os
from pathlib import Path

from clip_train import dist
from clip_train.checkpoint.opening import Resumed, open_to_look, places_of
from clip_train.errors import UserError
from clip_train.models import CLIP, Architecture, export_openclip
from clip_train.models.config import ModelConfig
from clip_train.models.weights import initial_weights
from clip_train.plain_engine import PlainEngine
from launcher import env as ranks
from launcher.checked import check
from launcher.checkpoints import places_of_run, recipe_in
from launcher.config import RunConfig, load_config
from launcher.train import evaluation, say


def find_checkpoint(config: RunConfig, step: int | None = None) -> Resumed:
    """The newest complete checkpoint of the run, here or in the remote store, or the one of `step`. UserError."""
    return open_to_look(places_of_run(config), step)


def evaluate_run(config: RunConfig, weights: str | None) -> int:
    """Print zero-shot and retrieval on data.val; under torchrun the samples are split over the ranks."""
    if config.data.val is None:
        raise UserError("data.val is null: there is nothing to evaluate on; add data.val=<shards>")
    env = ranks.detect(os.environ)
    checked = check(config, 1, read_data=False)
    device = ranks.take_device(env)
    ranks.start(env, device)
    try:
        model = CLIP(checked.architecture)
        if weights is not None:
            source = initial_weights(config.model.model_copy(update={"init_from": weights}), config.run.seed)
            PlainEngine(model).load_fragments(source, {})
            where = weights
        else:
            found = find_checkpoint(config)
            PlainEngine(model).load_fragments(found.reader, {})
            where = f"step {found.step}"
        evaluate_once = evaluation(config, checked, PlainEngine(model.to(device)))
        assert evaluate_once is not None
        results = evaluate_once()
        if dist.is_main():
            say(f"{config.run.name}, {where}:")
            for name, value in results.items():
                print(f"{name}: {value:.6g}")
        return 0
    finally:
        ranks.stop()


def export_run(place: str, overrides: list[str], output: str | None, step: int | None) -> int:
    """Write a checkpoint's weights as a folder that `open_clip` loads.

    place: a recipe, a run's folder, or a URL or folder of checkpoints, which needs none of the run's files.
    """
    recipe = recipe_in(place)
    if recipe is not None:
        config = load_config(recipe, overrides)
        found, folder = find_checkpoint(config, step), output or str(config.run_dir / "export")
    else:
        places, only = places_of(place)
        found, folder = open_to_look(places, step, only), output or "export"
    written = export_openclip(found.reader.full_state(), architecture_of(found), folder)
    say(f"step {found.step} of {found.path} exported to {written}; load it with")
    print(f"open_clip.create_model_and_transforms('local-dir:{Path(written).resolve()}')")
    return 0


def architecture_of(found: Resumed) -> Architecture:
    """As the checkpoint has it, whatever has become of the recipe's files."""
    stored = found.state.get("architecture")
    if stored is None:  # written by an older version
        return ModelConfig.model_validate(found.state["recipe"]["model"]).architecture()
    return Architecture.model_validate(stored)
