"""`open_clip:NAME`: which of OpenCLIP's models, as a description that a checkpoint can hold and a cache can compare.

Where one of its sizes is asked for it has the name that it has in `clip_train.models.config`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
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

from clip_train.errors import UserError
from clip_train.settings import clipped

PREFIX = "open_clip:"
RESIZED = (
    "bicubic",
    "shortest",
)  # as every image is here: interpolation, and the side that is made to fit
TOKENIZER_OPTIONS = {
    "additional_special_tokens",
    "clean",
    "language",
    "reduction_mask",
    "strip_sep_token",
}
Channels = tuple[float, float, float]


# Of a tower. A description from somebody else must not build what no machine holds.
MOST = {
    "layers": 1_000, "width": 65_536, "heads": 65_536, "head_width": 65_536, "mlp_ratio": 100, "image_size": 65_536,
    "patch_size": 65_536, "context_length": 65_536, "vocab_size": 100_000_000, "embed_dim": 65_536,
}  # fmt: skip
MOST_PARAMETERS = 100_000_000_000


def check_sizes(described: BaseModel) -> None:
    """ValueError where a size of a tower, or the number of its parameters, is beyond `MOST`."""
    sizes: dict[str, float] = {}
    for key, most in MOST.items():
        value = getattr(described, key, None)
        parts = value if isinstance(value, list | tuple) else [value]
        numbers = [part for part in parts if isinstance(part, int | float)]
        if any(number > most for number in numbers):
            raise ValueError(
                f"{key} ({clipped(str(value))}) must be at most {most:,}; correct the model's description"
            )
        sizes[key] = sum(numbers)
    width = sizes["width"]
    patches = (sizes["image_size"] / (sizes["patch_size"] or 16)) ** 2
    blocks = sizes["layers"] * width**2 * (4 + 2 * (sizes["mlp_ratio"] or 4))
    count = blocks + width * (sizes["vocab_size"] + sizes["context_length"] + patches)
    if count > MOST_PARAMETERS:
        raise ValueError(
            f"width ({width:.0f}) and layers ({sizes['layers']:.0f}) make about {count:.1e} parameters, more than "
            f"{MOST_PARAMETERS:,}; correct the model's description"
        )


class _Described(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @model_validator(mode="after")
    def _can_be_built(self) -> _Described:
        check_sizes(self)
        return self


class VisionKeys(_Described):
    """`vision_cfg`, of which OpenCLIP checks the other keys."""

    model_config = ConfigDict(extra="allow")
    image_size: PositiveInt = 224  # side of the square image, in pixels
    patch_dropout: float = Field(0.0, ge=0, lt=1)  # share of the patches left out in training
    norm: Literal["batch", "group"] = "batch"  # of a ResNet; OpenCLIP itself has batch alone

    @field_validator("image_size", mode="before")
    @classmethod
    def _square(cls, size: Any) -> Any:
        if not isinstance(size, list | tuple):
            return size
        if len(set(size)) != 1:
            raise ValueError(
                f"image_size ({list(size)}) is not square: images are cut to squares here"
            )
        return size[0]

    @property
    def is_resnet(self) -> bool:
        """Its `layers` are the numbers of blocks of four stages."""
        return isinstance((self.model_extra or {}).get("layers"), list | tuple)

    @model_validator(mode="after")
    def _fits_the_tower(self) -> VisionKeys:
        if self.norm == "group" and not self.is_resnet:
            raise ValueError("norm (group) is a ResNet's, and this is another tower; leave it out")
        return self


class TextKeys(_Described):
    """`text_cfg`, of which OpenCLIP checks the other keys."""

    model_config = ConfigDict(extra="allow")
    ends: ClassVar[bool] = (
        False  # no text is cut at its end: whether a tower reads what is behind is not known
    )
    end_id: ClassVar[None] = None
    context_length: PositiveInt = 77  # tokens
    hf_tokenizer_name: str | None = None  # None: CLIP's own
    tokenizer_kwargs: dict[str, Any] | None = None

    @field_validator("tokenizer_kwargs")
    @classmethod
    def _runs_no_code(cls, options: dict[str, Any] | None) -> dict[str, Any] | None:
        """What is not OpenCLIP's goes on to transformers, which may run code from the hub (trust_remote_code)."""
        if foreign := sorted(set(options or ()) - TOKENIZER_OPTIONS):
            raise ValueError(
                f"{', '.join(foreign)}: known are {', '.join(sorted(TOKENIZER_OPTIONS))}; leave it out"
            )
        return options

    def own_tokenizer(self) -> dict[str, Any] | None:
        """What OpenCLIP's tokenizer is made with; None: it is CLIP's."""
        kwargs = self.tokenizer_kwargs or {}
        if self.hf_tokenizer_name is None:
            return kwargs or None
        mode = self.model_dump().get("tokenizer_mode")
        return {"tokenizer_name": self.hf_tokenizer_name, "tokenizer_mode": mode, **kwargs}


