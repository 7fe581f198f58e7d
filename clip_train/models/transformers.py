"""Weights out, for the `CLIPModel` of Hugging Face's transformers, which is not needed to write them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from clip_train.errors import UserError
from clip_train.models.config import Architecture, TowerConfig
from clip_train.models.export import as_json, own_copy, save_texts, save_weights
from clip_train.models.weights import check_state

END = 49407  # the token that CLIP's tokenizer ends a text with
# What `CLIPModel` can be set to, or does not depend on.
_HELD = {
    "": {
        "embed_dim",
        "vision_cfg",
        "text_cfg",
        "quick_gelu",
        "init_logit_scale",
        "image_mean",
        "image_std",
    },
    "vision_cfg.": {
        "layers",
        "width",
        "mlp_ratio",
        "image_size",
        "head_width",
        "patch_size",
        "patch_dropout",
    },
    "text_cfg.": {"layers", "width", "mlp_ratio", "context_length", "vocab_size", "heads"},
}
_BLOCK = {
    "ln_1": "layer_norm1", "attn.out_proj": "self_attn.out_proj", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}  # fmt: skip


def check_transformers(architecture: Architecture) -> None:
    """UserError with the reason where `CLIPModel` cannot hold such a model."""
    parts = {
        "": architecture,
        "vision_cfg.": architecture.vision_cfg,
        "text_cfg.": architecture.text_cfg,
    }
    changed = {at: part.model_dump(exclude_defaults=True) for at, part in parts.items()}
    foreign = [f"{at}{key}" for at, keys in changed.items() for key in keys if key not in _HELD[at]]
    if architecture.text_cfg.vocab_size <= END:
        foreign.append(
            f"text_cfg.vocab_size ({architecture.text_cfg.vocab_size}, less than CLIP's tokens)"
        )
    if foreign:
        raise UserError(
            f"--format transformers: transformers' CLIPModel is a ViT with a class token and a causal text tower, and "
            f"has no {', '.join(foreign)}: export with --format open_clip"
        )


def export_transformers(
    state: dict[str, Tensor], architecture: Architecture, folder: str | os.PathLike
) -> Path:
    """Write `state` where `CLIPModel.from_pretrained(FOLDER)` finds it; the tokenizer's files are not among it.

    As `export_openclip`; UserError too, for an architecture that `CLIPModel` cannot hold.
    """
    check_transformers(architecture)
    check_state(state, architecture, "the state to export")
    path = Path(folder)
    save_weights(
        {name: own_copy(tensor) for name, tensor in _renamed(state, architecture)},
        path,
        "model.safetensors",
    )
    save_texts(
        {
            "config.json": as_json(_config(architecture)),
            "preprocessor_config.json": as_json(_pixels(architecture)),
        },
        path,
    )
    return path


def _renamed(state: dict[str, Tensor], architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    yield "logit_scale", state["logit_scale"].reshape(())
    yield "visual_projection.weight", state["visual.proj"].T  # a Linear's: [D, width]
    yield "text_projection.weight", state["text_projection"].T
    for theirs, ours in (
        ("text_model.embeddings.token_embedding.weight", "token_embedding.weight"),
        ("text_model.embeddings.position_embedding.weight", "positional_embedding"),
        ("vision_model.embeddings.class_embedding", "visual.class_embedding"),
        ("vision_model.embeddings.patch_embedding.weight", "visual.conv1.weight"),
        ("vision_model.embeddings.position_embedding.weight", "visual.positional_embedding"),
        *_pairs("text_model.final_layer_norm", "ln_final"),
        *_pairs("vision_model.pre_layrnorm", "visual.ln_pre"),  # so spelt
        *_pairs("vision_model.post_layernorm", "visual.ln_post"),
    ):
        yield theirs, state[ours]
    for tower, root, layers in (
        ("text_model", "", architecture.text_cfg.layers),
        ("vision_model", "visual.", architecture.vision_cfg.layers),
    ):
        for layer in range(layers):
            theirs, ours = f"{tower}.encoder.layers.{layer}", f"{root}transformer.resblocks.{layer}"
            for name, other in _BLOCK.items():
                for a, b in _pairs(f"{theirs}.{other}", f"{ours}.{name}"):
                    yield a, state[b]
            for kind in ("weight", "bias"):  # [3 width, ...]
                for name, part in zip(
                    "qkv", state[f"{ours}.attn.in_proj_{kind}"].chunk(3), strict=True
                ):
                    yield f"{theirs}.self_attn.{name}_proj.{kind}", part


def _pairs(theirs: str, ours: str) -> list[tuple[str, str]]:
    return [(f"{theirs}.{kind}", f"{ours}.{kind}") for kind in ("weight", "bias")]


def _config(architecture: Architecture) -> dict[str, Any]:
    """config.json"""
    vision, text = architecture.vision_cfg, architecture.text_cfg

    def tower(cfg: TowerConfig, kind: str) -> dict[str, Any]:
        return {
            "model_type": f"clip_{kind}_model",
            "hidden_size": cfg.width,
            "intermediate_size": cfg.mlp_width,
            "num_hidden_layers": cfg.layers,
            "num_attention_heads": cfg.heads,
            "hidden_act": "quick_gelu" if architecture.quick_gelu else "gelu",
            "layer_norm_eps": 1e-5,
            "projection_dim": architecture.embed_dim,
        }

    tokens = {"bos_token_id": END - 1, "eos_token_id": END, "pad_token_id": END}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "torch_dtype": "float32",
        "projection_dim": architecture.embed_dim,
        "logit_scale_init_value": architecture.init_logit_scale,
        "text_config": tower(text, "text")
        | {"vocab_size": text.vocab_size, "max_position_embeddings": text.context_length}
        | tokens,
        "vision_config": tower(vision, "vision")
        | {"image_size": vision.image_size, "patch_size": vision.patch_size, "num_channels": 3},
    }


def _pixels(architecture: Architecture) -> dict[str, Any]:
    """preprocessor_config.json: as in evaluation, the shorter side resized, the centre cut out."""
    side = architecture.vision_cfg.image_size
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": side},
        "resample": 3,  # bicubic
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(architecture.image_mean),
        "image_std": list(architecture.image_std),
    }
