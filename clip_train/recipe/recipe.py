"""The recipe: YAML and `key.path=value` overrides into one frozen, fully checked Recipe.

All mistakes are reported at once, each with its path, its value and what to write instead.
"""

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.fields import FieldInfo

from clip_train.batch import BatchConfig, BatchStage
from clip_train.checkpoint.config import CheckpointConfig
from clip_train.data.config import DataConfig, TokenStage, TrainWeightsStage, expand_existing
from clip_train.data.index import index_of
from clip_train.data.shards import expand_braces
from clip_train.engines.config import EngineConfig
from clip_train.errors import UserError, missing, raise_all
from clip_train.evaluate.config import EvaluateConfig, SetConfig
from clip_train.inputs import layout_of
from clip_train.losses.config import LossConfig
from clip_train.metrics.config import LogConfig
from clip_train.models.config import AnyArchitecture, ModelConfig, load_architecture
from clip_train.models.lora import Lora
from clip_train.optim.config import OptimConfig
from clip_train.optim.schedule import ScheduleConfig
from clip_train.places import expanded
from clip_train.recipe.launch import LaunchConfig
from clip_train.recipe.names import OTHER_NAMES
from clip_train.resizing import RESIZED
from clip_train.settings import (
    IMPORT_PATH,
    LARGEST,
    Allowed,
    InvalidValueError,
    Messages,
    Place,
    Refused,
    Settings,
    Silent,
    explain,
    rule,
    shown,
    validated,
)
from clip_train.storage.config import StorageConfig
from clip_train.storage.redact import redact
from clip_train.yaml_text import YamlError, dump_yaml, load_yaml

if TYPE_CHECKING:
    from clip_train.data.values import SampleValue

MOST_CHARACTERS = 1 << 22  # of a recipe


