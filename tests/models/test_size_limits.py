"""A model's description from somebody else cannot ask for more than any machine holds, wherever it is read."""

from __future__ import annotations

import json

import pytest

from clip_train.errors import ClipTrainError, UserError
from clip_train.models.clip import parse_saved
from clip_train.models.config import load_architecture, parse_architecture, preset_names
from clip_train.models.openclip.config import parse_openclip
from tests.launcher.conftest import MODEL, RECIPE, run

HUGE = [
    ("vision_cfg", "layers", 10**9),
    ("vision_cfg", "width", 2**30),
    ("text_cfg", "layers", 10**9),
    ("text_cfg", "context_length", 2**31),
    ("text_cfg", "vocab_size", 10**12),
    ("vision_cfg", "layers", [3, 4, 10**9, 3]),
]


def changed(tower: str, key: str, value: object) -> dict:
    model = json.loads(json.dumps(MODEL))
    model[tower][key] = value
    return model


@pytest.mark.parametrize(("tower", "key", "value"), HUGE)
def test_a_size_beyond_its_limit_is_named(tower, key, value):
    model = changed(tower, key, value)
    if isinstance(value, list):
        model[tower] = {"layers": value, "width": 64, "image_size": 224}
    parse = parse_openclip if isinstance(value, list) else parse_architecture  # it builds ResNets
    for read in (lambda: parse(model, "model.json"), lambda: parse_saved(model)):
        with pytest.raises(ClipTrainError, match=f"{key} .* must be at most"):
            read()
    saved = {"open_clip": "x", **model}
    with pytest.raises(ClipTrainError, match=f"{key} .* must be at most"):
        parse_saved(saved)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("multimodal_cfg", "layers", 10**9),
        ("multimodal_cfg", "width", 2**30),
        ("vision_cfg", "attn_pooler_queries", 10**12),
    ],
)
def test_a_size_of_a_captioner_beyond_its_limit_is_named(part, key, value):
    decoder = {"context_length": 76, "width": 64, "heads": 2, "layers": 1, "dim_head": 32}
    model = {"custom_text": True, **json.loads(json.dumps(MODEL)), "multimodal_cfg": decoder}
    model["text_cfg"]["width"] = decoder["width"]  # it reads the tokens of both towers
    described = parse_openclip(model, "coca.json").model_dump(exclude_unset=True)
    assert described["multimodal_cfg"] == decoder  # nothing is added to it
    model[part][key] = value
    with pytest.raises(UserError, match=rf"{part}: .*{key} \({value}\) must be at most"):
        parse_openclip(model, "coca.json")
    with pytest.raises(ClipTrainError, match=rf"{key} \({value}\) must be at most"):
        parse_saved({"open_clip": "x", **model})


def test_sizes_that_are_too_large_together():
    model = changed("vision_cfg", "width", 65536)
    model["vision_cfg"] |= {"layers": 1000, "head_width": 64}
    for read in (parse_architecture, parse_openclip):
        with pytest.raises(
            UserError, match=r"width \(65536\) and layers \(1000\) make about .* para"
        ):
            read(model, "model.json")


def test_every_preset_is_within_them():
    for name in preset_names():
        load_architecture(name)


@pytest.mark.engine
def test_the_commands_refuse_it_at_once(tmp_path, data):
    export = tmp_path / "export"
    export.mkdir()
    (export / "open_clip_model.safetensors").write_bytes(b"")
    config = export / "open_clip_config.json"
    config.write_text(json.dumps({"model_cfg": changed("vision_cfg", "layers", 10**9)}))
    status, out = run(export, f"data.val={data.val}", verb="evaluate")
    assert status == 2 and "layers (1000000000) must be at most 1,000" in out, out
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(run_dir=tmp_path / "run", train=data.train, model=export))
    status, out = run(recipe, "--dry-run")
    assert status == 2 and "layers (1000000000) must be at most 1,000" in out, out
