"""Resolve a recipe for a number of ranks on this machine: report all mistakes at once, or give
every `auto` a value.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from clip_train.batch import BatchPlan, plan_batch
from clip_train.data.benchmark import benchmark_shards
from clip_train.data.config import (
    SourceSummary,
    check_source,
    expand_existing,
    order_keys,
)
from clip_train.data.images import augmented, own_augmentation
from clip_train.data.shards import expand_braces
from clip_train.data.validation import ImageFolder
from clip_train.engines.config import EngineConfig
from clip_train.errors import UserError, raise_all
from clip_train.evaluate.data_sets import EvaluationSet, evaluation_sets
from clip_train.evaluate.zero_shot import ZeroShotClasses, check_samples
from clip_train.losses.config import LossConfig
from clip_train.memory.plan import StepLayout
from clip_train.models.clip import own_mistakes, parameter_sizes, random_mistakes
from clip_train.models.config import (
    AnyArchitecture,
    Architecture,
    OwnModel,
    vocabulary_mistakes,
)
from clip_train.models.freeze import check_drawn_positions, trained_parameters
from clip_train.optim.optimizer import lr_factors, needs, without_decay
from clip_train.optim.schedule import learning_rate
from clip_train.recipe.recipe import Recipe, with_samples
from clip_train.recipe.weights import place_mistakes
from clip_train.settings import broken, is_import_path, shown
from clip_train.storage.urls import is_remote, local_path

MOST_PASSES = 2  # over the data in one epoch; with more, data.num_samples is a mistake
CHARACTERS_PER_TOKEN = 4  # of a caption, about, with CLIP's tokenizer
LONG = 2  # captions of this many times the context length get a note


@dataclass(frozen=True)
class Resolved:
    """A recipe with a value for every `auto`; those that depend on memory get theirs from
    `memory.choose_layout`.
    """

    recipe: Recipe  # the recipe with its defaults
    config: Recipe  # what runs
    plan: BatchPlan
    architecture: AnyArchitecture
    layout: StepLayout | None = None  # chosen by memory
    source: SourceSummary | None = None  # on the rank that has checked the data
    # on rank 0: notes about evaluation data without labels
    unlabelled: list[str] = field(default_factory=list)
    no_limit: bool = False  # batch.kept_graphs became 1, because the memory limit is unknown

    @property
    def chosen_values(self) -> dict[str, dict[str, Any]]:
        """Values that the ranks and their devices have given to `auto`, by section and key. A
        checkpoint stores them beside the recipe. Values chosen by memory are not among them: a
        resume may choose others."""
        values: dict[str, dict[str, Any]] = {
            "engine": self.config.engine.model_dump(
                include={"kind", "precision", "reduce_dtype", "compile"}
            ),
            "data": {"workers": self.config.data.workers},
        }
        if self.layout is None:
            values["batch"] = {"kept_graphs": self.config.batch.kept_graphs}
        return values

    def notes(self) -> list[str]:
        """Notes for the user: work that a memory limit would save, sizes that do not fit the
        indexed data, evaluation data without labels."""
        data = self.config.data
        one_graph = (
            self.no_limit and self.plan.accum_steps > 1,
            "batch.kept_graphs=auto keeps one graph, because no limit of memory is known without "
            "a GPU; set batch.memory_limit, such as 8GiB, to keep as many as fit",
        )
        context = self.architecture.text_cfg.context_length
        characters = 0 if self.source is None else self.source.caption_characters
        long_captions = (
            characters > LONG * CHARACTERS_PER_TOKEN * context,
            f"the captions of data.train have {characters:,} characters (the median of the first "
            f"ones), and {self.config.model.name} reads {context} tokens, about "
            f"{CHARACTERS_PER_TOKEN * context:,} characters: the rest is cut off; raise "
            "model.context_length, or shorten the captions",
        )
        counted = None if self.source is None else self.source.index.num_samples
        if counted is None or data.train_weights is not None or data.resampled:
            return [*self.unlabelled, *broken([one_graph, long_captions])]
        epochs = self.config.run.epochs
        given = data.num_samples
        size = self.plan.global_size
        return self.unlabelled + broken(
            [
                one_graph,
                long_captions,
                (
                    epochs is not None and given != counted,
                    f"run.epochs ({epochs}) counts data.num_samples ({given}) as an epoch, and "
                    f"data.train has {counted} samples; set data.num_samples=null",
                ),
                (
                    size > counted,
                    f"batch.global_size ({size}) is more than the samples of data.train "
                    f"({counted}): a batch holds some of them twice, as negatives of each other; "
                    "lower batch.global_size",
                ),
            ]
        )

    @property
    def texts_end(self) -> bool:
        """Whether no text tower, of the student or a teacher, reads tokens behind a text's end."""
        models = [self.architecture, *self.config.model.teacher_architectures()]
        return all(model.text_cfg.ends for model in models)

    @property
    def padded_because(self) -> str | None:
        """The reason why texts are computed with their padding; None: they are packed. It holds for
        all ranks and steps: ZeRO 2 sums gradients in the order of the graph."""
        engine, model = self.config.engine, self.config.model
        if not engine.pack_texts:
            return "engine.pack_texts is false"
        if engine.linear is not None:
            return f"engine.linear is {engine.linear}"
        if type(self.architecture) is not Architecture:
            return f"{model.name} is not one of clip-train's own"
        if not self.texts_end:
            return "a text tower reads more than each text up to its end"
        return None


