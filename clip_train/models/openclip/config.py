"""`open_clip:NAME`: the description of one of OpenCLIP's models, as checkpoints hold it.

Sizes have the same names as in `clip_train.models.config`.
"""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from clip_train.errors import UserError, raise_all
from clip_train.models.lora import Lora
from clip_train.resizing import RESIZED, Interpolation, Patches, Resize, ResizeMode
from clip_train.settings import broken, clipped

PREFIX = "open_clip:"
NAFLEX = "naflexvit"  # how timm's names of its NaFlexVit begin
TRANSFORMERS = "hf:"  # a tokenizer that is read as transformers itself reads it
# Arguments of timm's image tower, so that it has the sizes and the activation of transformers'.
TIMM_ARGUMENTS = {"patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "act_layer"}
# Keys of transformers' BertConfig, for a text tower without a config.json of its own.
BERT_KEYS = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "hidden_act", "layer_norm_eps", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "type_vocab_size", "pad_token_id",
}  # fmt: skip
TOKENIZER_OPTIONS = {
    "additional_special_tokens",
    "clean",
    "language",
    "reduction_mask",
    "strip_sep_token",
}
Channels = tuple[float, float, float]
# OpenAI's CLIP statistics of the pixels, in [0, 1].
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)

# The largest sizes of a tower: a hostile description must not ask for more than any machine holds.
MOST = {
    "layers": 1_000, "width": 65_536, "heads": 65_536, "head_width": 65_536, "mlp_ratio": 100,
    "image_size": 65_536, "patch_size": 65_536, "context_length": 65_536, "vocab_size": 100_000_000,
    "embed_dim": 65_536, "attn_pooler_queries": 65_536,
}  # fmt: skip
MOST_PARAMETERS = 100_000_000_000  # of a tower


