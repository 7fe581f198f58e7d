"""`model.name=open_clip:NAME` on a machine without OpenCLIP, and what is refused before it is asked for anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from clip_train.errors import CheckpointError, UserError
from clip_train.models.clip import build_model, parse_saved
from clip_train.models.config import ModelConfig, load_architecture
from clip_train.models.openclip.config import OpenCLIPArchitecture, is_resnet, parse_openclip
from clip_train.resizing import Resize
from tests.models.small import small_architecture

SMALL: dict[str, Any] = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 64, "timm_model_name": "test_convnext", "timm_proj": None},
    "text_cfg": {"context_length": 16, "width": 32, "heads": 2, "layers": 2},
}


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)  # as if it were not installed
    for ask in (
        ModelConfig(name="open_clip:ViT-B-16-SigLIP2").architecture,
        lambda: build_model(small()),
    ):
        with pytest.raises(UserError, match=r"pip install 'clip-train\[openclip\]'"):
            ask()


def test_a_tokenizer_brings_no_code_of_its_own():
    """Whoever wrote the description, perhaps in a bucket: transformers would run what lies on the hub."""
    options = {"clean": "canonicalize", "strip_sep_token": True}
    text = {**SMALL["text_cfg"], "hf_tokenizer_name": "org/name", "tokenizer_kwargs": options}
    taken = parse_openclip({**SMALL, "text_cfg": text}, "here")
    assert parse_saved(taken.model_dump(mode="json")) == taken
    assert taken.model_cfg()["text_cfg"]["tokenizer_kwargs"] == options
    plain = parse_openclip(SMALL, "here").model_cfg()["text_cfg"]
    assert "tokenizer_kwargs" not in plain  # OpenCLIP's get_tokenizer fails where it is null
    options["trust_remote_code"] = True
    with pytest.raises(
        UserError,
        match=r"text_cfg\.tokenizer_kwargs: .*trust_remote_code is unknown; remove it, or use .*clean",
    ):
        parse_openclip({**SMALL, "text_cfg": text}, "here")
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        parse_saved({**taken.model_dump(mode="json"), "text_cfg": text})


def test_it_is_not_imported_for_other_models():
    ModelConfig(name="tiny").architecture()
    assert "clip_train.models.openclip.model" not in sys.modules


def small(**changes: Any) -> OpenCLIPArchitecture:
    return parse_openclip({**SMALL, **changes}, "small")


def test_a_checkpoint_holds_all_of_the_description():
    architecture = small(
        vision_cfg={**SMALL["vision_cfg"], "image_size": [64, 64]}, init_logit_bias=-10
    )
    again = parse_saved(architecture.model_dump(mode="json"))
    assert again == architecture and hash(again) == hash(architecture)
    assert hash(architecture) != hash(small())
    cfg = architecture.model_cfg()
    assert cfg["vision_cfg"] == SMALL["vision_cfg"] | {
        "patch_dropout": 0.0
    }  # a null stays: it is not the default
    assert cfg["init_logit_bias"] == -10 and "open_clip" not in cfg


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"audio_cfg": {}}, r"audio_cfg: Extra inputs are not permitted"),
        ({"vision_cfg": {"image_size": [224, 192]}}, r"image_size \(\[224, 192\]\) is not square"),
        ({"embed_dim": 0}, r"embed_dim: .*greater than 0"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(changes: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        small(**changes)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"dropout": 0.1}, r"model\.dropout \(0\.1\).*timm_drop"),
        (
            {"lock_image": True, "lock_image_unlocked_groups": 2},
            r"lock_image_unlocked_groups \(2\).*model\.freeze",
        ),
    ],
)
def test_options_of_our_own_towers_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        small().changed(ModelConfig(**options), {}, {}, {})


RESNET = {"image_size": 64, "layers": [2, 1, 1, 1], "width": 8, "head_width": 32}


def test_resnets_by_name_and_in_files_are_built_by_openclip(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    (tmp_path / "model.json").write_text(json.dumps({**SMALL, "vision_cfg": RESNET}))
    for name in ("RN50", "RN50x64-quickgelu", str(tmp_path / "model.json")):
        architecture = load_architecture(name)
        assert isinstance(architecture, OpenCLIPArchitecture), name
        assert "norm" not in architecture.model_cfg()["vision_cfg"]  # OpenCLIP has no such key
        with pytest.raises(UserError, match=r"pip install 'clip-train\[openclip\]'"):
            build_model(architecture)
    with pytest.raises(UserError, match=r"model\.patch_dropout \(0\.5\): RN50 is a ResNet"):
        ModelConfig(name="RN50", patch_dropout=0.5).architecture()
    with pytest.raises(UserError, match=r"norm \(group\) applies to ResNets only"):
        small(vision_cfg={**SMALL["vision_cfg"], "norm": "group"})


def test_checkpoints_of_earlier_versions_are_read():
    """They had ResNets of their own, and a key `norm` beside every ViT."""
    old = small_architecture().model_dump(mode="json", exclude={"own", "inputs"})
    old["vision_cfg"]["norm"] = "batch"
    assert parse_saved(old) == small_architecture()
    old["vision_cfg"] |= RESNET
    read = parse_saved(old)
    assert isinstance(read, OpenCLIPArchitecture) and is_resnet(read.model_dump())
    assert read.embed_dim == 24 and read.text_cfg.context_length == 8


def test_the_way_to_resize_is_read_from_the_description():
    assert small().resize == Resize("bicubic", "shortest") and not small().notes
    pixels = {"mean": [0.5] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
    squashed = parse_openclip({"model_cfg": SMALL, "preprocess_cfg": pixels}, "small")
    assert squashed.image_mean == (0.5,) * 3
    assert squashed.resize == Resize("bilinear", "squash") and not squashed.notes
    assert parse_saved(squashed.model_dump(mode="json")) == squashed
    pixels["interpolation"] = "random"  # OpenCLIP evaluates by bicubic then
    drawn = parse_openclip({"model_cfg": SMALL, "preprocess_cfg": pixels}, "small")
    assert drawn.resize == Resize("bicubic", "squash")
