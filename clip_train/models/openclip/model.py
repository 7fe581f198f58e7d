"""OpenCLIP's own modules, with the forward of `clip_train.models.clip.CLIP`.

Only this module imports open_clip and timm at its top: import it where such a model is built.
`b` samples, `D` features.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import open_clip
import timm
import torch
from timm.layers import BatchNormAct2d as TimmBatchNormAct2d
from torch import Tensor, nn
from torch.nn import functional as F

from clip_train.errors import UserError
from clip_train.models.batch_norm import BatchNorm2d, adopt
from clip_train.models.blocks import (
    Outputs,
    at_least_float32,
    check_size,
    normalised_images,
    outputs,
)
from clip_train.models.dropout import draw_by
from clip_train.models.files import TOKENIZER_FILES
from clip_train.models.hub import described_at
from clip_train.models.openclip.config import TRANSFORMERS, OpenCLIPArchitecture
from clip_train.models.openclip.dropout import find_draws, intercept, seed_modules
from clip_train.models.openclip.naflex import adopt_native, native_inputs, position_mistakes
from clip_train.torch_internals import (
    AnyBatchNorm,
    detect_fake_mode,
    disable_current_modes,
    replace_tensors,
    unset_fake_temporarily,
)

Tokenize = Callable[[list[str]], Tensor]
# Keys of Hugging Face's config.json whose random draws cannot belong to a sample: torch's attention
# makes those of the first two, and LayerDrop drops a layer for a whole micro-batch.
UNSEEDED = ("attention_probs_dropout_prob", "attention_dropout", "encoder_layerdrop")


class BatchNormAct2d(BatchNorm2d):
    """timm's, with an activation."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """[b, C, height, width] -> the same"""
        return self.act(self.drop(super().forward(x)))


class Contrastive(nn.Module):
    """A base beside one of OpenCLIP's classes: OpenCLIP's parameters, this project's forward.

    Its dropouts and stochastic depth are drawn by the samples' seeds.
    """

    architecture: OpenCLIPArchitecture
    visual: Any
    encode_image: Callable[[Tensor], Tensor]
    encode_text: Callable[[Tensor], Tensor]
    logit_scale: nn.Parameter
    logit_bias: nn.Parameter | None
    set_grad_checkpointing: Callable[[], None]

    def forward(
        self,
        images: Tensor | None = None,
        texts: Tensor | None = None,
        sample_seeds: Tensor | None = None,
        num_tokens: int | None = None,
        num_patches: int | None = None,
    ) -> Outputs:
        """As `CLIP.forward`, but texts are whole, [b, context_length], and nothing is packed: native
        images are padded to the same number of patches, and attention and pooling see no padding.
        """
        draw_by(sample_seeds)
        image = None if images is None else self.encode_image(self.pixels(images))
        return outputs(self, image, None if texts is None else self.encode_text(texts))

    def pixels(self, images: Tensor) -> Any:
        """uint8, or already normalised float, [b, 3, H, W] -> float, normalised. uint8 [b, 1 + T,
        3 p p], images at their native resolution -> what timm's NaFlexVit takes."""
        wide = torch.float64 if self.logit_scale.dtype == torch.float64 else torch.float32
        if images.ndim == 3:
            return native_inputs(images, self.architecture, self.visual.trunk.embeds, wide)
        check_size(images, self.architecture.vision_cfg.image_size)
        return normalised_images(images, self.architecture, wide)


class OneModule(Contrastive, open_clip.CLIP):
    """The text tower's parameters at the root."""


class CustomText(Contrastive, open_clip.CustomTextCLIP):
    """The text tower's parameters below `text`."""


