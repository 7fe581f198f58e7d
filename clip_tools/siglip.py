"""A SigLIP's description and tokenizer for transformers' `SiglipModel`, or `Siglip2Model` where the
image tower is timm's NaFlexVit."""

import math
import shutil
from pathlib import Path
from typing import Any

import torch

from clip_train.models.clip import build_model
from clip_train.models.files import TOKENIZER_FILES, read_object
from clip_train.models.openclip.config import TRANSFORMERS, OpenCLIPArchitecture
from clip_train.models.openclip.model import tokenizer, tokenizer_folder
from clip_train.models.weights import save_json

TOKENIZER_CONFIG = "tokenizer_config.json"


def siglip_config(architecture: OpenCLIPArchitecture) -> dict[str, Any]:
    """transformers' config.json. The sizes are read from the built modules, because OpenCLIP's JSON
    gives only the name of the timm model."""
    with torch.device("meta"):
        model: Any = build_model(architecture.model_copy(update={"lora": None}))
    trunk, text = model.visual.trunk, model.text
    block, text_block = trunk.blocks[0], text.transformer.resblocks[0]
    length, width = text.positional_embedding.shape
    shared = {"attention_dropout": 0.0}
    kind = "siglip2" if architecture.is_naflex else "siglip"
    if architecture.is_naflex:
        positions = trunk.embeds.pos_embed.shape[1:3]
        sizes = {"num_patches": math.prod(positions), "patch_size": trunk.embeds.patch_size[0]}
    else:
        patch_size = trunk.patch_embed.patch_size[0]
        sizes = {"image_size": architecture.vision_cfg.image_size, "patch_size": patch_size}
    vision_config = {
        "model_type": f"{kind}_vision_model",
        "hidden_size": trunk.embed_dim,
        "intermediate_size": block.mlp.fc1.out_features,
        "num_hidden_layers": len(trunk.blocks),
        "num_attention_heads": block.attn.num_heads,
        **sizes,
        "num_channels": 3,
        "hidden_act": activation(block.mlp.act),
        "layer_norm_eps": block.norm1.eps,
        "vision_use_head": True,
        **shared,
    }
    text_config = {
        "model_type": f"{kind}_text_model",
        "vocab_size": text.vocab_size,
        "hidden_size": width,
        "intermediate_size": text_block.mlp.c_fc.out_features,
        "num_hidden_layers": len(text.transformer.resblocks),
        "num_attention_heads": text_block.attn.num_heads,
        "max_position_embeddings": length,
        "projection_size": architecture.embed_dim,
        "hidden_act": activation(text_block.mlp.gelu),
        "layer_norm_eps": text.ln_final.eps,
        **shared,
    }
    return {
        "architectures": ["Siglip2Model" if architecture.is_naflex else "SiglipModel"],
        "model_type": kind,
        "torch_dtype": "float32",
        "initializer_factor": 1.0,
        "text_config": text_config,
        "vision_config": vision_config,
    }


def activation(module: Any) -> str:
    """transformers' name of a GELU."""
    tanh = "Tanh" in type(module).__name__ or getattr(module, "approximate", "none") == "tanh"
    return "gelu_pytorch_tanh" if tanh else "gelu"


def copy_tokenizer(name: str, folder: Path) -> Path:
    """Copy the files of a tokenizer of transformers. Returns the folder that has them. Raises
    UserError, CheckpointError."""
    folder.mkdir(parents=True, exist_ok=True)
    source = tokenizer_folder(name)
    for file in TOKENIZER_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
    return source


def write_tokenizer(architecture: OpenCLIPArchitecture, folder: Path) -> None:
    """Copy the tokenizer's files if the architecture names a transformers tokenizer, with the
    model's length in `model_max_length`; otherwise let transformers save the one OpenCLIP uses.
    Raises UserError, CheckpointError."""
    folder.mkdir(parents=True, exist_ok=True)
    name = architecture.text_cfg.hf_tokenizer_name or ""
    if name.startswith(TRANSFORMERS):
        source = copy_tokenizer(name, folder)
        length = {"model_max_length": architecture.text_cfg.context_length}
        keys = read_object(source / TOKENIZER_CONFIG)
        if keys | length != keys:  # or a processor would pad and cut texts to another length
            save_json(folder, TOKENIZER_CONFIG, keys | length)
        return
    # None: the model uses CLIP's own tokenizer; no file is written
    loaded: Any = tokenizer(architecture)
    if loaded is not None:
        loaded.tokenizer.save_pretrained(folder)
