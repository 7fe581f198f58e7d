"""`clip-train evaluate` and `clip-train export`: what a run has learned, without DeepSpeed's engine."""

from __future__ import annotations

import os
from pathlib import Path

from clip_train import dist
from clip_train.checkpoint.manager import CheckpointManager, Resumed
from clip_train.errors import UserError
from clip_train.models import CLIP, export_openclip
from clip_train.models.weights import initial_weights
from clip_train.plain_engine import PlainEngine
from launcher import env as ranks
from launcher.config import RunConfig
from launcher.train import check, evaluation, say


def find_checkpoint(config: RunConfig, step: int | None = None) -> Resumed:
    """The newest complete checkpoint of the run, or the one of `step`. UserError if there is none."""
    folder = config.run_dir / "checkpoints"
    wanted = "must"
    if step is not None:
        commits = sorted((folder / "commit").glob(f"e*-s{step:010d}.json"))
        if not commits:
            there = sorted(int(p.stem.split("-s")[1]) for p in (folder / "commit").glob("e*-s*.json"))
            raise UserError(f"--step ({step}): {folder} has no such checkpoint; it has {there or 'none'}")
        wanted = str(commits[-1])
    elif not folder.is_dir():
        raise UserError(f"{folder} is not there: train first (clip-train train ...), or correct run.dir or run.name")
    checkpoint = config.checkpoint.model_copy(update={"resume": wanted})
    found = CheckpointManager(checkpoint, folder, log=say).resume()
    assert found is not None  # "must" and a path raise where there is nothing
    return found


def evaluate_run(config: RunConfig, weights: str | None) -> int:
    """Print zero-shot and retrieval on data.val; under torchrun the samples are split over the ranks."""
    if config.data.val is None:
        raise UserError("data.val is null: there is nothing to evaluate on; add data.val=<shards>")
    env = ranks.detect(os.environ)
    checked = check(config, 1, read_data=False)
    device = ranks.start(env)
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


def export_run(config: RunConfig, output: str | None, step: int | None) -> int:
    """Write a checkpoint's weights as a folder that `open_clip` loads."""
    found = find_checkpoint(config, step)
    folder = export_openclip(
        found.reader.full_state(), config.model.architecture(), output or config.run_dir / "export"
    )
    say(f"step {found.step} exported to {folder}; load it with")
    print(f"open_clip.create_model_and_transforms('local-dir:{Path(folder).resolve()}')")
    return 0
