"""The description of a model: OpenCLIP's JSON schema, the presets, and the recipe's `model`
section."""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from clip_train.errors import UserError, missing, raise_all
from clip_train.inputs import Input
from clip_train.models import hub
from clip_train.models.files import CONFIG_NAME
from clip_train.models.lora import Lora
from clip_train.models.openclip.config import (
    NOT_IN_MODEL_CFG,
    PREFIX,
    TRANSFORMERS,
    Described,
    DescribedModel,
    OpenCLIPArchitecture,
    described,
    is_resnet,
    named_model,
    parse_openclip,
)
from clip_train.models.transformers import description, is_transformers
from clip_train.places import expanded
from clip_train.resizing import RESIZED, Interpolation, Resize, ResizeMode
from clip_train.settings import (
    IMPORT_PATH,
    MAX_LOGIT_SCALE,
    Allowed,
    Messages,
    Place,
    Refused,
    Settings,
    broken,
    clipped,
    explain,
    import_path,
    rule,
    shown,
)
from clip_train.storage.urls import is_remote, local_path

# Values other than null, false and 0 at which keys unknown to these towers change nothing.
NEUTRAL = {
    "eos_id": (2,),
    "norm": ("batch",),
    "pool_type": ("tok", "argmax"),
    "pos_embed_type": ("learnable",),
    "proj_type": ("linear",),
}
NOT_IMPLEMENTED = (
    "not implemented in OpenCLIP's plain ViT and text transformer; correct it, take it out, or "
    "write open_clip: before the name of the model or file to train OpenCLIP's own modules"
)
OWN_FACTS = (
    "embed_dim", "image_size", "image_mean", "image_std", "resize_mode", "interpolation",
    "init_logit_bias", "tokenizer", "context_length",
)  # fmt: skip
PRESETS = Path(__file__).parent / "presets"


class _Tower(Described):
    width: PositiveInt = 512  # of the residual stream
    mlp_ratio: PositiveFloat = 4.0  # hidden width of the MLP, as a multiple of `width`

    @property
    def mlp_width(self) -> int:
        return int(self.width * self.mlp_ratio)


class VisionConfig(_Tower):
    """`vision_cfg` of OpenCLIP's schema: a vision transformer. (OpenCLIP builds ResNets.)"""

    layers: PositiveInt = 12  # blocks
    image_size: PositiveInt = 224  # side of the square image, in pixels
    width: PositiveInt = 768
    head_width: PositiveInt = 64  # of one attention head
    patch_size: PositiveInt = 16  # side of a patch, in pixels
    patch_dropout: float = Field(0.0, ge=0, lt=1)  # share of the patches left out in training

    @model_validator(mode="after")
    def _divides(self) -> VisionConfig:
        width, size, patch = self.width, self.image_size, self.patch_size
        mistakes = []
        if width % self.head_width:
            mistakes.append(f"width ({width}) must be a multiple of head_width ({self.head_width})")
        if size % patch:
            mistakes.append(
                f"image_size ({size}) must be a multiple of patch_size ({patch}); "
                f"take {size + -size % patch}"
            )
        if mistakes:
            raise ValueError("; ".join(mistakes))
        return self

    @property
    def heads(self) -> int:
        return self.width // self.head_width


VOCABULARY = 49_408  # token ids of CLIP's tokenizer


class TextConfig(_Tower):
    """`text_cfg` of OpenCLIP's schema: a causal transformer with CLIP's own tokens, read at the end
    of a text, its highest id."""

    ends: ClassVar[bool] = True  # tokens behind a text's end change nothing: texts are cut there
    reads_last: ClassVar[bool] = False  # whether a text is read at the last position, not its end
    layers: PositiveInt = 12  # blocks
    context_length: PositiveInt = 77  # tokens, start and end of text included
    vocab_size: PositiveInt = VOCABULARY  # token ids
    heads: PositiveInt = 8  # attention heads

    @model_validator(mode="after")
    def _divides(self) -> TextConfig:
        if self.width % self.heads:
            raise ValueError(f"width ({self.width}) must be a multiple of heads ({self.heads})")
        return self


