"""Build the components of a run from its recipe: data, engine, loss, evaluation.

`launcher.train` puts them together.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from clip_train import dist, engines
from clip_train.checkpoint.restore import Resumed
from clip_train.data.config import order_keys
from clip_train.data.index import ShardIndex, index_of, resume_data
from clip_train.data.invalid import table_of
from clip_train.data.loader import TrainLoader
from clip_train.data.reader import count_missing
from clip_train.data.tokenizer import Tokenize, Tokenizer
from clip_train.data.validation import ImageFolder, ValLoader
from clip_train.engines.base import Engine, MovingAverage
from clip_train.errors import RankError, UserError
from clip_train.evaluate.examples import Examples
from clip_train.evaluate.features import never
from clip_train.evaluate.loop import evaluate
from clip_train.losses.build import build_loss
from clip_train.losses.distillation import Teacher
from clip_train.models.clip import build_model, count_parameters
from clip_train.models.config import AnyArchitecture, OwnModel, vocabulary_mistakes
from clip_train.models.freeze import freeze
from clip_train.models.openclip.config import OpenCLIPArchitecture
from clip_train.models.weights import base_digest, load_teacher
from clip_train.optim.optimizer import build_optimizer
from clip_train.processes import node_name
from clip_train.recipe.memory import DTYPES
from clip_train.recipe.recipe import RunConfig
from clip_train.recipe.resolve import Resolved
from clip_train.recipe.weights import KEYS, first_of_node, weights_here
from clip_train.task import Features, MicroBatch, Objective, named_features, text_lengths
from launcher.runtime.log import log, warn


def shared_index(
    config: RunConfig, key: str, spec: str, known: ShardIndex | None = None
) -> ShardIndex:
    """The shards of `data.train` or `data.val` on every rank. One rank of each node lists them and
    reads their index; the others map it into their memory.

    known: the result if this rank has looked before.
    """

    def look() -> ShardIndex:
        return known or index_of(spec, config.data.verify, config.storage, key)

    looks = first_of_node()
    found = dist.agreed(lambda: look() if looks else None)
    offer: tuple[str, str, str] | None = None
    if found is not None:
        offer = (found.fingerprint(), *found.shared.address)
    # by node, rank 0's first
    offers = {node: its for node, its in dist.gather_objects((node_name(), offer)) if its}
    first = next(iter(offers))
    others = sorted(node for node in offers if offers[node][0] != offers[first][0])
    if others:
        dist.raise_agreed(  # all ranks know it: for an evaluation it is a warning
            RankError(
                f"{key} ({spec}) is not the same list of shards on all nodes: {', '.join(others)} "
                f"and {first} differ; mount it on all"
            )
        )

    def take() -> ShardIndex:
        if found is not None:
            return found
        _, path, name = offers[node_name()]
        try:
            return ShardIndex.opened(path, name)
        except OSError:  # a container of its own on that node
            return look()

    return dist.agreed(take)


def build_loader(
    resolved: Resolved,
    device: torch.device,
    resumed: Resumed | None,
    index: ShardIndex,
) -> TrainLoader:
    """Collective: the loader, at the first step or at the checkpoint's."""
    config = resolved.config
    order_start, sizes = 0, config.batch.sizes
    if resumed is not None:
        data = resume_data(
            resumed.state,
            index,
            order_keys(config.data, sizes, config.run.seed),
            changed_shards=config.data.allow_changed_shards,
            changed_order=config.checkpoint.allow_changed_recipe,
        )
        index, order_start = data.index, data.order_start
        if data.notice and dist.is_main():
            warn(f"the data starts over at step {order_start}, as the recipe allows: {data.notice}")
    index = count_missing(index, config.storage, log=log)
    text = resolved.architecture.text_cfg
    return dist.agreed(
        TrainLoader,
        config.data,
        image_size=resolved.architecture.vision_cfg.image_size,
        context_length=text.context_length,
        global_size=sizes,
        seed=config.run.seed,
        rank=dist.rank(),
        world_size=dist.world_size(),
        step=resumed.step if resumed else 0,
        order_start=order_start,
        index=index,
        pin_memory=device.type == "cuda",
        storage=config.storage,
        tokenizer=dist.agreed(tokenizer_of, resolved.architecture),
        lengths=text_lengths if resolved.texts_end else None,
        pack_texts=resolved.padded_because is None,
        groups=config.loss.groups,
    )


def tokenizer_of(architecture: AnyArchitecture) -> Tokenize:
    """Picklable. UserError if it is not CLIP's tokenizer and its files are missing."""
    its = None
    if isinstance(architecture, OwnModel):
        its = architecture.tokenizer
    elif isinstance(architecture, OpenCLIPArchitecture):
        from clip_train.models.openclip.model import tokenizer

        its = tokenizer(architecture)
    if its is not None:
        return its
    for mistake in vocabulary_mistakes("the model", architecture):
        raise UserError(mistake)
    return Tokenizer(architecture.text_cfg.context_length)


