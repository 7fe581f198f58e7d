"""The evaluation of a recipe: all its data sets, and the averaged weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from clip_train import dist
from clip_train.data.index import ShardIndex
from clip_train.data.invalid import InvalidRecord, table_of
from clip_train.data.reader import count_missing
from clip_train.data.shared import shared_index
from clip_train.data.tokenizer import Tokenize
from clip_train.data.validation import ImageFolder, ValLoader
from clip_train.engines.base import Engine
from clip_train.errors import UserError
from clip_train.evaluate.data_sets import EvaluationSet
from clip_train.evaluate.examples import Examples
from clip_train.evaluate.features import never
from clip_train.evaluate.loop import evaluate
from clip_train.evaluate.zero_shot import ZeroShotClasses
from clip_train.resizing import Patches
from clip_train.settings import MEAN, shown

if TYPE_CHECKING:
    from clip_train.models.config import AnyArchitecture
    from clip_train.recipe.recipe import Recipe

LOGGER = logging.getLogger(__name__)


def evaluation(
    config: Recipe,
    architecture: AnyArchitecture,
    engine: Engine,
    tokenizer: Tokenize,
    sets: Sequence[EvaluationSet],
    examples: Examples | None = None,
    asked_to_stop: Callable[[], bool] = never,
) -> Callable[[], dict[str, float]] | None:
    """A closure that evaluates on all sets, or None if there are none.

    examples: takes examples of the first set with captions. asked_to_stop: as in
    `clip_train.evaluate.loop.evaluate`.
    """
    if not sets:
        return None
    if config.evaluate.tokens is not None and architecture.patches is None:
        raise UserError(
            f"evaluate.tokens ({shown(config.evaluate.tokens)}) needs a model of native resolution, "
            f"and {config.model.name} sees squares: set data.resize=native, or evaluate.tokens=null"
        )

    @cache
    def index(key: str, place: str, labeled: bool) -> ShardIndex | ImageFolder:
        """The samples of a place. All ranks list and count them together, once."""
        folder = None
        if labeled:
            folder = dist.on_main(partial(ImageFolder.find, place, key))
        if folder is None:
            shards = shared_index(key, place, config.data.verify, config.storage)
            return count_missing(shards, config.storage)
        if folder.skipped.counts and dist.is_main():
            LOGGER.warning(f"{key} ({place}): skipped {folder.skipped}, not images of a class")
        return folder

    def loader_of(
        key: str,
        place: str,
        classes: ZeroShotClasses | None,
        patches: Patches | None,
        *,
        labeled: bool,
    ) -> ValLoader:
        samples = index(key, place, labeled)
        if isinstance(samples, ImageFolder) and classes is not None:
            samples = samples.label_by(classes.classnames, classes.key)
        return ValLoader(
            samples,
            image_size=architecture.vision_cfg.image_size,
            context_length=architecture.text_cfg.context_length,
            batch_size=config.evaluate.batch_size,
            rank=dist.rank(),
            world_size=dist.world_size(),
            caption_key=config.data.caption_key,
            labelled=labeled,
            storage=config.storage,
            tokenizer=tokenizer,
            stages=None if labeled else config.data.stages,
            inputs=config.data.inputs,
            alpha=config.data.alpha,
            resize=architecture.resize,
            patches=patches,
        )

    def run_set(
        data_set: EvaluationSet,
        examples: Examples | None,
        invalid: list[InvalidRecord],
        patches: Patches | None,
    ) -> dict[str, float]:
        """invalid: gets this rank's invalid samples. patches: the budget of images at native
        resolution. The features are freed at the end."""
        classes = None
        if data_set.classes is not None:
            classes = dist.agreed(
                ZeroShotClasses.load, data_set.classes, data_set.templates, data_set.classes_key
            )
        key, place = data_set.key, data_set.place
        loaders = [loader_of(key, place, classes, patches, labeled=not data_set.captions)]
        train = None
        if data_set.train is not None:
            train = loader_of("--linear-probe", data_set.train, classes, patches, labeled=True)
            loaders.append(train)
        metrics = evaluate(
            engine,
            loaders[0],
            config.evaluate,
            tokenizer,
            classes,
            captions=data_set.captions,
            train=train,
            widths=config.loss.widths or (),
            examples=examples,
            asked_to_stop=asked_to_stop,
        )
        for loader in loaders:
            invalid += loader.invalid
        return metrics

    def run_once(examples: Examples | None) -> dict[str, float]:
        out: dict[str, float] = {}
        rank_invalid: list[InvalidRecord] = []
        for data_set in sets:
            metrics = run_set(data_set, examples, rank_invalid, architecture.patches)
            for tokens in config.evaluate.tokens or []:
                patches = architecture.patches and replace(architecture.patches, most=tokens)
                # the samples that cannot be used are the same
                fewer = run_set(data_set, None, [], patches)
                metrics |= {f"tokens_{tokens}/{metric}": value for metric, value in fewer.items()}
            if data_set.captions:
                examples = None  # of the first set only
            prefix = f"{data_set.name}/" if data_set.name else ""
            out |= {f"{prefix}{metric}": value for metric, value in metrics.items()}
        out |= means(sets, out)
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


def means(sets: Sequence[EvaluationSet], scores: Mapping[str, float]) -> dict[str, float]:
    """The mean of each score over the sets of `evaluate.sets` with labels, and over those with
    captions, where there are several. Numbers of samples and strengths have no mean."""
    out: dict[str, float] = {}
    for captions in (False, True):
        names = [x.name for x in sets if x.counts_in_mean and x.captions == captions]
        if len(names) < 2:
            continue
        for score in scores:
            metric = score.removeprefix(f"{names[0]}/")
            if metric == score or metric.endswith(("samples", "_l2")):
                continue
            values = [scores[f"{name}/{metric}"] for name in names if f"{name}/{metric}" in scores]
            if len(values) == len(names):
                out[f"{MEAN}/{metric}"] = sum(values) / len(values)
    return out