class Captioner(Contrastive, open_clip.CoCa):
    """A CoCa (arXiv 2205.01917): its decoder, `text_decoder`, guesses each next token of a text."""

    text_decoder: Any
    _encode_image: Callable[..., tuple[Tensor, Tensor]]
    _encode_text: Callable[..., tuple[Tensor, Tensor]]
    context_length: int
    pad_id: int  # of the tokens that no caption loss counts

    def forward(
        self,
        images: Tensor | None = None,
        texts: Tensor | None = None,
        sample_seeds: Tensor | None = None,
        num_tokens: int | None = None,
        num_patches: int | None = None,
    ) -> Any:
        """As `Contrastive.forward`; of images with their texts also "caption_loss" (`Features`)."""
        if images is None or texts is None:
            return super().forward(images, texts, sample_seeds)
        draw_by(sample_seeds)
        image, image_tokens = self._encode_image(self.pixels(images), normalize=False)
        text, text_tokens = self._encode_text(texts, normalize=False)
        logits = at_least_float32(
            self.text_decoder(image_tokens, text_tokens[:, :-1])
        )  # [b, L - 1, vocabulary]
        targets, ignored = texts[:, 1:], self.pad_id
        terms = F.cross_entropy(
            logits.transpose(1, 2), targets, ignore_index=ignored, reduction="none"
        )
        counts = (targets != ignored).sum(dim=1).to(terms)
        losses = torch.stack([terms.sum(dim=1), counts], dim=1)
        return *outputs(self, image, text), {"caption_loss": losses}

    @torch.no_grad()
    def captions(self, images: Tensor, start: int, end: int) -> Tensor:
        """uint8 [b, 3, H, W] -> int64 [b, L], with L at most the context length: greedy decoding.

        Each is `start`, the tokens that the decoder thinks most likely, `end`, and padding.
        """
        _, image_tokens = self._encode_image(self.pixels(images))
        texts = torch.full((len(images), 1), start, device=images.device)
        ended = torch.zeros_like(texts, dtype=torch.bool)
        while texts.shape[1] < self.context_length and not ended.all():
            logits = self.text_decoder(image_tokens, self._encode_text(texts)[1])[:, -1:]
            texts = torch.cat([texts, logits.argmax(dim=2).masked_fill(ended, self.pad_id)], dim=1)
            ended = ended | (texts[:, -1:] == end)
        return texts


def build(
    architecture: OpenCLIPArchitecture, *, activation_checkpointing: bool = False
) -> Contrastive:
    """UserError if OpenCLIP cannot build it, or if a batch norm cannot see all ranks.

    activation_checkpointing: for towers that have it; the others, ResNets too, ignore it.
    """
    fake = detect_fake_mode()
    if fake is not None:  # timm reads numbers from tensors, which fake tensors do not have
        with unset_fake_temporarily(), torch.device("meta"):
            model = build(architecture, activation_checkpointing=activation_checkpointing)
        with fake:
            replace_tensors(model, lambda x: torch.empty(x.shape, dtype=x.dtype))
            seed_modules(model)  # their numbers are fake tensors, too
            return model
    with disable_current_modes():  # a constructor may be recorded: models/drawing.py
        intercepted = random_draws(architecture).modules
    return assemble(architecture, activation_checkpointing, intercepted)


@dataclass(frozen=True)
class RandomDraws:
    """Random numbers that a model draws in training by functions."""

    modules: list[int]  # numbers of the modules whose `F.dropout` has to be intercepted
    # draws that do not belong to a sample, which only training makes; and at native resolution,
    # positions that are not computed
    mistakes: list[str]


@cache
def random_draws(architecture: OpenCLIPArchitecture) -> RandomDraws:
    """UserError if OpenCLIP cannot build the model.

    Runs a forward, which is impossible once an engine shards parameters as they are created: they
    are empty. `resolve` builds the model's shapes before any engine, and the result is cached.
    """
    side, length = architecture.vision_cfg.image_size, architecture.text_cfg.context_length
    patches = architecture.patches
    with torch.device("meta"):
        model = assemble(architecture)
        texts = torch.zeros(2, length, dtype=torch.int64)
        images = torch.zeros(2, 3, side, side)
        if patches is not None:
            mistakes = position_mistakes(model.visual.trunk)
            if mistakes:
                return RandomDraws([], [unknown_positions(architecture, mistakes)])
            images = torch.zeros(2, *patches.row, dtype=torch.uint8)
        inputs = (images, texts, torch.zeros(2, dtype=torch.int64))
        modules = [*model.modules()]
        try:
            draws = find_draws(model, *inputs)
        except (AssertionError, RuntimeError, TypeError, ValueError) as e:
            raise UserError(
                f"model.name (open_clip:{architecture.open_clip}): a pass through it fails "
                f"({type(e).__name__}: {e}); give its towers sizes that they take: model.image_size "
                f"is {side}, model.context_length {length}"
            ) from e
        drawing = [modules.index(model.get_submodule(name)) for name in draws]
        for number in drawing:
            intercept(modules[number], number)
        remaining = find_draws(model, *inputs) if drawing else {}
    for name in list(remaining):
        # Hugging Face's encoders draw a number for each layer, also without LayerDrop
        if getattr(model.get_submodule(name), "layerdrop", None) == 0:
            del remaining[name]
    return RandomDraws(drawing, draw_mistakes(model, remaining) if remaining else [])


def unknown_positions(architecture: OpenCLIPArchitecture, mistakes: list[str]) -> str:
    return (
        f"model.name (open_clip:{architecture.open_clip}): its image tower has "
        f"{' and '.join(mistakes)}, which is not computed at native resolution: set "
        "data.resize=squash or another of squares, or choose a model with learned or factorized "
        "positions"
    )


