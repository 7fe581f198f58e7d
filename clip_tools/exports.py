"""Exports for Hugging Face's `CLIPModel` of transformers, and for peft. Neither needs to be
installed."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train.data.tokenizer import vocabulary
from clip_train.errors import UserError
from clip_train.models.config import AnyArchitecture, Architecture, TowerConfig, VisionConfig
from clip_train.models.layouts import (
    chinese_to_transformers,
    siglip_to_transformers,
    to_transformers,
)
from clip_train.models.loading import check_state
from clip_train.models.lora import Lora
from clip_train.models.low_rank import FUSED
from clip_train.models.openclip.config import OpenCLIPArchitecture, library, parse_openclip
from clip_train.models.weights import save_json, save_weights
from clip_train.storage.local import LocalStorage

END = 49407  # the token that CLIP's tokenizer ends a text with
# Keys that `CLIPModel` supports, or does not depend on.
_HELD = {
    "": {
        "embed_dim",
        "vision_cfg",
        "text_cfg",
        "quick_gelu",
        "init_logit_scale",
        "image_mean",
        "image_std",
        "interpolation",
        "resize_mode",
        "lora",  # merged before
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


def is_siglip(architecture: AnyArchitecture | None) -> bool:
    """Whether both towers are a SigLIP's: timm's image tower, and OpenCLIP's text tower, whose
    projection has a bias in transformers."""
    if not isinstance(architecture, OpenCLIPArchitecture):
        return False
    vision, text = architecture.vision_cfg.model_dump(), architecture.text_cfg.model_dump()
    return (
        "_siglip" in str(vision.get("timm_model_name"))
        and not vision.get("timm_model_kwargs")
        and (vision.get("timm_pool"), vision.get("timm_proj")) == ("map", "none")
        and not text.get("hf_model_name")
        and bool(text.get("no_causal_mask") and text.get("proj_bias"))
        and not architecture.quick_gelu
        and text.get("pool_type") == "last"
    )


def is_naflex(architecture: AnyArchitecture | None) -> bool:
    """Whether the image tower is timm's NaFlexVit."""
    return isinstance(architecture, OpenCLIPArchitecture) and architecture.is_naflex


def is_chinese_clip(architecture: AnyArchitecture | None) -> bool:
    """Whether it is a ChineseCLIPModel of transformers."""
    return isinstance(architecture, OpenCLIPArchitecture) and bool(architecture.text_cfg.bert)


def check_openclip(architecture: AnyArchitecture, warn: Callable[[str], None]) -> None:
    """UserError if OpenCLIP is not installed, or has no image tower of these sizes; a warning if it
    must be OpenCLIP 4, or if its activation differs."""
    assert isinstance(architecture, OpenCLIPArchitecture)
    if is_chinese_clip(architecture):
        raise UserError(
            f"--format open_clip: OpenCLIP has no text tower like that of {architecture.open_clip}, "
            "a ChineseCLIPModel: export with --format transformers"
        )
    library(architecture.open_clip)
    from clip_train.models.openclip.model import assemble, exported_cfg

    config = exported_cfg(architecture)
    vision = config["vision_cfg"]
    if "img_size" in (vision.get("timm_model_kwargs") or {}):
        warn(
            f"its image tower is timm's {vision['timm_model_name']} with images of "
            f"{vision['image_size']} pixels, for which timm has no name: OpenCLIP 4 reads it, "
            "3.3.0 does not"
        )
    arguments = architecture.own_keys().get("vision_cfg", {}).get("timm_model_args")
    if arguments is None:
        return
    theirs = parse_openclip({"model_cfg": config}, architecture.open_clip)
    with torch.device("meta"):
        both = [assemble(each).state_dict() for each in (theirs, architecture)]
    ours, others = ({name: t.shape for name, t in each.items()} for each in both)
    if ours != others:
        raise UserError(
            f"--format open_clip: OpenCLIP has no image tower with the sizes of "
            f"{architecture.open_clip} ({arguments}): export with --format transformers"
        )
    names = {False: "GELU", True: "its approximation by tanh"}
    # timm's SigLIPs for squares have GELU, its NaFlexVit does not
    is_tanh = arguments.get("act_layer") == "gelu_tanh"
    if is_tanh != architecture.is_naflex:
        warn(
            f"OpenCLIP's image tower has {names[not is_tanh]} where transformers' has "
            f"{names[is_tanh]}: features there differ by about 1e-4; --format transformers has "
            "them exactly"
        )