class RunSection(Settings):
    """The `run` section: where and how long."""

    name: Annotated[
        str,
        Allowed(
            "letters, digits, dots, dashes and underscores, at most 100, a letter or digit first"
        ),
        Silent,
    ] = Field("clip", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Letters, digits, dots, dashes and underscores."""
    dir: Annotated[Place | None, Silent] = None
    """The folder for everything that the run writes; null: runs/<run.name>. All ranks must see
    it."""
    seed: Annotated[NonNegativeInt, Refused] = 0
    """The seed of the initial weights, the order of the data, augmentation and dropout."""
    steps: Annotated[
        PositiveInt | None, Allowed("a whole number of at least 1", example="10000")
    ] = None
    """Optimizer steps in all. Give this or run.epochs."""
    epochs: Annotated[
        float | None,
        Field(gt=0, le=1e6),
        Allowed("a number greater than 0, at most 1,000,000", example="32"),
    ] = None
    """An alternative to run.steps; needs an index of the shards, or data.num_samples."""

    @rule
    def _one_length(self) -> Messages:
        if (self.steps is None) == (self.epochs is None):
            yield (
                f"give exactly one of run.steps (it is {shown(self.steps)}) and run.epochs "
                f"(it is {shown(self.epochs)}); the other is null"
            )

    @rule
    def _local_folder(self) -> Messages:
        if "://" in (self.dir or ""):
            yield (
                f"run.dir ({redact(self.dir or '')}) takes a local folder; give the URL of a store "
                "as checkpoint.remote"
            )


class Recipe(Settings):
    """A whole recipe."""

    run: RunSection
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig
    storage: Annotated[StorageConfig, Silent] = Field(default_factory=StorageConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    checkpoint: Annotated[CheckpointConfig, Silent] = Field(default_factory=CheckpointConfig)
    evaluate: Annotated[EvaluateConfig, Silent] = Field(default_factory=EvaluateConfig)
    log: Annotated[LogConfig, Silent] = Field(default_factory=LogConfig)
    launch: Annotated[LaunchConfig, Silent] = Field(default_factory=LaunchConfig)

    @property
    def _num_teachers(self) -> int:
        return len(self.model.teachers() or self.data.reinforced or ())

    @property
    def _teachers(self) -> str:
        """For messages: the key that names the teachers, with its value."""
        if self.model.teacher is None:
            return f"data.reinforced ({shown(self.data.reinforced)})"
        return f"model.teacher ({shown(self.model.teacher)})"

    @rule
    def _loss_of_teachers(self) -> Messages:
        loss = self.loss
        if self._num_teachers and (loss.kind, loss.exchange) != ("info_nce", "gather"):
            yield (
                f"{self._teachers} goes with loss.kind=info_nce and loss.exchange=gather, not with "
                f"{loss.kind} and {loss.exchange}"
            )

    @rule
    def _scales_of_teachers(self) -> Messages:
        # shards do not tell the factors of their teachers' logits
        needed = bool(self._num_teachers) and self.model.teacher is None
        if needed or self.loss.teacher_scales is not None:
            yield from self._one_for_each_teacher("teacher_scales", self.loss.teacher_scales)

    @rule
    def _weights_of_teachers(self) -> Messages:
        if self.loss.teacher_weights is not None:
            yield from self._one_for_each_teacher("teacher_weights", self.loss.teacher_weights)

    def _one_for_each_teacher(self, key: str, factors: list[float] | None) -> Messages:
        number = self._num_teachers
        if factors is None or len(factors) != number:
            yield (
                f"loss.{key} ({shown(factors)}) must have one number for each of the {number} "
                f"teachers of {self._teachers}; set loss.{key}={[100] * number or 'null'} or "
                "another"
            )

    @rule
    def _teachers_named_once(self) -> Messages:
        if self.model.teacher is not None and self.data.reinforced:
            yield (
                f"data.reinforced ({shown(self.data.reinforced)}) and model.teacher "
                f"({shown(self.model.teacher)}) both name teachers; set data.reinforced='[]', or "
                "model.teacher=null"
            )

    @rule
    def _distillation_needs_teachers(self) -> Messages:
        weights = self.loss.distill_weights
        if weights != (1.0, 1.0) and not self._num_teachers:
            yield (
                f"loss.distill_weights ({shown(weights)}) need teachers: name them in "
                "model.teacher, or in data.reinforced; set loss.distill_weights='[1.0, 1.0]'"
            )

    @rule
    def _negative_texts(self) -> Messages:
        if self.data.negative_texts is None:
            return
        loss = self.loss
        if (
            loss.kind in ("sigmoid", "memory_bank")
            or loss.exchange == "ring"
            or self._num_teachers > 0
        ):
            yield (
                f"data.negative_texts ({shown(self.data.negative_texts)}) need loss.kind=info_nce "
                f"with loss.exchange=gather and no teachers (now {loss.kind}, {loss.exchange}, "
                f"{self._teachers}); set these, or data.negative_texts=null"
            )

    @rule
    def _groups(self) -> Messages:
        groups = self.loss.groups
        if groups is not None and (self.data.num_texts > 1 or self._num_teachers > 0):
            yield (
                f"loss.groups ({groups}) goes with one text of an image (now "
                f"{self.data.num_texts}) and no teachers ({self._teachers}); set these, or "
                "loss.groups=null"
            )

    @rule
    def _rounded_activations(self) -> Messages:
        engine = self.engine
        if engine.linear is not None and engine.precision in ("fp32", "fp16"):
            yield (
                f"engine.linear ({engine.linear}) rounds bf16 activations (engine.precision is "
                f"{engine.precision}): set engine.precision=bf16, or engine.linear=null"
            )

    @rule
    def _one_labeled_set(self) -> Messages:
        evaluate, sets = self.evaluate, self.data.val
        if (
            isinstance(sets, dict)
            and evaluate.zero_shot_classes is not None
            and evaluate.zero_shot_data is None
        ):
            yield (
                f"evaluate.zero_shot_classes ({shown(evaluate.zero_shot_classes)}) with several "
                f"sets in data.val ({', '.join(sets)}): set evaluate.zero_shot_data to the one "
                "with labels"
            )

    @rule
    def _names_of_sets(self) -> Messages:
        val = self.data.val
        for name in self.evaluate.sets or {}:
            if isinstance(val, dict) and name in val:
                yield (
                    f"evaluate.sets.{name} and data.val.{name}: the scores of both would have the "
                    "same names; rename one of them"
                )

    @rule
    def _teachers_see_images(self) -> Messages:
        if self.model.teacher is not None and self.data.inputs is not None:
            yield (
                f"{self._teachers} sees images, and the samples have data.inputs "
                f"({shown(self.data.inputs)}); set model.teacher=null"
            )

    @property
    def _can_count(self) -> bool:
        """Whether the number of steps follows from the recipe alone. Else `resolve` counts the
        samples, and a recipe without any length has a message of its own."""
        if self.run.steps is not None:
            return self.run.epochs is None
        return self.run.epochs is not None and self.data.num_samples is not None

    @property
    def _too_many_samples(self) -> bool:
        return (self.run.epochs or 0) * (self.data.num_samples or 0) > LARGEST

    @rule
    def _countable(self) -> Messages:
        if self._too_many_samples:
            yield (
                f"run.epochs ({self.run.epochs:g}) of data.num_samples ({self.data.num_samples}) "
                "are more samples than can be counted; lower run.epochs, or give run.steps"
            )

    @rule
    def _warmup_ends(self) -> Messages:
        warmup = self.schedule.warmup_steps
        if warmup == 0 or not self._can_count or self._too_many_samples:
            return
        if warmup >= self.steps:
            yield (
                f"schedule.warmup_steps ({warmup}) must be less than the run's {self.steps} steps; "
                "lower it, or raise run.steps"
            )

    @rule
    def _cooldown_fits(self) -> Messages:
        cooldown = self.schedule.cooldown_steps
        if cooldown == 0 or not self._can_count or self._too_many_samples:
            return
        if cooldown > self.steps:
            yield (
                f"schedule.cooldown_steps ({cooldown}) must be at most the run's {self.steps} "
                "steps; lower it, or raise run.steps"
            )

    @rule
    def _average_forgets_the_start(self) -> Messages:
        decay = self.optim.ema_decay
        if decay is None or self.optim.ema_warmup or self.model.init_from is not None:
            return
        if not self._can_count or self._too_many_samples:
            return
        initial = decay**self.steps
        if initial > 0.5:
            yield (
                f"optim.ema_decay ({decay}) is too high for {self.steps} steps: {initial:.0%} of "
                "the average would be the initial weights; lower it, or set optim.ema_warmup=true"
            )

    def sample_values(self) -> "dict[str, SampleValue]":
        """By the name of its column: what the loss reads of each sample beside image and texts."""
        from clip_train.data.values import GroupId  # late: it imports torch

        values: dict[str, SampleValue] = {}
        if self.loss.groups is not None:
            values["ids"] = GroupId(self.loss.groups)
        return values

    def architecture(
        self, model: ModelConfig | None = None, trained: Mapping[str, Any] = {}
    ) -> AnyArchitecture:
        """The model's, which gets `data.resize` and `data.inputs`. model: instead of this recipe's.
        trained: as in `resized`. UserError."""
        architecture, inputs = (model or self.model).architecture(), self.data.inputs
        architecture = self.resized(architecture, trained)
        if inputs is None:
            return architecture
        if getattr(architecture, "own", None) is None:
            raise UserError(
                f"data.inputs ({shown(inputs)}) need a model of your own, and model.name "
                f"({self.model.name}) gets images: set model.name to the import path of one, or "
                "data.inputs=null"
            )
        return architecture.model_copy(
            update={"inputs": layout_of(inputs, architecture.vision_cfg.image_size)}
        )

    def resized(
        self, architecture: AnyArchitecture, trained: Mapping[str, Any] = {}
    ) -> AnyArchitecture:
        """With `data.resize`. trained: as the weights' own description, or a checkpoint's, says."""
        described = {key: getattr(architecture, key) for key in RESIZED}
        keys = described | {key: trained[key] for key in RESIZED if key in trained}
        if self.data.resize != "auto":
            keys["resize_mode"] = self.data.resize
        elif keys["image_tokens"] is not None:
            keys["resize_mode"] = "native"
        if keys["resize_mode"] != "native":
            return architecture.model_copy(update={**keys, "image_tokens": None})
        patch_size, budgets = architecture.native_patch_size, self.data.budgets
        if patch_size is None:
            raise UserError(
                f"data.resize ({self.data.resize}) is native resolution, and model.name "
                f"({self.model.name}) takes only squares: set data.resize=shortest or another, or "
                "name a vision transformer of clip-train's own, such as ViT-B-16 without "
                "open_clip:, or a model with timm's naflexvit"
            )
        if budgets is not None:
            keys["image_tokens"] = budgets.most
        elif keys["image_tokens"] is None:  # those of a square of the model's size
            keys["image_tokens"] = (architecture.vision_cfg.image_size // patch_size) ** 2
        return architecture.model_copy(update=keys)

    def tokens_per_image(self, architecture: AnyArchitecture) -> float | None:
        """At native resolution, the mean number of patches of an image; None: squares."""
        if architecture.patches is None:
            return None
        budgets = self.data.budgets
        return architecture.patches.most if budgets is None else budgets.tokens_per_image

    @property
    def teacher_widths(self) -> list[int]:
        """The width of each teacher's features. UserError."""
        online = [teacher.embed_dim for teacher in self.model.teacher_architectures()]
        return online or self.data.reinforced or []

    @property
    def chosen(self) -> list[str]:
        """The keys that say `auto` and are chosen by memory (see `clip_train.recipe.memory`)."""
        values = {
            "batch.micro_size": self.batch.micro_size,
            "batch.kept_graphs": self.batch.kept_graphs,
            "engine.activation_checkpointing": self.engine.activation_checkpointing,
        }
        return [key for key, value in values.items() if value == "auto"]

    @property
    def needs_limit(self) -> bool:
        """Whether a key is `auto` that cannot be chosen without knowing the memory."""
        return self.chosen not in ([], ["batch.kept_graphs"])

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.run.steps is not None:
            return self.run.steps
        assert self.run.epochs is not None and self.data.num_samples is not None
        return self.batch.sizes.steps_for(self.run.epochs * self.data.num_samples)

    @property
    def evaluated_on(self) -> dict[str, str]:
        """The data for evaluation, by key."""
        places = self.data.val_places
        if self.evaluate.zero_shot_data is not None:
            places["evaluate.zero_shot_data"] = self.evaluate.zero_shot_data
        return places | self.evaluate.set_places

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir) if self.run.dir is not None else Path("runs") / self.run.name

    @property
    def counted(self) -> list[str]:
        """Overrides for the ranks of this recipe, so that not every rank has to query the
        storage."""
        return [f"data.num_samples={self.data.num_samples}"] if self.data.num_samples else []

    def updated(self, **sections: dict[str, Any]) -> "Recipe":
        """With other values for keys of these sections."""
        changed = {
            name: getattr(self, name).model_copy(update=values) for name, values in sections.items()
        }
        return self.model_copy(update=changed)

    def to_keep(self) -> dict[str, Any]:
        """Every key, without the secrets of its URLs: for files and trackers."""
        return redact(self.model_dump(mode="json"))

    def to_yaml(self) -> str:
        """`to_keep` as a file."""
        return dump_yaml(self.to_keep())


