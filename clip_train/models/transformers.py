"""Models of transformers, `CLIPModel`, `SiglipModel`, `Siglip2Model` and `ChineseCLIPModel`, by the files in
their folder.

    config.json                sizes, activations
    preprocessor_config.json   how an image becomes pixels
    tokenizer files            read by transformers itself

transformers need not be installed to read these files.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from clip_train.errors import UserError
from clip_train.models.files import PREPROCESSORS, TRANSFORMERS_CONFIGS, read_object
from clip_train.models.openclip.config import BERT_KEYS, TRANSFORMERS

RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}  # transformers' -> timm's
# The defaults of `CLIPConfig`, `SiglipConfig` and `Siglip2Config`: files hold only what differs.
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "clip": {
        "vision_config": {
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "image_size": 224, "patch_size": 32, "num_channels": 3,
            "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
        },
        "text_config": {
            "vocab_size": 49_408, "hidden_size": 512, "intermediate_size": 2048,
            "num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77,
            "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
        },
    },
    "siglip": {
        "vision_config": {
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "image_size": 224, "patch_size": 16, "num_channels": 3,
            "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "vision_use_head": True,
        },
        "text_config": {
            "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 3072,
            "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 64,
            "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
        },
    },
}  # fmt: skip
# NaFlex: images of any shape. `num_patches` is the size of the table of positions.
DEFAULTS["siglip2"] = {
    "vision_config": {**DEFAULTS["siglip"]["vision_config"], "num_patches": 256},
    "text_config": DEFAULTS["siglip"]["text_config"],
}
DEFAULTS["chinese_clip"] = {
    "vision_config": DEFAULTS["clip"]["vision_config"],
    "text_config": {
        "vocab_size": 30_522, "hidden_size": 768, "intermediate_size": 3072,
        "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 512,
        "hidden_act": "gelu", "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "type_vocab_size": 2, "pad_token_id": 0,
    },
}  # fmt: skip
EPS = {"clip": 1e-5, "siglip": 1e-6, "siglip2": 1e-6, "chinese_clip": 1e-5}
CHINESE_LENGTH = 52  # tokens of a text in Chinese-CLIP's training; its padding is masked
# The defaults of their image processors, as far as they are used here.
PROCESSORS: dict[str, dict[str, Any]] = {
    "clip": {"size": {"shortest_edge": 224}, "crop_size": 224},
    "siglip": {
        "size": {"height": 224, "width": 224}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    },
    "siglip2": {
        "patch_size": 16, "max_num_patches": 256, "resample": 2, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
    "chinese_clip": {"size": {"height": 224, "width": 224}, "crop_size": 224},
}  # fmt: skip
# timm's name of a SigLIP image tower, by its width and patch.
TIMM_NAMES = {
    (768, 16): "vit_base_patch16_siglip_224",
    (768, 32): "vit_base_patch32_siglip_256",
    (1024, 16): "vit_large_patch16_siglip_256",
    (1152, 14): "vit_so400m_patch14_siglip_224",
    (1152, 16): "vit_so400m_patch16_siglip_256",
    (1536, 16): "vit_giantopt_patch16_siglip_256",
}
NAFLEX_NAMES = {
    768: "naflexvit_base_patch16_siglip",
    1152: "naflexvit_so400m_patch16_siglip",
}


def is_transformers(folder: Path) -> bool:
    """Whether the folder describes a model of transformers, as `save_pretrained` writes it."""
    try:
        return "model_type" in read_object(folder / TRANSFORMERS_CONFIGS[0])
    except (OSError, ValueError):
        return False


def description(folder: Path, place: str) -> dict[str, Any]:
    """OpenCLIP's JSON, `model_cfg` and `preprocess_cfg`, of the model in a folder.

    place: for messages, and where the tokenizer is. UserError for another model, and for one that
    cannot be built exactly.
    """
    try:
        config = read_object(folder / TRANSFORMERS_CONFIGS[0])
        processor = preprocessor(folder)
    except (OSError, ValueError) as e:
        raise UserError(f"model.name: {place} cannot be read: {e}; correct the file") from e
    kind = config.get("model_type")
    if kind not in DEFAULTS:
        raise UserError(
            f"model.name: {place} is a model of transformers of the type {kind}, which is not read "
            "here; give a CLIPModel (clip), a SiglipModel (siglip: SigLIP, and SigLIP 2 of a fixed "
            "resolution), a Siglip2Model (siglip2: SigLIP 2 NaFlex) or a ChineseCLIPModel "
            "(chinese_clip)"
        )
    towers = {
        key: {**defaults, **(config.get(key) or {})} for key, defaults in DEFAULTS[kind].items()
    }
    vision, text = towers["vision_config"], towers["text_config"]
    for key, tower in towers.items():
        if kind == "chinese_clip" and key == "text_config":  # which transformers itself builds
            continue
        if tower["layer_norm_eps"] != EPS[kind] or tower.get("num_channels", 3) != 3:
            raise UserError(
                f"model.name: {place} has {key}.layer_norm_eps ({tower['layer_norm_eps']}) and "
                f"num_channels ({tower.get('num_channels', 3)}); only {EPS[kind]} and 3 are built"
            )
    if kind == "clip":
        model = _clip(config, vision, text, place)
    elif kind == "siglip":
        model = _siglip(vision, text, place)
    elif kind == "siglip2":
        model = _siglip2(vision, text, processor, place)
    else:
        model = _chinese_clip(config, vision, text, place)
    return {"model_cfg": model, "preprocess_cfg": preprocess_cfg(processor, place)}


def _clip(
    config: dict[str, Any], vision: dict[str, Any], text: dict[str, Any], place: str
) -> dict[str, Any]:
    acts = {vision["hidden_act"], text["hidden_act"]}
    if len(acts) != 1 or not acts <= {"quick_gelu", "gelu"}:
        raise UserError(
            f"model.name: {place} has the activations {' and '.join(sorted(acts))}; only "
            "quick_gelu or gelu in both towers are built"
        )
    return {
        "embed_dim": config.get("projection_dim", 512),
        "quick_gelu": acts == {"quick_gelu"},
        "init_logit_scale": config.get("logit_scale_init_value", 2.6592),
        "vision_cfg": _vit(vision),
        "text_cfg": {
            "context_length": text["max_position_embeddings"],
            "vocab_size": text["vocab_size"],
            "width": text["hidden_size"],
            "heads": text["num_attention_heads"],
            "layers": text["num_hidden_layers"],
            "mlp_ratio": _ratio(text),
        },
    }


def _vit(vision: dict[str, Any]) -> dict[str, Any]:
    """`vision_cfg` of CLIP's image tower."""
    return {
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
        "width": vision["hidden_size"],
        "layers": vision["num_hidden_layers"],
        "head_width": vision["hidden_size"] // vision["num_attention_heads"],
        "mlp_ratio": _ratio(vision),
    }