def check_transformers(architecture: AnyArchitecture) -> None:
    """UserError with the reason if transformers cannot represent such a model."""
    if architecture.resize_mode == "longest":
        raise UserError(
            "--format transformers: data.resize (longest) pads images, and transformers' "
            "processors do not: export with --format open_clip"
        )
    if is_siglip(architecture):
        if architecture.init_logit_bias is None:
            raise UserError(
                "--format transformers: SiglipModel has a logit_bias, and this model has none "
                "(model.init_logit_bias): export with --format open_clip"
            )
        if is_naflex(architecture) and architecture.patches is None:
            raise UserError(
                f"--format transformers: Siglip2Model's processor keeps the aspect ratio of images, "
                f"and data.resize is {architecture.resize_mode}: export with --format open_clip"
            )
        return
    if is_chinese_clip(architecture):
        return
    assert isinstance(architecture, Architecture)
    parts = {
        "": architecture,
        "vision_cfg.": architecture.vision_cfg,
        "text_cfg.": architecture.text_cfg,
    }
    foreign = [
        f"{at}{key}"
        for at, part in parts.items()
        for key in part.model_dump(exclude_defaults=True)
        if key not in _HELD[at]
    ]
    if architecture.text_cfg.vocab_size <= END:
        foreign.append(
            f"text_cfg.vocab_size ({architecture.text_cfg.vocab_size}, less than CLIP's tokens)"
        )
    if foreign:
        raise UserError(
            "--format transformers: transformers' CLIPModel is a ViT with a class token and a "
            "causal text tower, and "
            f"has no {', '.join(foreign)}: export with --format open_clip"
        )


def export_transformers(
    state: dict[str, Tensor], architecture: AnyArchitecture, folder: str | os.PathLike
) -> Path:
    """Write `state` in the layout of `CLIPModel.from_pretrained(FOLDER)`, with CLIP's tokenizer, or
    of `SiglipModel` and `Siglip2Model`, with its own.

    Raises what `export_openclip` raises, and UserError if `CLIPModel` cannot hold the architecture.
    """
    check_transformers(architecture)
    check_state(state, architecture, "the state to export")
    path = Path(folder)
    if is_chinese_clip(architecture):
        assert isinstance(architecture, OpenCLIPArchitecture)
        from clip_tools.siglip import copy_tokenizer

        copy_tokenizer(str(architecture.text_cfg.hf_tokenizer_name), path)
        save_weights(dict(chinese_to_transformers(state)), path, "model.safetensors")
        save_json(path, "config.json", chinese_config(architecture))
        save_json(path, "preprocessor_config.json", pixel_keys(architecture))
        return path
    if isinstance(architecture, OpenCLIPArchitecture):
        from clip_tools.siglip import siglip_config, write_tokenizer

        write_tokenizer(architecture, path)  # first: its files may be missing
        save_weights(dict(siglip_to_transformers(state)), path, "model.safetensors")
        save_json(path, "config.json", siglip_config(architecture))
        save_json(path, "preprocessor_config.json", pixel_keys(architecture))
        return path
    save_weights(dict(to_transformers(state)), path, "model.safetensors")
    side = architecture.vision_cfg.image_size
    vision, text = architecture.vision_cfg, architecture.text_cfg
    towers: dict[str, dict[str, Any]] = {
        "text_config": {
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.context_length,
            "bos_token_id": END - 1,
            "eos_token_id": END,
            "pad_token_id": END,
        },
        "vision_config": {
            "image_size": side,
            "patch_size": vision.patch_size,
            "num_channels": 3,
        },
    }
    for kind, cfg in (("text", text), ("vision", vision)):
        towers[f"{kind}_config"] |= {
            "model_type": f"clip_{kind}_model",
            **tower_sizes(cfg, architecture),
        }
    config = {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "torch_dtype": "float32",
        "projection_dim": architecture.embed_dim,
        "logit_scale_init_value": architecture.init_logit_scale,
        **towers,
    }
    save_json(path, "config.json", config)
    save_json(path, "preprocessor_config.json", pixel_keys(architecture))
    for name, content in huggingface_files(text.context_length).items():
        LocalStorage(path).put_bytes(name, content.encode())
    return path


def tower_sizes(cfg: TowerConfig, architecture: AnyArchitecture) -> dict[str, Any]:
    """What transformers' config.json has of a tower of CLIP's, of images or of texts."""
    return {
        "hidden_size": cfg.width,
        "intermediate_size": cfg.mlp_width,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "hidden_act": "quick_gelu" if architecture.quick_gelu else "gelu",
        "layer_norm_eps": 1e-5,
        "projection_dim": architecture.embed_dim,
    }


def chinese_config(architecture: OpenCLIPArchitecture) -> dict[str, Any]:
    """transformers' config.json of a ChineseCLIPModel."""
    vision = VisionConfig.model_validate(
        architecture.vision_cfg.model_dump(include=set(VisionConfig.model_fields))
    )
    vision_config = {
        "model_type": "chinese_clip_vision_model",
        **tower_sizes(vision, architecture),
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
        "num_channels": 3,
    }
    return {
        "architectures": ["ChineseCLIPModel"],
        "model_type": "chinese_clip",
        "torch_dtype": "float32",
        "projection_dim": architecture.embed_dim,
        "logit_scale_init_value": architecture.init_logit_scale,
        "text_config": {
            "model_type": "chinese_clip_text_model",
            **(architecture.text_cfg.bert or {}),
        },
        "vision_config": vision_config,
    }