def resolve(
    recipe: Recipe,
    world_size: int,
    *,
    per_node: int = 8,
    read_data: bool = True,
    is_rank: bool = False,
    look_for_weights: bool = False,
) -> Resolved:
    """Resolve a recipe for this many ranks on this machine. UserError: all mistakes that one
    process can find.

    per_node: ranks on a node. is_rank: this process will train, so the recipe must fit its devices.
    look_for_weights: local initial weights must exist, which only a fresh start needs.
    """
    recipe = config = with_samples(recipe)
    problems: list[UserError] = []

    def collect(action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except UserError as e:
            problems.append(e)
            return None

    model = config.model
    architecture = collect(config.architecture)
    if architecture is not None:
        numbered_layers = (
            not architecture.layered and config.optim.layer_decay != 1,
            f"optim.layer_decay ({config.optim.layer_decay}): the layers of {model.name} are not "
            "numbered as OpenCLIP's own; set optim.layer_decay=1, or give optim.lr_multipliers by "
            "name",
        )
        recomputed_alone = (
            config.engine.activation_checkpointing == "pointwise"
            and type(architecture) is not Architecture,
            f"engine.activation_checkpointing (pointwise) is for clip-train's own models, and "
            f"{model.name} is not one: set engine.activation_checkpointing=true, or auto",
        )
        problems += map(UserError, broken([numbered_layers, recomputed_alone]))
        problems += map(UserError, native_mistakes(config, architecture))
        teachers = collect(model.teacher_architectures) or []
        for teacher_config, teacher in zip(model.teachers(), teachers, strict=False):
            name = f"{teacher_config.teacher}, of model.teacher"
            problems += map(UserError, vocabulary_mistakes(name, teacher))
        if isinstance(architecture, OwnModel):
            mistakes = collect(own_mistakes, architecture, config.data.num_texts) or []
            problems += map(UserError, mistakes)
        problems += place_mistakes(model, must_exist=look_for_weights)
        problems += map(UserError, vocabulary_mistakes(model.name, architecture))
        problems += map(UserError, collect(random_mistakes, architecture) or [])
        names = parameter_sizes(architecture)
        if collect(trained_parameters, model, architecture) is not None:
            collect(check_drawn_positions, model, names)
        collect(lr_factors, config.optim, names)
        collect(without_decay, config.optim, names)
    tokens_per_image = None
    if architecture is not None:
        tokens_per_image = config.tokens_per_image(architecture)
    plan = collect(plan_batch, config.batch, world_size, tokens_per_image)
    engine = config.engine.on_this_machine(world_size, per_node)
    if is_rank:
        sizes_unknown = config.needs_limit and config.batch.memory_limit is None
        no_memory = (sizes_unknown and not torch.cuda.is_available(), no_limit(config))
        machine_mistakes = engine.mistakes_here() + config.log.mistakes_here()
        machine_mistakes += broken([no_memory])
        problems += map(UserError, machine_mistakes)
    source = None
    unlabelled: list[str] = []
    if read_data:
        source, unlabelled = look_at_data(config, problems, collect)
    else:
        for key, place in {"data.train": config.data.train, **config.evaluated_on}.items():
            collect(expand_braces, place, key)
    if source is not None:
        problems += map(UserError, epoch_mistakes(config, source))
    checks: list[tuple[bool, partial[list[str]]]] = [
        (is_import_path(config.schedule.name), partial(schedule_mistakes, config)),
        (config.data.aug_own is not None, partial(augmentation_mistakes, config)),
        (
            is_import_path(config.optim.name),
            partial(engine_mistakes, config, engine, plan, world_size),
        ),
    ]
    if architecture is not None:
        checks.append(
            (is_import_path(config.loss.kind), partial(loss_mistakes, config, architecture))
        )
    # checks that import code of the user's run last, and only if there is no other mistake
    for is_imported, check in sorted(checks, key=itemgetter(0)):
        if not (problems and is_imported):
            problems += map(UserError, collect(check) or [])
    raise_all(problems)
    order = order_keys(config.data, config.batch.sizes, config.run.seed)
    data = {"lanes": order["data.lanes"], "shuffle_block": order["data.shuffle_block"]}
    config = config.updated(data=data, engine=dict(engine))
    return Resolved(recipe, config, plan, architecture, source=source, unlabelled=unlabelled)


def epoch_mistakes(config: Recipe, source: SourceSummary) -> list[str]:
    """An epoch that is far larger than the data: a number that belongs to other data."""
    data, counted = config.data, source.index.num_samples
    if config.run.epochs is None or data.num_samples is None or counted is None:
        return []
    if data.train_weights is not None or data.resampled:  # an epoch may have any size
        return []
    if data.num_samples <= MOST_PASSES * counted:
        return []
    return [
        f"data.num_samples ({data.num_samples}) is more than {MOST_PASSES} times the {counted} "
        "samples that data.train has by its index, so run.epochs would be that much longer; set "
        "data.num_samples=null to use the index"
    ]


def look_at_data(
    config: Recipe, problems: list[UserError], collect: Callable[..., Any]
) -> tuple[SourceSummary | None, list[str]]:
    """Check the first shard of data.train, and all evaluation data: their first labels, too.
    Returns what is known of the shards, and notes about labels."""
    source = collect(check_source, config.data, config.storage)
    sets = collect(evaluation_sets, config) or []
    for data_set in sets:
        collect(check_set, data_set)
    evaluate = config.evaluate
    if evaluate.zero_shot_classes is not None and all(each.classes is None for each in sets):
        # without data they are not used, but a mistake in them is reported
        collect(ZeroShotClasses.load, evaluate.zero_shot_classes, evaluate.templates)
    notes = []
    if not problems:
        for data_set in sets:
            notes.append(collect(check_samples, data_set, config.data.caption_key, config.storage))
    return source, [note for note in notes if note is not None]


def check_set(data_set: EvaluationSet) -> None:
    """UserError, RankError if data for evaluation or their classes are missing."""
    place, key = data_set.place, data_set.key
    if data_set.classes is not None:
        ZeroShotClasses.load(data_set.classes, data_set.templates, data_set.classes_key)
    if data_set.train is not None and ImageFolder.find(data_set.train, "--linear-probe") is None:
        expand_existing(data_set.train, "--linear-probe")
    if not data_set.captions and ImageFolder.find(place, key) is not None:
        return
    if data_set.captions and data_set.counts_in_mean:
        check_set_with_captions(data_set)
    expand_existing(place, key)


def check_set_with_captions(data_set: EvaluationSet) -> None:
    """UserError for labeled images without classes, and for templates without classes."""
    if data_set.templates is not None:
        raise UserError(
            f"evaluate.sets.{data_set.name}.templates ({data_set.templates}) is for labeled images; "
            f"set {data_set.classes_key} as well, or take it out"
        )
    place = data_set.place
    is_folder = not is_remote(place) and local_path(place).is_dir()
    if is_folder and benchmark_shards(place) is None:
        raise UserError(
            f"{data_set.key} ({place}) is a folder: for shards with captions give '{place}/*.tar'; "
            f"labeled images need {data_set.classes_key}"
        )


def no_limit(config: Recipe) -> str:
    return (
        f"{', '.join(config.chosen)} = auto needs batch.memory_limit where no GPU is looked at: "
        "the bytes one rank may use, such as batch.memory_limit=8GiB (for a GPU, about 0.9 of its "
        "memory)"
    )


def loss_mistakes(config: Recipe, architecture: AnyArchitecture) -> list[str]:
    """The sigmoid loss needs a bias (SigLIP starts it at -10, the scale at 10); a softmax would
    cancel one. UserError for an import path that does not lead to a loss.
    """
    name, kind, bias = config.model.name, config.loss.kind, architecture.init_logit_bias
    weights, data = config.loss.weights, config.data
    takes_bias = config.loss.build((), data.texts_per_image).takes_bias
    own_losses = isinstance(architecture, OwnModel)
    captions = getattr(architecture, "multimodal_cfg", None) is not None
    widest = max(config.loss.widths or {0: 0})
    rules = [
        (
            widest > architecture.embed_dim,
            f"loss.widths ({shown(config.loss.widths)}): {widest} is more than the "
            f"{architecture.embed_dim} values of a feature of {name}; remove it",
        ),
        (
            takes_bias and bias is None,
            f"loss.kind ({kind}) needs a model with a bias, and {name} has none: "
            "set model.init_logit_bias=-10 and model.init_logit_scale=2.3026",
        ),
        (
            not takes_bias and bias is not None,
            f"model.init_logit_bias ({bias}): {name} has a bias, which loss.kind ({kind}) does not "
            "use: set model.init_logit_bias=null, or loss.kind=sigmoid",
        ),
        (
            weights != LossConfig().weights and not captions and not own_losses,
            f"loss.caption_weight ({weights['caption_loss']}) and loss.contrastive_weight "
            f"({weights['contrastive_loss']}) are factors of a CoCa's two losses, and {name} has "
            "one: set loss.caption_weight=2 and loss.contrastive_weight=1, or take them out",
        ),
        (
            captions and data.num_texts > 1,
            f"data.texts_per_image ({data.texts_per_image}) and data.negative_texts "
            f"({shown(data.negative_texts)}): {name} writes captions, and learns one text of each "
            "image; set data.texts_per_image=1 and data.negative_texts=null",
        ),
        (
            not any(weights.values()),
            "loss.caption_weight and loss.contrastive_weight are both 0: nothing would be trained; "
            "set one of them to 1",
        ),
    ]
    return broken(rules)


def native_mistakes(config: Recipe, architecture: AnyArchitecture) -> list[str]:
    """Keys that do not go with the native resolution of images, or that need it."""
    tokens, patches = config.batch.micro_tokens, architecture.patches
    if patches is None:
        return broken(
            [
                (
                    tokens is not None,
                    f"batch.micro_tokens ({tokens}) counts patches at native resolution: set "
                    "data.resize=native, or use batch.micro_size",
                ),
                (
                    config.evaluate.tokens is not None,
                    f"evaluate.tokens ({shown(config.evaluate.tokens)}) needs native resolution: "
                    "set data.resize=native, or evaluate.tokens=null",
                ),
            ]
        )
    dropped = architecture.vision_cfg.patch_dropout
    if config.model.patch_dropout is not None:
        dropped = config.model.patch_dropout
    return broken(
        [
            (
                tokens is not None and patches.most > tokens,
                f"batch.micro_tokens ({tokens}) is less than the {patches.most} patches of one "
                f"image (data.tokens); raise it to {patches.most} or more",
            ),
            (
                tokens is not None and config.batch.micro_size == "auto",
                f"batch.micro_size (auto) and batch.micro_tokens ({tokens}) both cut a batch: take "
                "one of them out",
            ),
            (
                dropped > 0,
                f"model.patch_dropout ({dropped}) leaves out patches of squares, and data.resize "
                "is native: set model.patch_dropout=0, and lower data.tokens for the same speed",
            ),
            (
                config.model.teacher is not None,
                f"model.teacher ({shown(config.model.teacher)}) sees squares, and data.resize is "
                "native: set model.teacher=null, or data.resize=auto",
            ),
            (
                any(size > patches.most for size in config.evaluate.tokens or []),
                f"evaluate.tokens ({config.evaluate.tokens}): a model of at most {patches.most} "
                "patches (data.tokens) is evaluated with fewer; raise data.tokens",
            ),
        ]
    )


def augmentation_mistakes(config: Recipe) -> list[str]:
    """`data.aug_own` is tried on one image. UserError for an import path that leads to nothing."""
    augmentation = own_augmentation(config.data.aug_own, config.data.aug_own_options)
    try:
        if augmentation is not None:
            augmented(augmentation, torch.zeros(3, 64, 64, dtype=torch.uint8), 0)
    except Exception as e:
        where = f"data.aug_own ({config.data.aug_own})"
        return [f"{where} failed on an image of 64 pixels: {type(e).__name__}: {e}; correct it"]
    return []


def schedule_mistakes(config: Recipe) -> list[str]:
    """The rate of the last step. UserError for an import path that does not lead to a schedule."""
    rate = learning_rate(config.schedule, config.optim.lr, config.steps - 1, config.steps)
    if isinstance(rate, int | float) and 0 <= rate < math.inf:
        return []
    return [
        f"schedule.name ({config.schedule.name}) returned {rate!r} for the last step; return a "
        "number of at least 0"
    ]


def engine_mistakes(
    config: Recipe, engine: EngineConfig, plan: BatchPlan | None, world_size: int
) -> list[str]:
    """UserError for an import path that does not lead to an optimizer."""
    needs(config.optim)
    return engine.package.mistakes(
        engine,
        config.optim,
        world_size=world_size,
        micro_size=plan.micro_size if plan else 1,
    )
