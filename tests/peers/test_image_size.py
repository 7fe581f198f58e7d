"""timm's image towers for other images than they are made for: as OpenCLIP's force_image_size makes them, and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.peers.torchvision_shim  # noqa: F401  before open_clip and transformers
from clip_tools.exports import check_openclip, export_transformers
from clip_train.models.clip import build_model
from clip_train.models.config import ModelConfig, load_architecture
from clip_train.models.weights import export_openclip, initial_weights, load_openclip
from launcher.cli.main import main

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
open_clip = pytest.importorskip(
    "open_clip", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
transformers = pytest.importorskip(
    "transformers", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
TOWERS = {"siglip's": {"timm_pool": "map"}, "with a class token": {"timm_pool": "token"}}


def written(folder: Path, **vision: Any) -> str:
    """A model whose image tower is timm's tiny ViT, for 224 pixels. The name for a recipe."""
    tower = {"image_size": 224, "timm_model_name": "vit_tiny_patch16_224", "timm_proj": "none"}
    description = {
        "embed_dim": 192,
        "custom_text": True,
        "vision_cfg": {**tower, **vision},
        "text_cfg": {**TEXT, "width": 192},
    }
    file = folder / "model.json"
    file.write_text(json.dumps(description))
    return f"open_clip:{file}"


def started(config: ModelConfig, said: list[str]) -> Any:
    model = build_model(config.architecture()).double().eval()
    model.load_state_dict(dict(initial_weights(config, 0, said.append).whole()))
    return model


def features(model: Any, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(images)[0]


def theirs(peer: Any, images: torch.Tensor) -> torch.Tensor:
    mean, std = (
        torch.tensor(each, dtype=torch.float64)[:, None, None]
        for each in (peer.visual.image_mean, peer.visual.image_std)
    )
    with torch.no_grad():
        pixels = (images.double() / 255 - mean) / std
        return peer.double().eval().encode_image(pixels, normalize=True)


def pictures(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("tower", TOWERS)
def test_weights_at_another_size_are_openclips(tower: str, tmp_path: Path):
    config, said = ModelConfig(name=written(tmp_path, **TOWERS[tower])), []
    first = started(config, said)
    base = export_openclip(first.state_dict(), first.architecture, tmp_path / "base")
    peer = open_clip.create_model(f"local-dir:{base}", force_image_size=96)
    larger = ModelConfig(name=f"open_clip:{base}", init_from=str(base), image_size=96)
    model = started(larger, said)
    assert any("the image's from 14 x 14 to 6 x 6 patches" in line for line in said), said
    images = pictures(96)
    # OpenCLIP resizes positions in the precision of its weights
    torch.testing.assert_close(features(model, images), theirs(peer, images), rtol=0, atol=1e-6)

    out, warned = tmp_path / "out", []
    export_openclip(model.state_dict(), model.architecture, out)
    check_openclip(model.architecture, warned.append)
    assert "OpenCLIP 4 reads it, 3.3.0 does not" in warned[0]
    again = load_architecture(f"open_clip:{out}")
    state = load_openclip(out, again)
    assert all(torch.equal(t.float(), state[name]) for name, t in model.state_dict().items())
    if "timm_model_kwargs" in {each.name for each in dataclasses.fields(open_clip.CLIPVisionCfg)}:
        peer = open_clip.create_model(f"local-dir:{out}")
        torch.testing.assert_close(features(model, images), theirs(peer, images), rtol=0, atol=1e-6)


def test_a_size_that_timm_has_a_name_for(tmp_path: Path):
    """Is exported under that name, which every OpenCLIP reads."""
    config, warned = ModelConfig(name=written(tmp_path, timm_pool="token"), image_size=384), []
    model = started(config, [])
    out = export_openclip(model.state_dict(), model.architecture, tmp_path / "out")
    check_openclip(model.architecture, warned.append)
    vision = json.loads((out / "open_clip_config.json").read_text())["model_cfg"]["vision_cfg"]
    assert vision["timm_model_name"] == "vit_tiny_patch16_384" and not warned
    images = pictures(384)
    peer = open_clip.create_model(f"local-dir:{out}")
    torch.testing.assert_close(features(model, images), theirs(peer, images), rtol=0, atol=1e-12)


def test_siglip_of_transformers_at_another_size(tmp_path: Path):
    from tests.peers.siglip import save_siglip

    save_siglip(tmp_path / "theirs")
    said: list[str] = []
    model = started(ModelConfig(init_from=str(tmp_path / "theirs"), image_size=64), said)
    assert any("the image's from" in line for line in said), said
    out = export_transformers(model.state_dict(), model.architecture, tmp_path / "out")
    peer = transformers.SiglipModel.from_pretrained(out).double().eval()
    assert peer.config.vision_config.image_size == 64
    processor = transformers.AutoProcessor.from_pretrained(out)
    assert processor.image_processor.size == {"height": 64, "width": 64}
    images = pictures(64)
    with torch.no_grad():
        found = peer.vision_model(pixel_values=(images.double() / 255 - 0.5) / 0.5).pooler_output
    found = torch.nn.functional.normalize(found, dim=-1)
    # exports are float32, and these weights are not
    torch.testing.assert_close(features(model, images), found, rtol=0, atol=1e-6)


def test_a_resnet_at_another_size(tmp_path: Path):
    """OpenCLIP cannot do this: the grid of its attention pool is interpolated like a ViT's."""
    resnet = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 32}
    description = {"embed_dim": 32, "vision_cfg": resnet, "text_cfg": TEXT}
    (tmp_path / "model.json").write_text(json.dumps(description))
    name, said = f"open_clip:{tmp_path}/model.json", []
    first = started(ModelConfig(name=name), said)
    base = export_openclip(first.state_dict(), first.architecture, tmp_path / "base")
    model = started(ModelConfig(name=name, init_from=str(base), image_size=96), said)
    assert any("the image's from 2 x 2 to 3 x 3 patches" in line for line in said), said
    assert features(model, pictures(96)).shape == (3, 32)


def test_a_size_that_no_tower_takes_is_a_mistake_of_the_recipe(tmp_path: Path, capsys):
    """An image smaller than a patch."""
    assert main(["plan", str(recipe(tmp_path)), "model.image_size=8"]) == 2
    assert "model.image_size is 8" in capsys.readouterr().err


def test_the_plan_of_a_tower_with_stochastic_depth(tmp_path: Path):
    assert main(["plan", str(recipe(tmp_path, timm_drop_path=0.1)), "model.image_size=64"]) == 0


def recipe(folder: Path, **vision: Any) -> Path:
    file = folder / "recipe.yaml"
    keys = {
        "run": {"name": "x", "steps": 10},
        "model": {"name": written(folder, timm_pool="map", **vision)},
        "data": {"kind": "synthetic"},
        "batch": {"global_size": 8},
        "schedule": {"warmup_steps": 1},
    }
    file.write_text(json.dumps(keys))
    return file