def draw_mistakes(model: Contrastive, draws: dict[str, str]) -> list[str]:
    """What to change, so that the model makes none of these draws. draws: as of `find_draws`."""
    architecture = model.architecture
    where = f"model.name (open_clip:{architecture.open_clip})"
    config = getattr(getattr(model, "text", None), "config", None)
    keys = [key for key in UNSEEDED if getattr(config, key, 0) > 0]
    if not keys:
        return [
            f"{where}: {name} draws random numbers by {operator}, which would differ with "
            "batch.micro_size, so it cannot be trained; switch them off in the model's JSON"
            for name, operator in draws.items()
        ]
    tower = architecture.text_cfg.model_dump()["hf_model_name"]
    values = ", ".join(f"{key} ({getattr(config, key)})" for key in keys)
    if architecture.text_cfg.bert is not None:
        return [
            f"model.init_from ({tower}): its text_config has {values}, which would differ with "
            f"batch.micro_size, so it cannot be trained; set {' and '.join(keys)} to 0 in the "
            "text_config of config.json in a copy of the folder, and name the copy in model.init_from"
        ]
    return [
        f"{where}: its text tower {tower} has {values} in its config.json. Attention dropout and "
        "LayerDrop would differ with batch.micro_size, so it cannot be trained; set "
        f"{' and '.join(keys)} to 0 in a copy of that file, and name the copy's folder in "
        "text_cfg.hf_model_name of a copy of the model's JSON"
    ]


def assemble(
    architecture: OpenCLIPArchitecture,
    activation_checkpointing: bool = False,
    intercepted: Sequence[int] = (),
) -> Contrastive:
    """OpenCLIP's model, on this project's terms. UserError as of `build`.

    intercepted: numbers of modules.
    """
    config = architecture.model_cfg()
    custom = config.pop("custom_text") or config["text_cfg"].get("hf_model_name")
    config["vision_cfg"]["timm_model_pretrained"] = False
    config["text_cfg"]["hf_model_pretrained"] = False
    norm = config["vision_cfg"].pop("norm", "batch")
    arguments = timm_arguments(architecture)
    bert = architecture.text_cfg.bert
    try:
        kind = Captioner if "multimodal_cfg" in config else CustomText if custom else OneModule
        with tempfile.TemporaryDirectory(prefix="clip-train-") as folder:
            if arguments:  # timm's way to override a model's: a folder that describes it
                keys = {
                    "architecture": without_tag(config["vision_cfg"]["timm_model_name"]),
                    "model_args": arguments,
                    "pretrained_cfg": {"num_classes": 0},
                }
                Path(folder, "config.json").write_text(json.dumps(keys))
                config["vision_cfg"]["timm_model_name"] = f"local-dir:{folder}"
            if bert is not None:
                config["text_cfg"]["hf_model_name"] = f"{folder}/bert"
                Path(folder, "bert").mkdir()
                keys = {"model_type": "bert", **bert}
                Path(folder, "bert", "config.json").write_text(json.dumps(keys))
            model = kind(**config, nonscalar_logit_scale=True)
        if kind is Captioner:  # OpenCLIP leaves this parameter uninitialized
            decoder: Any = model.text_decoder
            nn.init.normal_(decoder.text_projection, std=0.02)
        if activation_checkpointing:
            model.set_grad_checkpointing()
        for number in intercepted:
            intercept([*model.modules()][number], number)
    except (
        TypeError,
        ValueError,
        AssertionError,
        RuntimeError,
        LookupError,
        AttributeError,
        OSError,
        ImportError,
    ) as e:
        raise UserError(
            f"model.name (open_clip:{architecture.open_clip}): OpenCLIP cannot build it "
            f"({type(e).__name__}: {e}); choose another model, or correct the JSON"
        ) from e
    model.architecture = architecture
    # a tower asks a block for it, whose weights FSDP holds in fp32 until the block's forward
    for each in model.modules():
        if isinstance(each, open_clip.transformer.Transformer):
            each.get_cast_dtype = partial(_dtype, model)
    if norm == "group":
        _use_group_norms(model.visual)
    adopt(
        model,
        f"model.name (open_clip:{architecture.open_clip})",
        {TimmBatchNormAct2d: BatchNormAct2d},
    )
    seed_modules(model)
    if architecture.is_naflex:
        adopt_native(model.visual.trunk)
    return model


def timm_arguments(architecture: OpenCLIPArchitecture) -> dict[str, Any]:
    """Arguments of timm's image tower that OpenCLIP's `vision_cfg` does not pass on."""
    vision = architecture.vision_cfg.model_dump()
    size = architecture.vision_cfg.image_size
    if not vision.get("timm_model_args"):
        return {} if has_own_image_size(architecture) else {"img_size": size}
    arguments = {**vision["timm_model_args"], "img_size": size}
    if architecture.is_naflex:
        side = size // (architecture.native_patch_size or size)
        arguments["pos_embed_grid_size"] = (side, side)
    return arguments