class Architecture(DescribedModel):
    """Both towers, in OpenCLIP's schema."""

    layered: ClassVar[bool] = True  # the blocks of both towers are numbered
    notes: ClassVar[tuple[str, ...]] = ()  # differences from OpenCLIP, for the log
    vision_cfg: VisionConfig
    text_cfg: TextConfig
    own: str | None = None  # its import path: for an `OwnModel`
    inputs: tuple[Input, ...] = ()  # of `data.inputs`, for a model of your own
    # How evaluation makes a square of an image. OpenCLIP has them in `preprocess_cfg`.
    interpolation: Interpolation = RESIZED["interpolation"]
    resize_mode: ResizeMode = RESIZED["resize_mode"]

    @property
    def native_patch_size(self) -> int | None:
        return self.vision_cfg.patch_size

    @property
    def resize(self) -> Resize:
        return Resize(self.interpolation, self.resize_mode, self.image_tokens)

    def model_cfg(self) -> dict[str, Any]:
        """OpenCLIP's `model_cfg`: all sizes, and what differs from its defaults."""
        own = self.model_dump(exclude=NOT_IN_MODEL_CFG, exclude_defaults=True)
        for key, tower in (("vision_cfg", self.vision_cfg), ("text_cfg", self.text_cfg)):
            sizes = {name: size for name, size in tower if type(size) in (int, float, tuple)}
            own[key] = sizes | tower.model_dump(exclude_defaults=True)
        return own

    def changed(
        self,
        config: ModelConfig,
        scalars: dict[str, float],
        vision: dict[str, Any],
        text: dict[str, Any],
    ) -> Architecture:
        """With the overrides of the recipe's `model` section. UserError."""
        try:
            vision_cfg = VisionConfig.model_validate({**self.vision_cfg.model_dump(), **vision})
        except ValidationError as e:
            raise UserError(f"model.{e.errors()[0]['msg'].removeprefix('Value error, ')}") from None
        text_cfg = self.text_cfg.model_copy(update=text)
        return self.model_copy(update={**scalars, "vision_cfg": vision_cfg, "text_cfg": text_cfg})


class OwnTexts(TextConfig):
    """`text_cfg` of an `OwnModel`, which may read behind a text's end."""

    ends: ClassVar[bool] = False
    hf_tokenizer_name: str | None = None  # of a tokenizer of its own: PATH.tokenizer
    pool_type: Any = "last"  # as earlier versions saved it


class OwnModel(Architecture):
    """A module made by the user's function or class, which describes it by its attributes."""

    layered: ClassVar[bool] = False
    text_cfg: OwnTexts

    @classmethod
    def at(cls, path: str) -> Architecture:
        """The object at the import path. UserError."""
        found = import_path("model.name", path)
        facts = {name: getattr(found, name) for name in OWN_FACTS if hasattr(found, name)}
        size, tokenizer = facts.pop("image_size", 224), facts.pop("tokenizer", None)
        raw = {
            "own": path,
            "vision_cfg": {"image_size": size, "patch_size": size, "layers": 1},
            "text_cfg": {
                "hf_tokenizer_name": f"{path}.tokenizer" if tokenizer is not None else None,
                "layers": 1,
                "context_length": facts.pop("context_length", 77),
            },
        }
        try:
            return cls.model_validate(raw | facts)
        except ValidationError as e:
            lines = [f"{each['loc'][-1]}: {each['msg']}" for each in e.errors()]
            raise UserError(
                f"model.name ({path}): {'; '.join(lines)}; give the function or class of your "
                "model these attributes: docs/extending.md"
            ) from None

    @property
    def native_patch_size(self) -> None:
        return None

    @property
    def tokenizer(self) -> Any:
        """Its own, b texts -> int64 [b, context_length]; None: it reads CLIP's tokens."""
        return getattr(import_path("model.name", self.own or ""), "tokenizer", None)

    def changed(
        self,
        config: ModelConfig,
        scalars: dict[str, float],
        vision: dict[str, Any],
        text: dict[str, Any],
    ) -> OwnModel:
        keys = {
            "dropout", "lock_image_unlocked_groups", "lock_text_unlocked_layers", "keep_positions",
        }  # fmt: skip
        other = config.model_dump(include=keys, exclude_defaults=True)
        unsupported = scalars | vision | text | other
        raise_all(
            f"model.{key} ({value}): {self.own} builds its module without arguments; remove the "
            "key, and change the module"
            for key, value in unsupported.items()
        )
        return self