def _chinese_clip(
    config: dict[str, Any], vision: dict[str, Any], text: dict[str, Any], place: str
) -> dict[str, Any]:
    """CLIP's image tower, and a BERT that reads each text at its first token."""
    positions = text.get("position_embedding_type", "absolute")
    if vision["hidden_act"] not in ("quick_gelu", "gelu") or positions != "absolute":
        raise UserError(
            f"model.name: {place} has an image tower with {vision['hidden_act']} and a text tower "
            f"with {positions} positions; only quick_gelu or gelu, and absolute positions are built"
        )
    return {
        "embed_dim": config.get("projection_dim", 512),
        "quick_gelu": vision["hidden_act"] == "quick_gelu",
        "custom_text": True,
        "init_logit_scale": config.get("logit_scale_init_value", 2.6592),
        "vision_cfg": _vit(vision),
        "text_cfg": {
            "context_length": min(CHINESE_LENGTH, text["max_position_embeddings"]),
            "hf_model_name": place,
            "hf_model_config": {key: text[key] for key in sorted(BERT_KEYS)},
            "hf_proj_type": "linear",
            "hf_pooler_type": "cls_last_hidden_state_pooler",
            "hf_tokenizer_name": f"{TRANSFORMERS}{place.removeprefix(TRANSFORMERS)}",
        },
    }


def _siglip(vision: dict[str, Any], text: dict[str, Any], place: str) -> dict[str, Any]:
    acts = {vision["hidden_act"], text["hidden_act"]}
    width, features = vision["hidden_size"], text.get("projection_size", text["hidden_size"])
    if not acts <= ACTIVATIONS.keys() or width != features or not vision["vision_use_head"]:
        raise UserError(
            f"model.name: {place} has activations {' and '.join(sorted(acts))}, an image tower of "
            f"width {width} and texts of {features} values; only {' or '.join(ACTIVATIONS)}, equal "
            "sizes and a head (vision_use_head) are built"
        )
    approximate = "tanh" if text["hidden_act"] == "gelu_pytorch_tanh" else "none"
    return {
        "embed_dim": width,
        "custom_text": True,
        "init_logit_scale": math.log(10),
        "init_logit_bias": -10.0,
        "vision_cfg": {
            "image_size": vision["image_size"],
            "timm_model_name": TIMM_NAMES.get((width, vision["patch_size"]), TIMM_NAMES[768, 16]),
            "timm_pool": "map",
            "timm_proj": "none",
            "timm_model_args": {
                "patch_size": vision["patch_size"],
                "embed_dim": width,
                "depth": vision["num_hidden_layers"],
                "num_heads": vision["num_attention_heads"],
                "mlp_ratio": _ratio(vision),
                "act_layer": ACTIVATIONS[vision["hidden_act"]],
            },
        },
        "text_cfg": {
            "context_length": text["max_position_embeddings"],
            "vocab_size": text["vocab_size"],
            "hf_tokenizer_name": f"{TRANSFORMERS}{place.removeprefix(TRANSFORMERS)}",
            "width": text["hidden_size"],
            "heads": text["num_attention_heads"],
            "layers": text["num_hidden_layers"],
            "mlp_ratio": _ratio(text),
            "no_causal_mask": True,
            "proj_bias": True,
            "pool_type": "last",
            "norm_kwargs": {"eps": EPS["siglip"]},
            "act_kwargs": {"approximate": approximate},
        },
    }