def has_own_image_size(architecture: OpenCLIPArchitecture) -> bool:
    """Whether OpenCLIP's image tower of this description takes images of its `image_size`: unless
    it is one of timm's that are made for another size."""
    name = architecture.vision_cfg.model_dump().get("timm_model_name")
    made_for = timm.get_pretrained_cfg(name, allow_unregistered=True) if name else None
    if made_for is None or not made_for.fixed_input_size:
        return True
    return bool(made_for.input_size[-1] == architecture.vision_cfg.image_size)


def exported_cfg(architecture: OpenCLIPArchitecture) -> dict[str, Any]:
    """`model_cfg` for OpenCLIP itself. If timm's image tower is made for another size of images:
    timm's name of the same tower for this size, or, for OpenCLIP 4, timm's argument."""
    config, size = architecture.model_cfg(), architecture.vision_cfg.image_size
    vision = config["vision_cfg"]
    if has_own_image_size(architecture):
        return config
    name = re.sub(r"_\d+$", f"_{size}", without_tag(vision["timm_model_name"]))
    if name.endswith(f"_{size}") and timm.is_model(name):
        vision["timm_model_name"] = name
    else:
        vision["timm_model_kwargs"] = {**(vision.get("timm_model_kwargs") or {}), "img_size": size}
    return config


def without_tag(name: str) -> str:
    """timm's name of an architecture, without that of its weights behind a dot."""
    return name.partition(".")[0]


def _dtype(model: Contrastive) -> torch.dtype:
    """The dtype in which the model computes; call it inside a forward."""
    return model.logit_scale.dtype


def _use_group_norms(tower: Any) -> None:
    """Make each batch norm a group norm of 32 groups, or as many as divide its channels."""
    for name, each in [*tower.named_modules()]:
        if isinstance(each, AnyBatchNorm):
            group = nn.GroupNorm(math.gcd(32, each.num_features), each.num_features)
            group.weight, group.bias = each.weight, each.bias
            tower.set_submodule(name, group)


def decoded(architecture: OpenCLIPArchitecture, tokens: list[list[int]]) -> list[str]:
    """The texts of tokens without start, end and padding."""
    its: Any = tokenizer(architecture) or open_clip.SimpleTokenizer()
    decode = getattr(its, "tokenizer", its).decode
    return [" ".join(decode(each).split()) for each in tokens]


def tokenizer_folder(name: str) -> Path:
    """The folder with the files of a tokenizer, "hf:" and a folder or org/name[@revision], which
    are fetched from the hub once. UserError, CheckpointError."""
    local = Path(name.removeprefix(TRANSFORMERS))
    return local if local.is_dir() else described_at(name, ("config.json", *TOKENIZER_FILES))


class TransformersTokenizer:
    """The tokenizer beside a model of transformers: the same ids as `AutoProcessor` with
    `padding="max_length"`, as SigLIP was trained."""

    def __init__(self, name: str, context_length: int):
        """name: "hf:" and a folder, or org/name[@revision]. OSError, ValueError; CheckpointError."""
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder(name))
        self.context_length = context_length

    def __call__(self, texts: list[str]) -> Tensor:
        """b texts -> int64 [b, context_length]"""
        return self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self.context_length,
            return_tensors="pt",
        ).input_ids  # fmt: skip


def tokenizer(architecture: OpenCLIPArchitecture) -> Tokenize | None:
    """OpenCLIP's tokenizer for this model, picklable; None: CLIP's own.

    UserError if its files are missing.
    """
    text = architecture.text_cfg
    options = {"context_length": text.context_length, **(text.tokenizer_kwargs or {})}
    if text.hf_tokenizer_name is None and not text.tokenizer_kwargs:
        return None
    try:
        if (text.hf_tokenizer_name or "").startswith(TRANSFORMERS):
            return TransformersTokenizer(str(text.hf_tokenizer_name), text.context_length)
        if text.hf_tokenizer_name is None:
            return open_clip.SimpleTokenizer(**options)
        mode = text.model_dump().get("tokenizer_mode")
        return open_clip.tokenizer.HFTokenizer(
            text.hf_tokenizer_name, tokenizer_mode=mode, **options
        )
    except (OSError, ValueError, ImportError, RuntimeError, TypeError) as e:
        raise UserError(
            f"model.name (open_clip:{architecture.open_clip}): its tokenizer "
            f"{text.hf_tokenizer_name} cannot be loaded ({type(e).__name__}: {str(e)[:300]}). It "
            "needs transformers and files from the Hugging Face hub. Download the files on a "
            "machine with a network (hf download), or set text_cfg.hf_tokenizer_name to a folder"
        ) from e
