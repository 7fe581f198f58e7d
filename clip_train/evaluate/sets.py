"""The evaluation of a recipe: all its data sets, and the averaged weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

from clip_train import dist
from clip_train.data.index import ShardIndex
from clip_train.data.invalid import table_of
from clip_train.data.reader import count_missing
from clip_train.data.shared import shared_index
from clip_train.data.tokenizer import Tokenize
from clip_train.data.validation import ImageFolder, ValLoader
from clip_train.engines.base import Engine
from clip_train.evaluate.examples import Examples
from clip_train.evaluate.features import never
from clip_train.evaluate.loop import evaluate

if TYPE_CHECKING:
    from clip_train.models.config import AnyArchitecture
    from clip_train.recipe.recipe import Recipe

LOGGER = logging.getLogger(__name__)


def evaluation(
    config: Recipe,
    architecture: AnyArchitecture,
    engine: Engine,
    tokenizer: Tokenize,
    examples: Examples | None = None,
    asked_to_stop: Callable[[], bool] = never,
) -> Callable[[], dict[str, float]] | None:
    """A closure that evaluates on `data.val` and the labelled images, or None if there are
    neither.

    examples: takes examples of `data.val`, or of its first set. asked_to_stop: as in
    `clip_train.evaluate.loop.evaluate`.
    """
    places = config.evaluated_on
    if not places:
        return None
    without_classes = config.evaluate.model_copy(update={"zero_shot_classes": None})
    measure = partial(
        evaluate,
        engine,
        tokenize=tokenizer,
        widths=config.loss.widths or (),
        asked_to_stop=asked_to_stop,
    )

    @cache
    def index(key: str) -> ShardIndex | ImageFolder:
        """The samples of a key's place. All ranks list and count them together, once."""
        folder = None
        if not key.startswith("data.val"):
            folder = dist.on_main(partial(ImageFolder.find, places[key], key))
        if folder is None:
            shards = shared_index(key, places[key], config.data.verify, config.storage)
            return count_missing(shards, config.storage)
        if folder.skipped.counts and dist.is_main():
            LOGGER.warning(
                f"{key} ({places[key]}): skipped {folder.skipped}, not images of a class"
            )
        return folder

    def run_once(examples: Examples | None) -> dict[str, float]:
        loaders = {
            key: ValLoader(
                index(key),
                image_size=architecture.vision_cfg.image_size,
                context_length=architecture.text_cfg.context_length,
                batch_size=config.evaluate.batch_size,
                rank=dist.rank(),
                world_size=dist.world_size(),
                caption_key=config.data.caption_key,
                labelled=not key.startswith("data.val"),
                storage=config.storage,
                tokenizer=tokenizer,
                stages=config.data.stages if key.startswith("data.val") else None,
                inputs=config.data.inputs,
                alpha=config.data.alpha,
                resize=architecture.resize,
            )
            for key in places
        }
        val, labelled = loaders.get("data.val"), loaders.get("evaluate.zero_shot_data")
        out = dict[str, float]()
        for key, loader in loaders.items():
            name = key.removeprefix("data.val.")
            if name != key:
                metrics = measure(loader, without_classes, examples=examples)
                examples = None  # of the first set only
                out |= {f"{name}/{metric}": value for metric, value in metrics.items()}
        if val or labelled:
            out |= measure(val, config.evaluate, labelled=labelled, examples=examples)
        rank_invalid = [sample for loader in loaders.values() for sample in loader.invalid]
        invalid = [sample for samples in dist.gather_objects(rank_invalid) for sample in samples]
        if invalid:
            out["unusable_samples"] = float(len(invalid))
            if dist.is_main():
                LOGGER.warning(
                    f"the evaluation data has samples that cannot be used:\n{table_of(invalid)}"
                )
        return out

    def with_average() -> dict[str, float]:
        # `data.inputs` may hold no image
        out = run_once(examples if config.data.inputs is None else None)
        if engine.ema is not None:
            with engine.averaged():
                out |= {
                    f"ema_{name}": value
                    for name, value in run_once(None).items()
                    if not name.endswith("samples")
                }
        return out

    return with_average
