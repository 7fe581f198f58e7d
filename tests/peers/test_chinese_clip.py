"""transformers' ChineseCLIPModel comes in and goes out: features, pixels, ids, on random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.peers.torchvision_shim  # noqa: F401  before transformers
from clip_tools.exports import check_openclip, export_transformers
from clip_train.data.images import to_square
from clip_train.data.pixels import decode_image
from clip_train.errors import UserError
from clip_train.models.clip import random_mistakes
from clip_train.models.config import ModelConfig, load_architecture
from clip_train.models.weights import export_openclip, load_openclip
from clip_train.recipe.tokenizer import tokenizer_of
from tests.peers.test_siglip import EXACT, command, ours, pictures, started

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
transformers = pytest.importorskip(
    "transformers", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
pytest.importorskip(
    "open_clip", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
TEXTS = ["一只猫的照片", "两只狗", "红", "猫" * 80, "a 猫, 红!", ""]
CHARACTERS = "一只猫的照片两狗红蓝a!,"


def save(folder: Path, **text: Any) -> Any:
    """A folder as transformers saves it, in float64; a tokenizer of single characters, as BERT's for
    Chinese. Returns the model."""
    folder.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *CHARACTERS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=60).save_pretrained(
        folder
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    text = {"vocab_size": len(vocabulary), "max_position_embeddings": 60, **none, **text}
    config = transformers.ChineseCLIPConfig(
        text_config={**sizes, "intermediate_size": 75, **text},
        vision_config={**sizes, "intermediate_size": 75, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    torch.manual_seed(0)
    model = transformers.ChineseCLIPModel(config).double().eval()
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    square = {"height": 32, "width": 32}
    transformers.ChineseCLIPImageProcessor(size=square, crop_size=square).save_pretrained(folder)
    return model


def test_chinese_clip_comes_in_and_goes_out_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    theirs = save(tmp_path / "theirs")
    model = started(tmp_path / "theirs")
    architecture = model.architecture
    assert architecture.text_cfg.context_length == 52
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    mean, std = (
        torch.tensor(getattr(architecture, f"image_{x}"), dtype=torch.float64)
        for x in ("mean", "std")
    )
    pixels = (images.double() / 255 - mean[:, None, None]) / std[:, None, None]
    ids = tokenizer_of(architecture)(TEXTS)
    assert ids.shape == (6, 52)
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "theirs")
    options = {"truncation": True, "max_length": 52, "return_tensors": "pt"}
    both = processor(text=TEXTS, images=pictures(), padding="max_length", **options)
    assert torch.equal(both["input_ids"], ids)
    with monkeypatch.context() as patch, torch.no_grad():
        # its own is in float32, whatever the model is in
        patch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: x.softmax(dim))
        # the mask is the tokenizer's; OpenCLIP's tower makes the same one
        out = theirs(input_ids=ids, pixel_values=pixels, attention_mask=both["attention_mask"])
        short = theirs.get_text_features(ids[2:3, :3])  # without its padding
    expected = [out.image_embeds, out.text_embeds, out.logits_per_image]
    for mine, other in zip(ours(model, pixels, ids), expected, strict=True):
        torch.testing.assert_close(mine, other, **EXACT)
    torch.testing.assert_close(short / short.norm(), out.text_embeds[2:3], **EXACT)
    for picture, found in zip(pictures(), both["pixel_values"], strict=True):
        square = to_square(decode_image(picture), 32, architecture.resize)
        levels = (found.double() * std[:, None, None] + mean[:, None, None]) * 255
        assert abs(levels - square).max() <= 2.001
    out = export_transformers(model.state_dict(), architecture, tmp_path / "out")
    again, info = transformers.ChineseCLIPModel.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    for name, tensor in again.state_dict().items():  # exports are float32
        assert torch.equal(tensor, theirs.state_dict()[name].to(tensor.dtype)), name
    back = transformers.AutoProcessor.from_pretrained(out)
    repeated = back(text=TEXTS, images=pictures(), padding="max_length", **options)
    assert all(torch.equal(repeated[key], both[key]) for key in ("input_ids", "pixel_values"))
    twice = started(out)
    for name, tensor in twice.state_dict().items():
        assert torch.equal(tensor.float(), model.state_dict()[name].float()), name


def test_what_this_project_saves_of_it_is_read_again(tmp_path: Path):
    """A checkpoint or an average; OpenCLIP itself has no such text tower."""
    save(tmp_path / "theirs")
    model = started(tmp_path / "theirs")
    folder = export_openclip(model.state_dict(), model.architecture, tmp_path / "export")
    again = load_architecture(f"open_clip:{folder}")
    assert again.text_cfg == model.architecture.text_cfg
    state = load_openclip(folder, again)
    assert all(torch.equal(t.float(), state[n].float()) for n, t in model.state_dict().items())
    with pytest.raises(UserError, match=r"no text tower like that of .*--format transformers"):
        check_openclip(model.architecture, print)


def test_what_cannot_be_trained_is_refused(tmp_path: Path):
    """The published models have a dropout of 0.1, of attention too."""
    save(tmp_path / "theirs", attention_probs_dropout_prob=0.1, hidden_dropout_prob=0.1)
    (mistake,) = random_mistakes(load_architecture(str(tmp_path / "theirs")))
    assert "its text_config has attention_probs_dropout_prob (0.1)" in mistake
    assert "set attention_probs_dropout_prob to 0 in the text_config of config.json" in mistake
    file = tmp_path / "theirs" / "config.json"
    content = json.loads(file.read_text())
    content["text_config"]["attention_probs_dropout_prob"] = 0.0
    file.write_text(json.dumps(content))
    assert random_mistakes(load_architecture(str(tmp_path / "theirs"))) == []
    config = {"init_from": str(tmp_path / "theirs"), "context_length": 61}
    with pytest.raises(UserError, match=r"model.context_length \(61\) must be at most 60"):
        ModelConfig(**config).architecture()
    with pytest.raises(UserError, match=r"model.keep_positions \(20\): the positions of"):
        ModelConfig(**{**config, "context_length": 60, "keep_positions": 20}).architecture()


def test_chinese_clip_trains_and_exports(tmp_path: Path):
    from tests.data.shards import write_dataset

    theirs = save(tmp_path / "theirs", hidden_dropout_prob=0.1).float()
    theirs.save_pretrained(tmp_path / "theirs")
    train = write_dataset(tmp_path / "data", [40, 24])
    (tmp_path / "recipe.yaml").write_text("run: {name: chinese, steps: 2}\n")
    line = (
        str(tmp_path / "recipe.yaml"), f"model.init_from={tmp_path / 'theirs'}",
        f"data.train={train}", f"data.val={train}", "batch.global_size=16", "batch.micro_size=8",
        "engine.kind=fsdp", "engine.precision=fp32", "data.workers=0", "log.tensorboard=false",
        "schedule.warmup_steps=0", f"run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    status, out = command("train", *line)
    assert status == 0 and "squash" in out, out
    folder = tmp_path / "export"
    status, out = command("export", *line, "--format", "transformers", "--output", str(folder))
    assert status == 0 and "transformers.ChineseCLIPModel.from_pretrained" in out, out
    peer, info = transformers.ChineseCLIPModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    before = theirs.state_dict()
    changed = {name for name, t in peer.state_dict().items() if not torch.equal(t, before[name])}
    assert any(name.startswith("text_model.encoder.") for name in changed)
    assert any(name.startswith("vision_model.") for name in changed)