def pixel_keys(architecture: AnyArchitecture) -> dict[str, Any]:
    """transformers' preprocessor_config.json, as evaluation resizes here."""
    side = architecture.vision_cfg.image_size
    squash = architecture.resize_mode == "squash"
    siglip = squash and is_siglip(architecture)
    square = {"height": side, "width": side}
    keys: dict[str, Any] = {
        "image_processor_type": "SiglipImageProcessor" if siglip else "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": square if squash else {"shortest_edge": side},
        "resample": 2 if architecture.interpolation == "bilinear" else 3,  # Pillow's numbers
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(architecture.image_mean),
        "image_std": list(architecture.image_std),
    }
    if architecture.patches is not None:
        del keys["size"]
        return {
            "processor_class": "Siglip2Processor",
            **keys,
            "image_processor_type": "Siglip2ImageProcessor",
            "patch_size": architecture.patches.size,
            "max_num_patches": architecture.patches.most,
        }
    if is_chinese_clip(architecture) and squash:
        keys |= {"image_processor_type": "ChineseCLIPImageProcessor", "do_center_crop": False}
        return {"processor_class": "ChineseCLIPProcessor", **keys}
    if siglip:
        return {"processor_class": "SiglipProcessor", **keys}
    return {**keys, "do_center_crop": not squash, "crop_size": square}


def huggingface_files(context_length: int) -> dict[str, str]:
    """The same tokenizer for transformers' `CLIPTokenizer`: name of file -> content."""
    start, end = "<|startoftext|>", "<|endoftext|>"  # the names in OpenAI's tokenizer there
    ids = {token: number for number, token in enumerate([*vocabulary().tokens[:-2], start, end])}
    special = {"bos_token": start, "eos_token": end, "unk_token": end, "pad_token": end}
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": context_length,
        "do_lower_case": True,
        **special,
    }
    return {
        "vocab.json": json.dumps(ids, ensure_ascii=False),
        "merges.txt": "\n".join(["#version: 0.2", *map(" ".join, vocabulary().ranks), ""]),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "special_tokens_map.json": json.dumps(special, indent=2) + "\n",
    }


def export_peft(state: Mapping[str, Tensor], lora: Lora, folder: str) -> Path:
    """Write the files that `PeftModel.from_pretrained(OpenCLIP's model, FOLDER)` reads; returns the
    folder.

    peft has one adapter for packed attention weights, always together with one for `out_proj`, and
    one for a fused layer. Several adapters in one weight become one of block matrices, with as many
    times the rank and alpha. Parameters trained beside the adapters are saved in
    trained.safetensors.
    """
    out: dict[str, Tensor] = {}
    adapters = {name: tensor for name, tensor in state.items() if ".lora_" in name}
    rest = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
    layers = [name.removesuffix(".lora_A") for name in adapters if name.endswith(".lora_A")]
    count = {layer: len(state[f"{layer}.lora_A"]) // lora.rank for layer in layers}
    several = {layer: number for layer, number in count.items() if number > 1}
    packed = [layer for layer in several if layer.rpartition(".")[2] not in FUSED]
    outputs = {f"{x}.out_proj": state[f"{x}.lora_A"].shape[1] for x in packed}
    for layer in dict.fromkeys([*layers, *outputs]):
        width = outputs.get(layer, 0)
        A = adapters.get(f"{layer}.lora_A", torch.zeros(lora.rank, width))
        B = adapters.get(f"{layer}.lora_B", torch.zeros(width, lora.rank))
        B = torch.block_diag(*B.chunk(len(A) // lora.rank))
        place = f"base_model.model.{layer}"
        if layer in outputs:
            place = f"{place.removesuffix('.out_proj')}.base_layer.out_proj"
            A, B = F.pad(A, (0, 0, 0, 2 * lora.rank)), F.pad(B, (0, 2 * lora.rank))
        out |= {f"{place}.lora_A.weight": A, f"{place}.lora_B.weight": B}
    config = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [layer for layer in layers if layer not in outputs],
        "rank_pattern": {layer: number * lora.rank for layer, number in several.items()},
        "alpha_pattern": {layer: number * lora.alpha for layer, number in several.items()},
    }
    path = save_weights(out, Path(folder), "adapter_model.safetensors").parent
    save_weights(rest, path, "trained.safetensors")
    save_json(path, "adapter_config.json", config)
    return path