def parse_value(text: str, where: str) -> Any:
    """One YAML value, as on a command line."""
    try:
        return load_yaml(text)
    except YamlError as e:
        raise UserError(f"{where}: {text!r} is not a YAML value: {e}; quote it") from None


def read_recipe(path: str, what: str = "recipe") -> dict[str, Any]:
    """A recipe file, or another of its kind, as nested dicts, unchecked."""
    path = expanded(path)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
        if len(text) > MOST_CHARACTERS:
            raise UserError(
                f"the {what} {path} has more than {MOST_CHARACTERS} characters; correct the path"
            )
        raw = load_yaml(text)
    except OSError as e:
        remedy = "recipes/ has examples" if what == "recipe" else "correct the path"
        raise missing(path, f"cannot read the {what} {path}: {e.strerror}", remedy) from None
    except UnicodeError as e:
        raise UserError(f"the {what} {path} is not UTF-8: {e}; save it as UTF-8") from None
    except YamlError as e:
        raise UserError(f"the {what} {path} is not YAML: {e}; correct that line") from None
    if not isinstance(raw, dict):
        holds = (
            "sections (run:, data:, ...)" if what == "recipe" else "lines such as partition: gpu"
        )
        raise UserError(
            f"the {what} {path} must hold {holds}, and it is {shown(raw)}; see recipes/ and "
            "docs/slurm.md"
        )
    return raw