class OpenCLIPArchitecture(_Described):
    """OpenCLIP's `model_cfg`, and the pixel statistics that its pretrained weights expect."""

    open_clip: str  # its name there
    embed_dim: PositiveInt  # D, the width of the features
    vision_cfg: VisionKeys
    text_cfg: TextKeys
    multimodal_cfg: dict[str, Any] | None = (
        None  # of a CoCa's decoder, which is kept and not trained
    )
    custom_text: bool = False  # the text tower is a module of its own, `text`
    quick_gelu: bool = False
    init_logit_scale: float = math.log(1 / 0.07)
    init_logit_bias: float | None = None
    image_mean: Channels = (0.48145466, 0.4578275, 0.40821073)
    image_std: Channels = (0.26862954, 0.26130258, 0.27577711)
    interpolation: str = RESIZED[0]  # how the images of its pretrained weights were resized
    resize_mode: str = RESIZED[1]

    def model_cfg(self) -> dict[str, Any]:
        """OpenCLIP's `model_cfg`."""
        ours = {"open_clip", "image_mean", "image_std", "interpolation", "resize_mode"}
        ours |= {"multimodal_cfg"} if self.multimodal_cfg is None else set()
        config = self.model_dump(exclude=ours)  # none is a value: of timm_proj not its default
        if self.vision_cfg.norm == "batch":
            del config["vision_cfg"]["norm"]
        return config

    def preprocess_cfg(self) -> dict[str, Any]:
        """OpenCLIP's `preprocess_cfg`, as the model is trained here."""
        sizes = {"mean": list(self.image_mean), "std": list(self.image_std)}
        return {**sizes, "interpolation": RESIZED[0], "resize_mode": RESIZED[1]}

    def notes(self) -> list[str]:
        """What is not as in OpenCLIP, for the user to know."""
        theirs, text = (self.interpolation, self.resize_mode), self.text_cfg.model_dump()
        found = []
        if theirs != RESIZED:
            found.append(
                f"the images of {self.open_clip}'s pretrained weights were resized by {' and '.join(theirs)}, here "
                f"they are by {' and '.join(RESIZED)}: zero-shot scores may differ a little from OpenCLIP's"
            )
        if name := text.get("hf_model_name"):
            found.append(
                f"without model.init_from the text tower {name} starts from random weights"
            )
        if self.multimodal_cfg is not None:
            found.append(
                f"the decoder of {self.open_clip} is kept as it is: only the contrastive part is trained"
            )
        return found

    @property
    def layered(self) -> bool:
        """Whether the blocks of both towers are numbered as OpenCLIP's own are."""
        vision, text = self.vision_cfg.model_dump(), self.text_cfg.model_dump()
        return not (
            vision.get("timm_model_name") or text.get("hf_model_name") or self.multimodal_cfg
        )

    def changed(
        self, config: Any, scalars: dict[str, float], vision: dict[str, Any]
    ) -> OpenCLIPArchitecture:
        """With the overrides of the recipe's `model` section. UserError."""
        if config.dropout:
            raise UserError(
                f"model.dropout ({config.dropout}) is not OpenCLIP's, whose towers have dropouts of their own "
                "(timm_drop, timm_drop_path); set model.dropout=0"
            )
        if self.vision_cfg.is_resnet and vision.get("patch_dropout"):
            raise UserError(
                f"model.patch_dropout ({config.patch_dropout}): {self.open_clip} is a ResNet, and has no patches; set "
                "model.patch_dropout=null"
            )
        for key in ("lock_image_unlocked_groups", "lock_text_unlocked_layers"):
            if getattr(config, key) and not self.layered:
                raise UserError(
                    f"model.{key} ({getattr(config, key)}): the layers of {self.open_clip} are not numbered as "
                    "OpenCLIP's own; lock the tower as a whole, or name what is frozen in model.freeze"
                )
        return self.model_copy(
            update={**scalars, "vision_cfg": self.vision_cfg.model_copy(update=vision)}
        )