class Described(BaseModel):
    """A part of a model's description: frozen, without unknown keys, of sizes within `MOST`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @model_validator(mode="after")
    def _can_be_built(self) -> Described:
        total: dict[str, float] = {}  # a ResNet has the layers of four stages
        for key, most in MOST.items():
            value = getattr(self, key, None)
            parts = value if isinstance(value, list | tuple) else [value]
            sizes = [part for part in parts if isinstance(part, int | float)]
            if any(size > most for size in sizes):
                raise ValueError(
                    f"{key} ({clipped(str(value))}) must be at most {most:,}; correct the model's "
                    "description"
                )
            total[key] = sum(sizes)
        layers, width = total["layers"], total["width"]
        per_layer = width**2 * (4 + 2 * (total["mlp_ratio"] or 4))  # attention and MLP
        count = layers * per_layer + width * total["vocab_size"]
        if count > MOST_PARAMETERS:
            raise ValueError(
                f"width ({width}) and layers ({layers}) make about {count:.1e} parameters, more "
                f"than {MOST_PARAMETERS:,}; correct the model's description"
            )
        return self


# keys of a description that OpenCLIP has in `preprocess_cfg`, or not at all
NOT_IN_MODEL_CFG = {
    "image_mean",
    "image_std",
    "interpolation",
    "resize_mode",
    "image_tokens",
    "lora",
}


class DescribedModel(Described):
    """The keys that every model has, and the pixel statistics that its weights expect."""

    embed_dim: PositiveInt  # D, the width of the features
    quick_gelu: bool = False  # `x * sigmoid(1.702 x)`, which OpenAI's weights want, instead of GELU
    # Logarithm of the factor on the cosines at the start.
    init_logit_scale: float = math.log(1 / 0.07)
    # Added to the logits at the start (SigLIP: -10); None: no such parameter.
    init_logit_bias: float | None = None
    # Per channel, of pixels in [0, 1]. OpenCLIP has them in `preprocess_cfg`, not in `model_cfg`.
    image_mean: Channels = IMAGE_MEAN
    image_std: Channels = IMAGE_STD
    lora: Lora | None = None  # of the recipe
    # Native resolution: an image keeps its aspect ratio, and has at most so many patches. None: all
    # images become squares.
    image_tokens: PositiveInt | None = None

    @property
    def native_patch_size(self) -> int | None:
        """The side of a patch, in pixels; None: the image tower takes only squares."""
        return None

    @property
    def patches(self) -> Patches | None:
        """How images become patches of their own number; None: they are squares."""
        if self.image_tokens is None or self.native_patch_size is None:
            return None
        return Patches(self.native_patch_size, self.image_tokens)


class VisionKeys(Described):
    """`vision_cfg`. OpenCLIP checks the keys that are not listed here."""

    model_config = ConfigDict(extra="allow")
    image_size: PositiveInt = 224  # side of the square image, in pixels
    patch_dropout: float = Field(0.0, ge=0, lt=1)  # share of the patches left out in training
    norm: Literal["batch", "group"] = "batch"  # of a ResNet; OpenCLIP itself has only batch

    @model_validator(mode="before")
    @classmethod
    def _can_be_trained(cls, keys: Any) -> Any:
        if not isinstance(keys, dict):
            return keys
        size = keys.get("image_size")
        if isinstance(size, list | tuple):
            if len(set(size)) != 1:
                raise ValueError(
                    f"image_size ({list(size)}) is not square: images are cut to squares here"
                )
            keys = {**keys, "image_size": size[0]}
        more = keys.get("timm_model_kwargs")
        if isinstance(more, dict) and more.get("img_size") == keys.get("image_size"):
            # of an export (`export_openclip`); only OpenCLIP 4 takes it, and here the size suffices
            more = {key: value for key, value in more.items() if key != "img_size"}
            keys = {**keys, "timm_model_kwargs": more}
            if not more:
                del keys["timm_model_kwargs"]
        arguments = keys.get("timm_model_args") or {}
        sizes = [value for key, value in arguments.items() if key != "act_layer"]
        if not arguments.keys() <= TIMM_ARGUMENTS or not all(0 < x <= 65_536 for x in sizes):
            raise ValueError(
                f"timm_model_args ({clipped(str(arguments))}) must be sizes up to 65,536 with the "
                f"names {', '.join(sorted(TIMM_ARGUMENTS))}"
            )
        if keys.get("norm") == "group" and not isinstance(keys.get("layers"), list | tuple):
            raise ValueError(
                "norm (group) applies to ResNets only, and this is another tower; remove it"
            )
        return keys


class TextKeys(Described):
    """`text_cfg`. OpenCLIP checks the keys that are not listed here."""

    model_config = ConfigDict(extra="allow")
    # Texts are not cut at their ends: whether a tower reads what follows is not known.
    ends: ClassVar[bool] = False
    context_length: PositiveInt = 77  # tokens
    hf_tokenizer_name: str | None = None  # None: CLIP's own
    tokenizer_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fits_its_bert(self) -> TextKeys:
        keys = self.bert
        if keys is None:
            return self
        known = isinstance(keys, dict) and keys.keys() == BERT_KEYS
        sizes = {key: x for key, x in keys.items() if key != "hidden_act"} if known else {}
        most = {key: MOST.get(key, MOST["width"]) for key in sizes}
        if not known or not all(
            isinstance(size, int | float) and 0 <= size <= most[key] for key, size in sizes.items()
        ):
            raise ValueError(
                f"hf_model_config ({clipped(str(keys))}) must have the keys "
                f"{', '.join(sorted(BERT_KEYS))}, with sizes up to 65,536"
            )
        if self.context_length > keys["max_position_embeddings"]:
            raise ValueError(
                f"context_length ({self.context_length}) must be at most "
                f"{keys['max_position_embeddings']}, the positions of its text tower"
            )
        return self

    @property
    def bert(self) -> dict[str, Any] | None:
        """The config.json of a BERT, by BERT_KEYS, in place of that in `hf_model_name`."""
        return (self.model_extra or {}).get("hf_model_config")

    @property
    def reads_last(self) -> bool:
        """Whether a text is read at the last position, padding included, as SigLIP's is, or at an
        extra token after all others."""
        keys = self.model_extra or {}
        return keys.get("pool_type") == "last" or bool(keys.get("embed_cls"))

    @field_validator("tokenizer_kwargs")
    @classmethod
    def _runs_no_code(cls, options: dict[str, Any] | None) -> dict[str, Any] | None:
        """Other options reach transformers, which may run code from the hub (trust_remote_code)."""
        foreign = sorted(set(options or ()) - TOKENIZER_OPTIONS)
        if foreign:
            raise ValueError(
                f"{', '.join(foreign)} is unknown; remove it, or use "
                f"{', '.join(sorted(TOKENIZER_OPTIONS))}"
            )
        return options


class DecoderKeys(Described):
    """`multimodal_cfg`, of a CoCa's decoder, which writes captions. OpenCLIP checks its other
    keys."""

    model_config = ConfigDict(extra="allow")
    width: PositiveInt = 512


class OpenCLIPArchitecture(DescribedModel):
    """OpenCLIP's `model_cfg`, and how the images of its weights are resized."""

    inputs: ClassVar[tuple[()]] = ()  # images alone
    open_clip: str  # its name there
    vision_cfg: VisionKeys
    text_cfg: TextKeys
    multimodal_cfg: DecoderKeys | None = None
    custom_text: bool = False  # the text tower is a module of its own, `text`
    interpolation: Interpolation = RESIZED["interpolation"]
    resize_mode: ResizeMode = RESIZED["resize_mode"]

    @model_validator(mode="after")
    def _decoder_fits(self) -> OpenCLIPArchitecture:
        """A CoCa's decoder reads the tokens of both towers as they are."""
        if self.multimodal_cfg is None:
            return self
        vision, text = self.vision_cfg.model_dump(), self.text_cfg.model_dump()
        read = {}  # what is as wide as the tokens
        if vision.get("attentional_pool"):
            read["embed_dim"] = self.embed_dim
        elif not vision.get("timm_model_name"):
            read["vision_cfg.width"] = vision.get("width", 768)
        if not text.get("hf_model_name"):
            read["text_cfg.width"] = text.get("width", 512)
        for key, width in read.items():
            if width != self.multimodal_cfg.width:
                raise ValueError(
                    f"{key} ({width}) must equal multimodal_cfg.width ({self.multimodal_cfg.width})"
                    ": the decoder reads tokens of this width; correct the model's description"
                )
        return self

    @property
    def is_naflex(self) -> bool:
        """Whether the image tower is a NaFlexVit of timm, which takes images of any shape."""
        vision = self.vision_cfg.model_dump()
        is_named = str(vision.get("timm_model_name")).startswith(NAFLEX)
        return is_named or bool((vision.get("timm_model_kwargs") or {}).get("use_naflex"))

    @property
    def native_patch_size(self) -> int | None:
        if not self.is_naflex or self.multimodal_cfg is not None:
            return None
        vision = self.vision_cfg.model_dump()
        for arguments in (vision.get("timm_model_args"), vision.get("timm_model_kwargs")):
            size = (arguments or {}).get("patch_size")
            if isinstance(size, int):
                return min(max(size, 1), MOST["patch_size"])
        named = re.search(r"_patch(\d{1,4})(_|$)", str(vision.get("timm_model_name")))
        return None if named is None else int(named[1])

    @property
    def resize(self) -> Resize:
        return Resize(self.interpolation, self.resize_mode, self.image_tokens)

    def own_keys(self) -> dict[str, Any]:
        """What OpenCLIP's `model_cfg` cannot hold; beside it, `described` reads it."""
        keys: dict[str, Any] = {}
        arguments = self.vision_cfg.model_dump().get("timm_model_args")
        if arguments:
            keys["vision_cfg"] = {"timm_model_args": arguments}
        text: dict[str, Any] = {}
        tokenizer = self.text_cfg.hf_tokenizer_name or ""
        if tokenizer.startswith(TRANSFORMERS):
            text["hf_tokenizer_name"] = tokenizer
        if self.text_cfg.bert is not None:
            text["hf_model_config"] = self.text_cfg.bert
        if text:
            keys["text_cfg"] = text
        return keys

    def model_cfg(self) -> dict[str, Any]:
        """OpenCLIP's `model_cfg`."""
        ours = {"open_clip", *NOT_IN_MODEL_CFG}
        ours |= {"multimodal_cfg"} if self.multimodal_cfg is None else set()
        config = self.model_dump(exclude=ours)  # a null stays: timm_proj's default differs
        if self.vision_cfg.norm == "batch":
            del config["vision_cfg"]["norm"]
        config["vision_cfg"].pop("timm_model_args", None)
        config["text_cfg"].pop("hf_model_config", None)
        if self.text_cfg.hf_tokenizer_name is not None:
            name = self.text_cfg.hf_tokenizer_name.removeprefix(TRANSFORMERS)
            config["text_cfg"]["hf_tokenizer_name"] = name
        if self.text_cfg.tokenizer_kwargs is None:  # which OpenCLIP's get_tokenizer cannot take
            del config["text_cfg"]["tokenizer_kwargs"]
        return config

    @property
    def most_tokens(self) -> float:
        """The longest text that the text tower can read, if its positions cannot be resized."""
        keys = self.text_cfg.bert
        return math.inf if keys is None else keys["max_position_embeddings"]

    @property
    def notes(self) -> list[str]:
        """For the log."""
        hf_name = self.text_cfg.model_dump().get("hf_model_name")
        rules = [
            (
                bool(hf_name),
                f"without model.init_from the text tower {hf_name} starts from random weights",
            ),
        ]
        return broken(rules)

    @property
    def layered(self) -> bool:
        """Whether the blocks of both towers are numbered as OpenCLIP's own are."""
        vision, text = self.vision_cfg.model_dump(), self.text_cfg.model_dump()
        return not (
            vision.get("timm_model_name") or text.get("hf_model_name") or self.multimodal_cfg
        )

    def changed(
        self, config: Any, scalars: dict[str, float], vision: dict[str, Any], text: dict[str, Any]
    ) -> OpenCLIPArchitecture:
        """With the overrides of the recipe's `model` section. UserError."""
        rules = [
            (
                config.dropout > 0,
                f"model.dropout ({config.dropout}) does not apply to OpenCLIP's models, whose "
                "towers have their own dropouts (timm_drop, timm_drop_path); set model.dropout=0",
            ),
            (
                is_resnet(self.model_dump()) and bool(config.patch_dropout),
                f"model.patch_dropout ({config.patch_dropout}): {self.open_clip} is a ResNet and "
                "has no patches; set model.patch_dropout=null",
            ),
            (
                (config.context_length or 0) > self.most_tokens,
                f"model.context_length ({config.context_length}) must be at most {self.most_tokens}, "
                f"the positions of the text tower of {self.open_clip}; lower it",
            ),
            (
                bool(config.context_length and self.multimodal_cfg),
                f"model.context_length ({config.context_length}): {self.open_clip} writes "
                "captions, and its decoder has a length of its own; set model.context_length=null",
            ),
        ]
        for key in ("lock_image_unlocked_groups", "lock_text_unlocked_layers"):
            numbered = (
                bool(getattr(config, key)) and not self.layered,
                f"model.{key} ({getattr(config, key)}): the layers of {self.open_clip} are not "
                "numbered as OpenCLIP's own; lock the tower as a whole, or name what is frozen "
                "in model.freeze",
            )
            rules.append(numbered)
        raise_all(broken(rules))
        vision_cfg = self.vision_cfg.model_copy(update=vision)
        text_cfg = self.text_cfg.model_copy(update=text)
        return self.model_copy(update={**scalars, "vision_cfg": vision_cfg, "text_cfg": text_cfg})


