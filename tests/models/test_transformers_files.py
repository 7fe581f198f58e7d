"""How images become pixels, by the files of transformers' processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clip_tools.exports import is_siglip
from clip_train.errors import UserError
from clip_train.models.config import ModelConfig, load_architecture
from clip_train.models.openclip.config import parse_openclip
from clip_train.models.weights import resize_of
from clip_train.recipe.recipe import load_config
from clip_train.resizing import Patches

CLIP = {"image_mean": [0.4] * 3, "image_std": [0.3] * 3}
SQUARE = {"height": 224, "width": 224}


def pixels_of(folder: Path, kind: str, processor: dict[str, Any] | None) -> tuple[Any, ...]:
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    found = load_architecture(str(folder))
    return found.image_mean[0], found.resize_mode, found.interpolation


def test_a_siglip_without_a_processor_has_its_defaults(tmp_path: Path):
    """`model.save_pretrained` alone writes none."""
    assert pixels_of(tmp_path, "siglip", None) == (0.5, "squash", "bicubic")
    assert pixels_of(tmp_path, "siglip2", None) == (0.5, "native", "bilinear")
    found = load_architecture(str(tmp_path))
    assert (found.vision_cfg.image_size, found.patches) == (256, Patches(16, 256))


@pytest.mark.parametrize(
    "kind, processor, expected",
    [
        ("siglip", {"size": SQUARE, "resample": 2}, (0.5, "squash", "bilinear")),
        (
            "siglip2",
            {"max_num_patches": 64, "size": None, "resample": 3},
            (0.5, "native", "bicubic"),
        ),
        ("clip", CLIP, (0.4, "shortest", "bicubic")),
        ("clip", {**CLIP, "size": 224}, (0.4, "shortest", "bicubic")),
        # a crop of the whole
        (
            "clip",
            {**CLIP, "size": SQUARE, "do_center_crop": True, "crop_size": SQUARE},
            (0.4, "squash", "bicubic"),
        ),
    ],
)
def test_keys_that_a_processor_leaves_out(
    tmp_path: Path, kind: str, processor: Any, expected: tuple[Any, ...]
):
    assert pixels_of(tmp_path, kind, processor) == expected


@pytest.mark.parametrize(
    "processor, words",
    [
        ({"size": {"longest_edge": 224}, "do_center_crop": False}, "longest_edge"),
        ({"size": {"height": 224, "width": 112}, "do_center_crop": False}, "112"),
        ({"size": {"shortest_edge": 256}}, "only a resize of both sides"),
        ({"do_normalize": False}, "no do_normalize"),
    ],
)
def test_a_processor_that_is_not_computed_here_is_rejected(
    tmp_path: Path, processor: dict[str, Any], words: str
):
    with pytest.raises(UserError, match=words):
        pixels_of(tmp_path, "clip", {**CLIP, **processor})


@pytest.mark.parametrize(
    "vision, processor, words",
    [
        ({"num_patches": 250}, {}, "num_patches .250.*only a square number"),
        ({"patch_size": 14}, {}, "patch_size .14.*has patch_size .16."),
        ({}, {"do_resize": False}, "leaves out do_resize"),
        ({}, {"resample": 0}, "resample 0"),
    ],
)
def test_a_naflex_that_is_not_computed_here_is_rejected(
    tmp_path: Path, vision: dict[str, int], processor: dict[str, Any], words: str
):
    config = {"model_type": "siglip2", "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    keys = {"image_mean": [0.5] * 3, **processor}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(keys))
    with pytest.raises(UserError, match=words):
        load_architecture(str(tmp_path))


def test_the_rule_of_the_recipe_goes_before_the_processors(tmp_path: Path):
    pixels_of(tmp_path, "siglip2", {"max_num_patches": 64, "image_mean": [0.5] * 3})

    def resized(trained: dict[str, Any], **data: Any) -> Any:
        recipe = tmp_path / "recipe.yaml"
        content = {
            "run": {"steps": 3000},
            "model": {"init_from": str(tmp_path)},
            "data": {"kind": "synthetic", **data},
        }
        recipe.write_text(json.dumps(content))
        return load_config(str(recipe), []).architecture(trained=trained)

    described = {"interpolation": "bilinear", "resize_mode": "native", "image_tokens": 64}
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resize_of(ModelConfig(init_from=str(tmp_path))) == described
    for trained in ({}, described):
        assert resized(trained).patches == Patches(16, 64)
        assert resized(trained, resize="native", tokens={9: 1, 36: 2}).patches == Patches(16, 36)
        square = resized(trained, resize="squash")
        assert (square.patches, square.resize_mode) == (None, "squash")


def test_what_a_named_model_cannot_follow_is_said(tmp_path: Path):
    """`model.name` beside weights whose processor resizes to 256 and crops 224."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    processor = tmp_path / "preprocessor_config.json"
    processor.write_text(json.dumps({**CLIP, "size": {"shortest_edge": 256}}))
    config = ModelConfig(name="ViT-B-32-quickgelu", init_from=str(tmp_path))
    lines: list[str] = []
    assert resize_of(config, lines.append) == {}
    assert len(lines) == 1 and "cannot say how images are resized" in lines[0] and "256" in lines[0]
    processor.write_text(json.dumps({**CLIP, "size": SQUARE, "do_center_crop": False}))
    assert resize_of(config, lines.append)["resize_mode"] == "squash"
    assert len(lines) == 1


@pytest.mark.parametrize("changed", [{}, {"proj_bias": False}, {"quick_gelu": True}])
def test_a_siglip_that_transformers_cannot_hold_is_not_a_siglip(changed: dict[str, bool]):
    """OpenCLIP's ViT-SO400M-16-SigLIP-i18n-256 projects texts without a bias."""
    config = {
        "embed_dim": 768,
        "quick_gelu": changed.get("quick_gelu", False),
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": {
            "timm_model_name": "vit_base_patch16_siglip_224",
            "timm_pool": "map",
            "timm_proj": "none",
        },
        "text_cfg": {
            "no_causal_mask": True,
            "proj_bias": changed.get("proj_bias", True),
            "pool_type": "last",
        },
    }
    assert is_siglip(parse_openclip(config, "siglip")) == (not changed)