def library(name: str) -> Any:
    """OpenCLIP. UserError where it is not installed."""
    try:
        import open_clip
    except (ImportError, RuntimeError) as e:  # the second of a torchvision that is another torch's
        raise UserError(
            f"model.name ({clipped(name)}) needs OpenCLIP, which cannot be imported ({e}): "
            "pip install 'clip-train[openclip]'"
        ) from e
    return open_clip


def load_openclip_architecture(name: str) -> OpenCLIPArchitecture:
    """`open_clip:` and a name that OpenCLIP knows, a JSON in its schema, or an export's folder. UserError."""
    said = name.removeprefix(PREFIX)
    path = Path(said).expanduser()
    path = path / "open_clip_config.json" if path.is_dir() else path
    if path.is_file():
        try:
            content = json.loads(path.read_text())
        except ValueError as e:
            raise UserError(f"model.name: {path} is not JSON: {e}; mend the file") from e
        found = parse_openclip(content, said)  # what it asks for is refused first
        library(name)
        return found
    open_clip = library(name)
    if said not in open_clip.list_models():
        raise UserError(
            f"model.name ({clipped(name)}): OpenCLIP {open_clip.__version__} knows no such model, and there is no such "
            "file; open_clip.list_models() has the names"
        )
    preprocess = _shared_preprocessing(open_clip, said)
    config = open_clip.get_model_config(said)
    return parse_openclip({"model_cfg": config, "preprocess_cfg": preprocess}, said)


def is_resnet(content: Any) -> bool:
    """Whether OpenCLIP's JSON, or its `model_cfg` alone, describes one of its ResNets."""
    config = content.get("model_cfg", content) if isinstance(content, dict) else {}
    vision = config.get("vision_cfg") if isinstance(config, dict) else None
    return isinstance(vision, dict) and isinstance(vision.get("layers"), list | tuple)


def parse_openclip(content: dict[str, Any], source: str) -> OpenCLIPArchitecture:
    """OpenCLIP's `model_cfg`, alone or beside its `preprocess_cfg`. UserError for what cannot be trained here."""
    preprocess: dict[str, Any] = {}
    if "model_cfg" in content:
        preprocess = content.get("preprocess_cfg") or {}
        content = content["model_cfg"]
    if foreign := sorted(content.keys() - OpenCLIPArchitecture.model_fields.keys()):
        raise UserError(
            f"model.name ({source}) has {', '.join(foreign)}, which are not of a model of images and texts"
        )
    seen = {
        f"image_{key}": tuple(preprocess[key]) for key in ("mean", "std") if preprocess.get(key)
    }
    seen |= {
        key: preprocess[key] for key in ("interpolation", "resize_mode") if preprocess.get(key)
    }
    try:
        return OpenCLIPArchitecture.model_validate({"open_clip": source, **content, **seen})
    except ValidationError as e:
        lines = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in e.errors())
        raise UserError(f"model.name ({source}): {'; '.join(lines)}") from None


def _shared_preprocessing(open_clip: Any, name: str) -> dict[str, Any]:
    """What all pretrained weights of a model agree on, key by key; the rest is OpenCLIP's default."""
    tags = open_clip.list_pretrained_tags_by_model(name)
    every = [open_clip.get_pretrained_cfg(name, tag) for tag in tags]
    first = every[0] if every else {}
    keys = ("mean", "std", "interpolation", "resize_mode")
    return {
        key: first[key]
        for key in keys
        if all(each.get(key) == first.get(key) for each in every) and key in first
    }