def _siglip2(
    vision: dict[str, Any], text: dict[str, Any], processor: dict[str, Any], place: str
) -> dict[str, Any]:
    """NaFlex: a SigLIP whose table of positions is resized to the grid of each image."""
    side, size = math.isqrt(vision["num_patches"]), vision["patch_size"]
    if side**2 != vision["num_patches"] or processor["patch_size"] != size:
        raise UserError(
            f"model.name: {place} has vision_config.num_patches ({vision['num_patches']}) and "
            f"patch_size ({size}), and its image processor has patch_size "
            f"({processor['patch_size']}); only a square number of patches and equal sizes are "
            "built"
        )
    model = _siglip({**vision, "image_size": side * size}, text, place)
    name = NAFLEX_NAMES.get(vision["hidden_size"], NAFLEX_NAMES[768])
    model["vision_cfg"]["timm_model_name"] = name
    return model


def _ratio(tower: dict[str, Any]) -> float:
    """Of the MLP's hidden width to the tower's; times the width it is at least the hidden width."""
    ratio = tower["intermediate_size"] / tower["hidden_size"]
    if int(tower["hidden_size"] * ratio) < tower["intermediate_size"]:
        ratio = (tower["intermediate_size"] + 0.5) / tower["hidden_size"]
    return ratio


# -- images


def preprocessor(folder: Path) -> dict[str, Any]:
    """The keys of the image processor in a folder, with its defaults; empty without one, except for
    a SigLIP, whose pixels are never CLIP's. OSError, ValueError."""
    kind = str(read_object(folder / TRANSFORMERS_CONFIGS[0]).get("model_type"))
    defaults = PROCESSORS.get(kind, {})
    for name in PREPROCESSORS:
        keys = read_object(folder / name)
        keys = keys.get("image_processor", keys)
        if "image_mean" in keys or "size" in keys:
            return {**defaults, **keys}
    return {} if kind == "clip" else defaults


def preprocess_cfg(keys: dict[str, Any], place: str) -> dict[str, Any]:
    """OpenCLIP's `preprocess_cfg` of transformers' image processor. UserError for one that crops
    a part of what it has resized, or leaves a step out."""
    if not keys:
        return {}
    left_out = [
        key for key in ("do_resize", "do_rescale", "do_normalize") if keys.get(key) is False
    ]
    statistics = {
        name: [float(x) for x in np.broadcast_to(keys[f"image_{name}"], 3)]
        for name in ("mean", "std")
        if f"image_{name}" in keys
    }
    if "max_num_patches" in keys:  # native resolution
        if keys["resample"] not in RESAMPLE or left_out:
            raise UserError(
                f"model.name: the image processor of {place} has resample {keys['resample']} and "
                f"leaves out {', '.join(left_out) or 'nothing'}; only a resize by 2 (bilinear) or "
                "3 (bicubic), with all steps, is computed here"
            )
        return {
            **statistics,
            "interpolation": RESAMPLE[keys["resample"]],
            "resize_mode": "native",
            "image_tokens": keys["max_num_patches"],
        }
    size, crop = keys.get("size"), keys.get("crop_size")
    if not isinstance(size, dict):
        size = {"shortest_edge": size}
    squash = "height" in size and size["height"] == size.get("width")
    side = size["height"] if squash else size.get("shortest_edge")
    crops = keys.get("do_center_crop", not squash)
    cropped_to = crop.get("height") if isinstance(crop, dict) else crop
    resample = keys.get("resample", 3)
    is_square = cropped_to == side if crops else squash
    if resample not in RESAMPLE or side is None or not is_square or left_out:
        no = f" and no {' and '.join(left_out)}" if left_out else ""
        raise UserError(
            f"model.name: the image processor of {place} has size {size}, do_center_crop {crops}, "
            f"crop_size {crop} and resample {resample}{no}; only a resize of both sides, or of the "
            "shorter side to the size of the crop, by 2 (bilinear) or 3 (bicubic) is computed here"
        )
    return {
        **statistics,
        "interpolation": RESAMPLE[resample],
        "resize_mode": "squash" if squash else "shortest",
    }