def library(name: str) -> Any:
    """OpenCLIP. UserError if it is not installed."""
    try:
        import open_clip
    except (ImportError, RuntimeError) as e:  # RuntimeError: a torchvision for another torch
        raise UserError(
            f"model.name ({clipped(name)}) needs OpenCLIP, which cannot be imported ({e}): "
            "pip install 'clip-train[openclip]'"
        ) from e
    return open_clip


def named_model(name: str) -> OpenCLIPArchitecture:
    """The model that OpenCLIP has under this name. UserError if there is none."""
    open_clip = library(PREFIX + name)
    if name not in open_clip.list_models():
        raise UserError(
            f"model.name ({PREFIX}{clipped(name)}): OpenCLIP {open_clip.__version__} has no such "
            "model, and no such file exists; open_clip.list_models() lists the names"
        )
    # The preprocessing values that all pretrained weights of the model share.
    tags = open_clip.list_pretrained_tags_by_model(name)
    pretrained = [open_clip.get_pretrained_cfg(name, tag) for tag in tags]
    preprocess = {}
    for key in ("mean", "std", "interpolation", "resize_mode") if pretrained else ():
        value = pretrained[0].get(key)
        if all(each.get(key) == value for each in pretrained):
            preprocess[key] = value
    config = open_clip.get_model_config(name)
    return parse_openclip({"model_cfg": config, "preprocess_cfg": preprocess}, name)