def apply_overrides(raw: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """`raw` with each `key.path=value` applied."""
    out = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    problems: list[str | UserError] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        parts = path.split(".")
        if not equals or not all(parts):
            problems.append(
                f"{override!r} is not an override; write key.path=value, for example optim.lr=1e-3"
            )
            continue
        node = out
        for part in parts[:-1]:
            inner = node.get(part)
            node[part] = inner = dict(inner) if isinstance(inner, dict) else {}
            node = inner
        try:
            node[parts[-1]] = parse_value(text, path)
        except UserError as e:
            problems.append(e)
    raise_all(problems)
    return out


def load_config(path: str, overrides: list[str] | None = None) -> Recipe:
    """The recipe at `path` with overrides, checked. UserError lists every mistake."""
    raw = read_recipe(path)
    if {"vision_cfg", "model_cfg"} & raw.keys() and "run" not in raw:
        raise UserError(
            f"{path} describes a model, and a recipe is needed here: set model.name={path} in a "
            f"recipe. To measure weights without one: clip-train evaluate WEIGHTS model.name={path}"
        )
    return check_config(apply_overrides(raw, overrides or []), path)


def mistakes_in_names(config: Recipe) -> Messages:
    """For a recipe that has other mistakes: those that `resolve` would find next, in the names of
    the model and of the data. It does not look for shards, and runs no code of the user's."""

    def model() -> None:
        name = config.model.name
        if os.path.isfile(name) or not re.fullmatch(IMPORT_PATH, name):
            load_architecture(name)

    checks: list[Callable[[], Any]] = [model]
    for get in (
        lambda: {"data.train": config.data.train},
        lambda: config.data.val_places,
        lambda: {"evaluate.zero_shot_data": config.evaluate.zero_shot_data},
        lambda: config.evaluate.set_places,
    ):
        with contextlib.suppress(InvalidValueError):
            places = [(place, key) for key, place in get().items() if place is not None]
            checks += [partial(expand_braces, *place) for place in places]
    for check in checks:
        try:
            check()
        except InvalidValueError:
            continue
        except UserError as e:
            yield from map(str, e.problems or [e])


def check_config(raw: dict[str, Any], source: str) -> Recipe:
    """The recipe `raw`. UserError lists every mistake; source: what the message calls the
    recipe."""
    explained = partial(explain, unknown=nearest)
    config, lines = validated(Recipe, raw, explained, further=mistakes_in_names)
    if config is None:
        head = f"{source}: {len(lines)} mistake{'s' if len(lines) > 1 else ''}"
        raise UserError("\n".join([head, *(f"  {line}" for line in lines)])) from None
    return config


def without_removed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a checkpoint or of a run's folder without keys of earlier versions, whatever
    their values."""
    kept = dict(raw)
    for name, section in raw.items():
        if name in SECTIONS and isinstance(section, Mapping):
            removed = SECTIONS[name].removed
            kept[name] = {key: value for key, value in section.items() if key not in removed}
    return kept


def needs_samples(config: Recipe) -> bool:
    return config.run.epochs is not None and config.data.num_samples is None


def with_samples(config: Recipe) -> Recipe:
    """Read data.num_samples from the index beside the shards if run.epochs needs it and the recipe
    lacks it. UserError.
    """
    data = config.data
    if not needs_samples(config):
        return config
    counted = None
    if data.train_weights is None and not data.resampled:  # else no epoch has each sample once
        index = index_of(data.train, data.verify, config.storage, keep=data.kept)
        counted = index.num_samples
        if counted is None:
            expand_existing(data.train, "data.train")  # shards that are missing: the clearer error
    if counted is None:
        raise UserError(
            f"run.epochs ({config.run.epochs}) needs data.num_samples, the samples in one epoch, "
            "or shards with an index (`clip-train index`); or give run.steps"
        )
    raw = config.model_dump(exclude_unset=True)
    raw["data"]["num_samples"] = counted
    return check_config(raw, "the recipe")


def nearest(path: str) -> str:
    """Suggestions for a key that does not exist."""
    parts = (
        ("batch.schedule", BatchStage),
        ("data.train_weights_schedule", TrainWeightsStage),
        ("data.tokens_schedule", TokenStage),
        ("model.lora", Lora),
        ("evaluate.sets", SetConfig),
    )
    for key, inner in parts:
        if path.startswith(f"{key}."):
            return f"known keys are {', '.join(inner.model_fields)}"
    section, _, name = path.partition(".")
    known = [key for key, _ in known_keys()]
    in_section = {key.split(".")[1]: key for key in known if key.startswith(f"{section}.")}
    names = {
        **{key.split(".")[1]: key for key in known},
        **OTHER_NAMES,
        **(in_section if name else {key: key for key in SECTIONS}),
    }
    near = difflib.get_close_matches((name or section).replace("-", "_"), names, n=1)
    return (
        f"did you mean {names[near[0]]}?"
        if near
        else f"known keys are {', '.join(in_section.values() or SECTIONS)}"
    )


SECTIONS: dict[str, type[Settings]] = {
    name: cast(Any, field.annotation) for name, field in Recipe.model_fields.items()
}


def known_keys() -> Iterator[tuple[str, FieldInfo]]:
    """Every `section.key` of a recipe with its pydantic field."""
    for section, model in SECTIONS.items():
        for key, field in model.model_fields.items():
            yield f"{section}.{key}", field
