"""Models that cannot read the tokens they get end with an error that names the size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clip_train.errors import UserError
from clip_train.models.config import load_architecture
from clip_train.models.openclip.config import parse_openclip
from launcher.cli.main import main
from tests.data.shards import sample, write_shard

KEYS = ("batch.global_size=4", "run.steps=1", "schedule.warmup_steps=0", "data.workers=0")


def described(folder: Path, size: int) -> Path:
    content = load_architecture("tiny").model_cfg()
    content["text_cfg"]["vocab_size"] = size
    file = folder / f"model-{size}.json"
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize("verb", ["train", "plan"])
@pytest.mark.parametrize("size", [100, 49_407])
def test_too_few_tokens_for_the_tokenizer(tmp_path, capsys, size, verb):
    members = [member for i in range(8) for member in sample(str(i), i)]
    write_shard(tmp_path / "0.tar", members)
    (tmp_path / "my.yaml").write_text("run: {name: x}\n")
    file = described(tmp_path, size)
    arguments = [f"model.name={file}", f"data.train={tmp_path}/0.tar", *KEYS]
    dry = ["--dry-run"] if verb == "train" else []
    status = main([verb, str(tmp_path / "my.yaml"), *arguments, *dry])
    said = capsys.readouterr().err
    assert status == 2
    assert f"text_cfg.vocab_size ({size}) must be at least 49408" in said
    assert "Traceback" not in said


COCA = {
    "embed_dim": 32,
    "vision_cfg": {"width": 32, "attentional_pool": True, "output_tokens": True},
    "text_cfg": {"width": 32, "embed_cls": True, "output_tokens": True},
    "multimodal_cfg": {"width": 32, "layers": 1, "heads": 2},
}


def test_the_towers_of_a_coca_are_as_wide_as_its_decoder():
    assert parse_openclip(COCA, "coca.json").embed_dim == 32
    without_pool = {**COCA, "embed_dim": 48, "vision_cfg": {"width": 32, "output_tokens": True}}
    assert parse_openclip(without_pool, "coca.json").embed_dim == 48
    by_hf = {**COCA, "text_cfg": {"hf_model_name": "roberta-base", "width": 99}}
    assert parse_openclip(by_hf, "coca.json").embed_dim == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 48}, r"embed_dim \(48\) must equal multimodal_cfg.width \(32\)"),
        ({"text_cfg": {}}, r"text_cfg.width \(512\) must equal multimodal_cfg.width \(32\)"),
        ({"vision_cfg": {"width": 64}}, r"vision_cfg.width \(64\) must equal"),
        ({"multimodal_cfg": {}}, r"embed_dim \(32\) must equal multimodal_cfg.width \(512\)"),
    ],
)
def test_a_coca_whose_parts_do_not_fit(changes, message):
    with pytest.raises(UserError, match=rf"model.name \(coca.json\): Value error, {message}"):
        parse_openclip({**COCA, **changes}, "coca.json")