TowerConfig = VisionConfig | TextConfig
KeepPositions = NonNegativeInt | Literal["all", "all_but_last"]
"""The value of `model.keep_positions`."""
AnyArchitecture = Architecture | OpenCLIPArchitecture


def _without_lock(key: str, value: int, lock: str) -> str:
    return f"model.{key} ({shown(value)}) has no effect without a lock; set model.{lock}=true"


class ModelConfig(Settings):
    """The recipe's `model` section."""

    name: Annotated[Place, Refused] = "ViT-B-32"
    """A preset (tiny, OpenCLIP's ViT-B-32, RN50, ...), a JSON in its schema, or open_clip:NAME
    (docs/models.md); a folder of transformers or hf:org/name; or the import path of a function or
    class that builds one of your own (docs/extending.md). Without it, a model of transformers as
    `init_from` names itself."""
    image_size: Annotated[PositiveInt | None, Refused] = None
    """Side of the images in pixels; positional embeddings of `init_from` are interpolated. null:
    the value in the model's JSON."""
    context_length: Annotated[Annotated[int, Field(ge=1, le=65_536)] | None, Refused] = None
    """Tokens of a text, its start and end included; positional embeddings of `init_from` are
    interpolated. null: the value in the model's JSON. Long-CLIP has 248."""
    keep_positions: Annotated[KeepPositions, Allowed("an integer >= 0, all or all_but_last")] = 0
    """With context_length, the number of first positions of `init_from` that stay unchanged, 20 in
    Long-CLIP; later ones are interpolated. 0: all are interpolated, as in OpenCLIP. all: every
    position stays, and new ones are drawn behind them. all_but_last: the last one, where a SigLIP
    reads its texts, stays the last (docs/fine_tuning.md#longer-texts)."""
    patch_dropout: Annotated[float | None, Refused] = Field(None, ge=0, lt=1)
    """Share of the patches left out in training (0.5 to 0.75 in FLIP). null: the value in the
    model's JSON."""
    dropout: Annotated[float, Refused] = Field(0.0, ge=0, lt=1)
    """Dropout after attention and MLP in every block of both towers. OpenCLIP has none."""
    freeze: Annotated[list[str], Refused] = Field([])
    """Parameters that are not trained, by patterns that match their names, such as ["visual.*"]."""
    lora: Annotated[
        Lora | None,
        Allowed("a section with rank, alpha, on, dropout and train", example="'{rank: 16}'"),
        Refused,
    ] = None
    """Train adapters of low rank beside frozen weights, {rank: 16, alpha: 32, on: [attention, mlp],
    dropout: 0.05}: docs/fine_tuning.md. null: none."""
    lock_image: Annotated[bool, Refused] = False
    """Freeze the image tower (OpenCLIP's --lock-image; recipes/lit.yaml)."""
    lock_image_unlocked_groups: Annotated[NonNegativeInt, Refused] = 0
    """With lock_image, train this many groups at the tower's top: the projection, the last block
    with its norm, each further block."""
    lock_image_freeze_bn_stats: Annotated[bool, Refused] = False
    """With lock_image, keep and use the batch norms' running statistics (OpenCLIP's flag)."""
    lock_text: Annotated[bool, Refused] = False
    """Freeze the text tower (OpenCLIP's --lock-text)."""
    lock_text_unlocked_layers: Annotated[NonNegativeInt, Refused] = 0
    """With lock_text, train this many groups at the tower's top, counted as in the image tower."""
    init_from: Place | None = None
    """Start from these weights: a file in OpenCLIP's layout, an export, a run, each also at a URL:
    docs/weights.md."""
    init_image_from: Place | None = None
    """Take only the image tower from these weights (of a whole model or of an image tower). The
    rest is initialized at random, or from `init_from`."""
    init_text_from: Place | None = None
    """Take only the text tower from these weights (of a whole model or of a text tower). The rest
    is initialized at random, or from `init_from`."""
    teacher: Annotated[
        Place | Annotated[list[Place], Field(min_length=1)] | None,
        Allowed("a place, a list of places, or null"),
    ] = None
    """Learn from this frozen model as well (OpenCLIP's distillation loss), or from a list of
    models: weights from any place of `init_from`. They see the same images and texts, once per
    step; every rank holds all of them."""
    teacher_name: Annotated[
        Place | list[Place | None] | None, Allowed("a name, a list of names, or null")
    ] = None
    """The teacher's architecture, as in `name`, or a list with one for each teacher. null: from its
    tag, or the open_clip_config.json in its folder."""
    init_logit_scale: Annotated[
        float | None,
        Field(ge=0, le=MAX_LOGIT_SCALE),
        Allowed("a number from 0 to 4.6 (ln 100), or null"),
    ] = None
    """Logarithm of the logits' factor at the start, up to ln 100. null: the value in the model's
    JSON (ln 1/0.07)."""
    init_logit_bias: Annotated[float | None, Refused] = None  # whether there is such a parameter
    """Bias of the logits at the start, for the sigmoid loss (-10). null: the value in the model's
    JSON."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_weights(cls, raw: Any) -> Any:
        """A model of transformers is described by its own files."""
        if not isinstance(raw, dict) or raw.get("name") is not None:
            return raw
        place = raw.get("init_from")
        if not isinstance(place, str) or not place:
            return raw
        if place.startswith(TRANSFORMERS):
            return {**raw, "name": place}
        if is_remote(place):
            return raw
        folder = local_path(expanded(place))
        if is_transformers(folder) and not (folder / CONFIG_NAME).is_file():
            return {**raw, "name": place}
        return raw

    @rule
    def _image_lock(self) -> Messages:
        for key in ("lock_image_unlocked_groups", "lock_image_freeze_bn_stats"):
            if getattr(self, key) and not self.lock_image:
                yield _without_lock(key, getattr(self, key), "lock_image")

    @rule
    def _text_lock(self) -> Messages:
        if self.lock_text_unlocked_layers and not self.lock_text:
            value = self.lock_text_unlocked_layers
            yield _without_lock("lock_text_unlocked_layers", value, "lock_text")

    @rule
    def _kept_positions(self) -> Messages:
        if self.keep_positions == 0:
            return
        starts = self.init_from or self.init_text_from
        kept = self.keep_positions if isinstance(self.keep_positions, int) else 0
        if starts is None or kept >= (self.context_length or 0):
            yield (
                f"model.keep_positions ({self.keep_positions}) needs weights to start from "
                f"(model.init_from is {shown(starts)}) and a model.context_length "
                f"({shown(self.context_length)}) that is greater; set both, or "
                "model.keep_positions=0"
            )

    @rule
    def _names_of_teachers(self) -> Messages:
        number = 1 if isinstance(self.teacher, str) else len(self.teacher or ())
        if isinstance(self.teacher_name, list) and len(self.teacher_name) != number:
            yield (
                f"model.teacher_name ({shown(self.teacher_name)}) must have a name, or null, for "
                f"each of the {number} teachers of model.teacher"
            )

    def architecture(self) -> AnyArchitecture:
        """The preset or JSON, with this section's overrides. Raises UserError."""
        changed = load_architecture(self.name).changed(
            self,
            self.model_dump(include={"init_logit_scale", "init_logit_bias"}, exclude_none=True),
            self.model_dump(include={"image_size", "patch_dropout"}, exclude_none=True),
            self.model_dump(include={"context_length"}, exclude_none=True),
        )
        text = changed.text_cfg
        if self.keep_positions == "all_but_last" and not text.reads_last:
            raise UserError(
                f"model.keep_positions ({self.keep_positions}) is for text towers that read the last "
                f"position, as SigLIP's does, and {self.name} reads the end of each text; set "
                "model.keep_positions=all"
            )
        hf_name = text.model_dump().get("hf_model_name")
        if self.keep_positions != 0 and hf_name:
            raise UserError(
                f"model.keep_positions ({self.keep_positions}): the positions of {self.name} are in "
                f"its text tower of transformers ({hf_name}), which reads up to its "
                "max_position_embeddings tokens; set model.keep_positions=0"
            )
        return changed.model_copy(update={"lora": self.lora})

    def teachers(self) -> list[ModelConfig]:
        """For each teacher, this section as if that teacher were the only one."""
        places = [self.teacher] if isinstance(self.teacher, str) else self.teacher or []
        names = self.teacher_name
        names = names if isinstance(names, list) else [names] * len(places)
        return [
            self.model_copy(update={"teacher": place, "teacher_name": name})
            for place, name in zip(places, names, strict=False)
        ]

    def teacher_architectures(self) -> list[AnyArchitecture]:
        """The teachers'. UserError, also if one needs other samples."""
        return [each.teacher_architecture() for each in self.teachers()]

    def teacher_architecture(self) -> AnyArchitecture:
        """That of the only teacher. UserError."""
        place, name = self.teacher, self.teacher_name
        assert isinstance(place, str) and not isinstance(name, list)
        remote = is_remote(place) or place.startswith((PREFIX, TRANSFORMERS, "hf-hub:"))
        if not remote and not os.path.exists(local_path(place)):
            what = f"model.teacher ({clipped(place)}): no such file or folder"
            raise missing(local_path(place), what, "give an export or weights")
        if name is None and place.startswith(PREFIX):
            tagged = place.removeprefix(PREFIX).partition("/")[0]
            name = tagged if tagged in preset_names() else PREFIX + tagged
        elif name is None and place.startswith(TRANSFORMERS):
            name = place
        elif name is None:
            if remote or not os.path.isfile(local_path(place) / "open_clip_config.json"):
                raise UserError(
                    f"model.teacher ({place}) is not a folder with an open_clip_config.json that "
                    "describes the model; set model.teacher_name to a preset or to the path of a "
                    "JSON"
                )
            name = str(local_path(place))
        ours, theirs = self.architecture(), load_architecture(name)
        for what in (
            "vision_cfg.image_size",
            "text_cfg.context_length",
            "text_cfg.hf_tokenizer_name",  # which this project's own towers do not have
        ):
            section, key = what.split(".")
            own, other = (getattr(getattr(each, section), key, None) for each in (ours, theirs))
            if own != other:
                raise UserError(
                    f"model.teacher ({place}) has {what} {other}, the student {own}: both see the "
                    "same samples; choose another teacher or student"
                )
        return theirs


