"""Presets, OpenCLIP's schema, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clip_train.errors import UserError
from clip_train.models.config import (
    ModelConfig,
    load_architecture,
    parse_architecture,
    preset_names,
)
from tests.models.small import small_architecture


def _content(**sections: Any) -> dict[str, Any]:
    content = small_architecture().model_cfg()
    for key, value in sections.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    return content


def test_every_preset_loads():
    assert {"tiny", "ViT-B-32", "ViT-L-14", "ViT-bigG-14"} <= set(preset_names())
    for name in preset_names():
        load_architecture(name)
    big = load_architecture("ViT-bigG-14")
    assert (big.vision_cfg.heads, big.vision_cfg.mlp_width) == (16, 8192)


def test_an_unknown_preset_names_its_neighbours():
    with pytest.raises(UserError, match=r"model\.name \(vit-b32\): .* did you mean ViT-B-32") as e:
        load_architecture("vit-b32")
    assert "OpenCLIP's ViTs and ResNets such as ViT-B-32 and RN50" in str(e.value)
    with pytest.raises(
        UserError, match=r"model\.name \(nowhere/model\.json\): no preset or file has this name"
    ):
        load_architecture("nowhere/model.json")
    with pytest.raises(UserError, match="did you mean open_clip:ViT-B-16-SigLIP2 or ViT-B-16"):
        load_architecture("ViT-B-16-SigLIP2")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"vision_cfg": {"timm_model_name": "resnet50"}},
            r"vision_cfg\.timm_model_name \('resnet50'\): .* not implemented in OpenCLIP's plain ViT",
        ),
        (
            {"text_cfg": {"hf_model_name": "roberta"}},
            r"text_cfg\.hf_model_name \('roberta'\): .* not implemented",
        ),
        (
            {"vision_cfg": {"attentional_pool": True}},
            r"vision_cfg\.attentional_pool \(true\): .* not implemented",
        ),
        (
            {"vision_cfg": {"layers": [3, 4, 6]}},
            r"vision_cfg\.layers \(\[3, 4, 6\]\) must be a valid integer",
        ),
        (
            {"vision_cfg": {"patchsize": 4}},
            r"vision_cfg\.patchsize \(4\): .* not implemented",
        ),
        (
            {"vision_cfg": {"head_width": 10}},
            r"vision_cfg: .*width \(32\) must be a multiple of head_width \(10\)",
        ),
        (
            {"vision_cfg": {"patch_size": 5}},
            r"image_size \(16\) must be a multiple of patch_size \(5\)",
        ),
        ({"text_cfg": {"heads": 3}}, r"width \(20\) must be a multiple of heads \(3\)"),
        (
            {"vision_cfg": {"pool_type": "avg"}},
            r"vision_cfg\.pool_type \('avg'\): .* not implemented .* write open_clip: before the name",
        ),
        (
            {"text_cfg": {"pool_type": "eos"}},
            r"text_cfg\.pool_type \('eos'\): .* not implemented .* write open_clip: before the name",
        ),
        (
            {"text_cfg": {"hf_tokenizer_name": "google/mt5-base"}},
            r"text_cfg\.hf_tokenizer_name \('google/mt5-base'\): .* write open_clip: before the name",
        ),
        ({"text_cfg": {"embed_cls": True}}, r"text_cfg\.embed_cls \(true\): .* not implemented"),
        ({"custom_text": True}, r"custom_text \(true\): .* not implemented"),
        ({"embed_dim": 0}, r"embed_dim \(0\) must be greater than 0"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(sections: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        parse_architecture(_content(**sections), "model.json")


def test_all_mistakes_are_told_at_once():
    content = _content(vision_cfg={"pool_type": "none"}, text_cfg={"heds": 2})
    with pytest.raises(
        UserError, match=r"model\.json: .*pool_type.*; text_cfg\.heds \(2\): .* not implemented"
    ):
        parse_architecture(content, "model.json")


def test_keys_at_openclips_defaults_change_nothing():
    content = _content(
        vision_cfg={"pool_type": "tok", "ls_init_value": None},
        text_cfg={"no_causal_mask": False, "pool_type": "argmax", "eos_id": 2},
    )
    assert parse_architecture(content, "model.json") == small_architecture()


def test_the_schema_survives_a_round_trip(tmp_path: Path):
    architecture = small_architecture(quick_gelu=True, init_logit_bias=-10.0, init_logit_scale=2.3)
    (tmp_path / "model.json").write_text(json.dumps(architecture.model_cfg()))
    assert load_architecture(str(tmp_path / "model.json")) == architecture
    statistics = {"mean": [0.5] * 3, "std": [0.25] * 3}
    exported = {"model_cfg": architecture.model_cfg(), "preprocess_cfg": statistics}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(exported))
    loaded = load_architecture(str(tmp_path))
    assert (loaded.image_mean, loaded.image_std) == ((0.5,) * 3, (0.25,) * 3)
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(UserError, match=r"model\.json is not JSON"):
        load_architecture(str(tmp_path / "model.json"))


def test_the_recipe_overrides_the_preset():
    plain = ModelConfig(name="tiny").architecture()
    assert plain == load_architecture("tiny")
    changed = ModelConfig(
        name="tiny", patch_dropout=0.5, init_logit_bias=-10.0, init_logit_scale=2.3
    ).architecture()
    assert changed.vision_cfg.patch_dropout == 0.5
    assert (changed.init_logit_bias, changed.init_logit_scale) == (-10.0, 2.3)
    assert changed.text_cfg == plain.text_cfg
    assert ModelConfig(name="ViT-B-16", image_size=384).architecture().vision_cfg.image_size == 384
    with pytest.raises(
        UserError,
        match=r"model\.image_size \(385\) must be a multiple of patch_size \(16\); take 400",
    ):
        ModelConfig(name="ViT-B-16", image_size=385).architecture()