def is_resnet(content: Any) -> bool:
    """Whether OpenCLIP's JSON, or its `model_cfg` alone, describes one of its ResNets."""
    config = content.get("model_cfg", content) if isinstance(content, dict) else {}
    vision = config.get("vision_cfg") if isinstance(config, dict) else None
    return isinstance(vision, dict) and isinstance(vision.get("layers"), list | tuple)


def described(content: dict[str, Any]) -> dict[str, Any]:
    """OpenCLIP's `model_cfg`, which may be alone, with the keys of the `preprocess_cfg` beside it:
    `image_mean`, `image_std`, `interpolation`, `resize_mode` and our own `image_tokens`."""
    if "model_cfg" not in content:
        return content
    preprocess = content.get("preprocess_cfg") or {}
    names = {"mean": "image_mean", "std": "image_std", **{name: name for name in RESIZED}}
    preprocess_keys = {ours: preprocess[key] for key, ours in names.items() if preprocess.get(key)}
    if preprocess_keys.get("interpolation") == "random":  # of its training; else bicubic there
        preprocess_keys["interpolation"] = "bicubic"
    model = dict(content["model_cfg"])
    for tower, keys in (content.get("clip_train") or {}).items():
        model[tower] = {**model.get(tower, {}), **keys}
    return {**model, **preprocess_keys}


def parse_openclip(content: dict[str, Any], source: str) -> OpenCLIPArchitecture:
    """OpenCLIP's JSON -> the model. UserError for a model that cannot be trained here."""
    keys = described(content)
    try:
        return OpenCLIPArchitecture.model_validate({"open_clip": source, **keys})
    except ValidationError as e:
        lines = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in e.errors())
        mistakes = "; ".join(line.removeprefix(": ") for line in lines)
        raise UserError(f"model.name ({source}): {mistakes}") from None