def preset_names() -> list[str]:
    """The names that `load_architecture` knows."""
    return sorted(file.stem for file in PRESETS.glob("*.json"))


def load_architecture(name: str) -> AnyArchitecture:
    """A preset, `open_clip:NAME`, or a JSON file in OpenCLIP's schema (a model's, or an export's).

    UserError if the model does not exist, or needs a feature that is not implemented.
    """
    known, said = preset_names(), name.removeprefix(PREFIX)
    path = PRESETS / f"{name}.json" if name in known else Path(said).expanduser()
    if name.startswith(TRANSFORMERS):
        return parse_transformers(hub.described_at(name), name)
    if os.path.isfile(path / "open_clip_config.json"):  # Path's own methods do not take any text
        path = path / "open_clip_config.json"
    elif os.path.isfile(path / "config.json") and is_transformers(path):
        return parse_transformers(path, str(path.absolute()))
    if os.path.isfile(path):
        try:
            content = json.loads(path.read_text())
        except (ValueError, RecursionError) as e:
            raise UserError(f"model.name: {path} is not JSON: {e}; correct the file") from e
        if name.startswith(PREFIX) or is_resnet(content):
            return parse_openclip(content, said)
        return parse_architecture(content, str(path))
    if name.startswith(PREFIX):
        return named_model(said)
    if re.fullmatch(IMPORT_PATH, name):
        return OwnModel.at(name)
    by_lower = {preset.lower(): preset for preset in known}
    near = [PREFIX + name] if any(name.startswith(f"{preset}-") for preset in known) else []
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    near += [by_lower[preset] for preset in close]
    hint = f"; did you mean {' or '.join(near)}?" if near else ";"
    raise UserError(
        f"model.name ({clipped(name)}): no preset or file has this name{hint} known are tiny, "
        "OpenCLIP's ViTs and ResNets such as ViT-B-32 and RN50, open_clip:NAME for its others, or "
        "the path of a JSON file in its schema"
    )