def build_engine(resolved: Resolved, device: torch.device) -> Engine:
    config = resolved.config

    def make_model() -> torch.nn.Module:
        model = build_model(
            resolved.architecture,
            dropout=config.model.dropout,
            activation_checkpointing=config.engine.recompute,
        )
        freeze(model, config.model)
        return model

    # OpenCLIP's towers are looked at once, outside of an engine's own way to construct
    count_parameters(resolved.architecture)
    engine = engines.build(
        config.engine,
        make_model,
        partial(build_optimizer, config.optim, offloaded=config.engine.offload == "optimizer"),
        device=device,
        grad_clip_norm=config.optim.grad_clip_norm,
        micro_size=resolved.plan.micro_size,
    )
    if config.optim.ema_decay is not None:
        engine.ema = MovingAverage(config.optim.ema_decay, config.optim.ema_warmup)
    engine.saves_frozen = resolved.architecture.lora is None
    return engine


def base_of(config: RunConfig) -> str | None:
    """Collective: the digest of the weights that adapters are trained on; None without adapters."""
    keys = KEYS if config.model.lora is not None else ()
    with weights_here(config.model, config.storage, keys) as here:
        return dist.on_main(partial(base_digest, here, config.run.seed))


def build_objective(config: RunConfig, device: torch.device) -> tuple[Objective, str | None]:
    """Collective: the loss, and the digests of teachers. If the recipe names teachers, they are
    frozen and in the engine's precision. RankError if nodes see different teachers."""
    scales: list[Any] = config.loss.teacher_scales or [None] * len(config.model.teachers())
    teachers: list[Teacher] = []
    digests: list[str] = []
    for alone, scale in zip(config.model.teachers(), scales, strict=False):
        with weights_here(alone, config.storage, ["teacher"]) as here:
            load = partial(load_teacher, alone, str(here.teacher), device)
            teacher, digest = dist.agreed(load, DTYPES[config.engine.precision])
        (first, own), *others = dist.gather_objects((node_name(), digest))
        other = next((node for node, each in others if each != own), None)
        if other is not None:
            raise RankError(
                f"model.teacher ({alone.teacher}) on {other} is not that of {first}; mount it on "
                "all"
            )
        teachers.append(partial(run_teacher, teacher, scale))
        digests.append(digest)
    if not teachers:
        teachers = [
            partial(stored_teacher, config.data.reinforced or [], t, scale)
            for t, scale in enumerate(scales)
        ]
    return (
        build_loss(config.loss, teachers, config.data.texts_per_image),
        ",".join(digests) or None,
    )


def run_teacher(teacher: torch.nn.Module, scale: float | None, micro_batch: MicroBatch) -> Features:
    """scale: the factor of its logits; None: its own."""
    # each alone: a CoCa writes no captions then
    image, *_ = teacher(micro_batch.images, None)
    _, text, own = teacher(None, micro_batch.texts)[:3]
    return named_features(image, text, own if scale is None else torch.full_like(own, scale))


def stored_teacher(
    widths: Sequence[int], t: int, scale: float, micro_batch: MicroBatch
) -> Features:
    """The features of teacher t that the shards hold; of all: `widths`."""
    assert micro_batch.teacher_features is not None
    rows = micro_batch.teacher_features.unflatten(1, (-1, sum(widths)))  # [b, 1 + T, F]
    image, texts = rows[:, 0].split([*widths], 1)[t], rows[:, 1:].split([*widths], 2)[t]
    return named_features(image, texts.flatten(0, 1), image.new_full((1,), scale))


def evaluation(
    config: RunConfig,
    architecture: AnyArchitecture,
    engine: Engine,
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
    tokenizer = dist.agreed(tokenizer_of, architecture)
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
        """Listed and counted once, by all ranks together."""
        folder = (
            None
            if key.startswith("data.val")
            else dist.on_main(partial(ImageFolder.find, places[key], key))
        )
        if folder is None:
            return count_missing(shared_index(config, key, places[key]), config.storage)
        if folder.skipped.counts and dist.is_main():
            warn(f"{key} ({places[key]}): skipped {folder.skipped}, not images of a class")
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
            )
            for key in places
        }
        val, labelled = loaders.get("data.val"), loaders.get("evaluate.zero_shot_data")
        out = dict[str, float]()
        for key, loader in loaders.items():
            name = key.removeprefix("data.val.")
            if name != key:
                metrics = measure(loader, without_classes, examples=examples)
                examples = None  # only of the first set
                out |= {f"{name}/{each}": value for each, value in metrics.items()}
        if val or labelled:
            out |= measure(val, config.evaluate, labelled=labelled, examples=examples)
        own = [sample for loader in loaders.values() for sample in loader.invalid]
        invalid = [sample for samples in dist.gather_objects(own) for sample in samples]
        if invalid and dist.is_main():
            warn(f"the evaluation data has samples that cannot be used:\n{table_of(invalid)}")
        return out | {"unusable_samples": float(len(invalid))} if invalid else out

    def with_average() -> dict[str, float]:
        # `data.inputs` may hold no image
        out = run_once(examples if config.data.inputs is None else None)
        if engine.ema is not None:
            with engine.averaged():
                out |= {
                    f"ema_{name}": each
                    for name, each in run_once(None).items()
                    if not name.endswith("samples")
                }
        return out

    return with_average