def parse_transformers(folder: Path, place: str) -> AnyArchitecture:
    """The model of transformers in a folder. UserError."""
    content = description(folder, place)
    model = content["model_cfg"]
    if "timm_model_name" in model["vision_cfg"] or "hf_model_name" in model["text_cfg"]:
        return parse_openclip(content, place)
    return parse_architecture(content, place)


def parse_architecture(content: Any, source: str) -> Architecture:
    """OpenCLIP's JSON -> Architecture. Raises UserError naming `source` and every bad key."""
    if not isinstance(content, dict):
        raise UserError(
            f"{source}: expected an object in OpenCLIP's schema, found {type(content).__name__}"
        )
    cleaned = without_neutral(described(content))
    try:
        return Architecture.model_validate(cleaned)
    except ValidationError as e:
        lines = explain(e, Architecture, cleaned, unknown=NOT_IMPLEMENTED.format, within="file")
        raise UserError(f"{source}: " + "; ".join(lines)) from None


def without_neutral(
    content: dict[str, Any], schema: type[Described] = Architecture
) -> dict[str, Any]:
    """Remove keys that are unknown to these towers, at values at which they change nothing. With
    other values they stay and are rejected later, because ignoring them would build another model.
    """
    towers: dict[str, type[Described]] = {"vision_cfg": VisionConfig, "text_cfg": TextConfig}
    return {
        key: without_neutral(x, towers[key]) if key in towers and isinstance(x, dict) else x
        for key, x in content.items()
        if key in schema.model_fields or (x and x not in NEUTRAL.get(key, ()))
    }


def vocabulary_mistakes(name: str, architecture: AnyArchitecture) -> list[str]:
    """A tower with too few token ids for CLIP's tokenizer, if that is the one that texts get."""
    text = architecture.text_cfg
    if isinstance(architecture, OwnModel):
        return []
    if any(getattr(text, key, None) for key in ("hf_tokenizer_name", "hf_model_name")):
        return []
    size = getattr(text, "vocab_size", VOCABULARY)
    too_small = (
        size < VOCABULARY,
        f"model.name ({name}): text_cfg.vocab_size ({size}) must be at least {VOCABULARY}, the "
        "number of tokens of CLIP's tokenizer, which this model's texts get; correct it in the "
        "JSON, or name another tokenizer there as text_cfg.hf_tokenizer_name (with OpenCLIP)",
    )
    return broken([too_small])
