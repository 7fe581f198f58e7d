"""SigLIP 2 NaFlex from transformers to here and back: features, patches and ids, on random weights."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import tests.peers.torchvision_shim  # noqa: F401  before transformers
from clip_tools.exports import export_transformers
from clip_train.data.images import for_evaluation
from clip_train.data.pixels import decode_image
from clip_train.errors import UserError
from clip_train.models.clip import build_model
from clip_train.models.config import ModelConfig, load_architecture
from clip_train.models.weights import export_openclip, load_openclip, resize_of
from clip_train.native import grids_of, to_rows
from clip_train.recipe.recipe import load_config
from clip_train.recipe.tokenizer import tokenizer_of
from clip_train.resizing import Patches
from tests.peers.siglip import save_siglip2
from tests.peers.test_siglip import TEXTS, command, ours, started

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
transformers = pytest.importorskip(
    "transformers", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
open_clip = pytest.importorskip(
    "open_clip", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
SHAPES = [(90, 40), (32, 32), (31, 200), (300, 301), (9, 8), (1, 400), (41, 33)]
GRIDS = [(4, 4), (2, 7), (5, 3), (1, 20), (1, 1), (10, 2)]


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    small = [rng.integers(0, 256, (5, 7, 3), dtype=np.uint8) for _ in SHAPES]
    return [Image.fromarray(a).resize(s) for a, s in zip(small, SHAPES, strict=True)]


def theirs_of(rows: Tensor, patch_size: int) -> dict[str, Tensor]:
    """uint8 [b, 1 + T, 3 p p], as the loader makes them -> the inputs of Siglip2Model, in float64."""
    grids = grids_of(rows)
    b, most = len(rows), rows.shape[1] - 1
    pixels = torch.zeros(b, most, 3 * patch_size**2, dtype=torch.float64)
    mask = torch.zeros(b, most, dtype=torch.int64)
    for i, count in enumerate(grids.prod(1).tolist()):
        patches = rows[i, 1 : 1 + count].view(count, 3, patch_size, patch_size)
        pixels[i, :count] = (patches.permute(0, 2, 3, 1).flatten(1).double() / 255 - 0.5) / 0.5
        mask[i, :count] = 1
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": grids}


def test_an_image_has_the_size_that_transformers_gives_it():
    from transformers.models.siglip2.image_processing_siglip2 import (
        get_image_size_for_max_num_patches,
    )

    rng = random.Random(0)
    for _ in range(4000):
        size = rng.choice([8, 14, 16, 32])
        budget = rng.choice([1, 7, 64, 128, 256, 576, 1024])
        # all magnitudes, and shapes from a line to a square
        height, width = (round(2 ** rng.uniform(0, 13)) for _ in range(2))
        if rng.random() < 0.3:
            width = height
        expected = get_image_size_for_max_num_patches(height, width, size, budget)
        found = Patches(size, budget).size_within(height, width, budget)
        assert found == expected, (height, width, size, budget)


@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "gelu"])
def test_naflex_comes_in_and_goes_out_exactly(tmp_path: Path, act: str):
    theirs = save_siglip2(tmp_path / "theirs", hidden_act=act)
    model = started(tmp_path / "theirs")
    architecture = model.architecture
    assert architecture.patches == Patches(8, 20)
    ids = tokenizer_of(architecture)(TEXTS)
    g = torch.Generator().manual_seed(3)
    sizes = [(3, 8 * rows, 8 * columns) for rows, columns in GRIDS]
    images = [torch.randint(0, 256, size, dtype=torch.uint8, generator=g) for size in sizes]
    rows = torch.stack([to_rows(image, 8, 20) for image in images])
    with torch.no_grad():
        out = theirs(**theirs_of(rows, 8), input_ids=ids)
    image, text, logits = ours(model, rows, ids)
    torch.testing.assert_close(text, out.text_embeds, rtol=0, atol=1e-12)
    # a grid as large as the table has its positions; all others are resized by transformers in fp32
    torch.testing.assert_close(image[0], out.image_embeds[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(image, out.image_embeds, rtol=0, atol=1e-7)
    torch.testing.assert_close(logits, out.logits_per_image, rtol=0, atol=1e-6)

    folder = export_transformers(model.state_dict(), architecture, tmp_path / "out")
    again, info = transformers.Siglip2Model.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    for name, tensor in again.state_dict().items():  # exports are float32
        assert torch.equal(tensor, theirs.state_dict()[name].float()), name
    assert again.config.vision_config.hidden_act == act
    assert again.config.vision_config.num_patches == 16
    twice = started(folder)
    assert twice.architecture.resize == architecture.resize
    for name, tensor in twice.state_dict().items():
        assert torch.equal(tensor.float(), model.state_dict()[name].float()), name


def test_patches_and_ids_are_those_of_the_processor(tmp_path: Path):
    save_siglip2(tmp_path / "theirs")
    model = started(tmp_path / "theirs")
    architecture = model.architecture
    folder = export_transformers(model.state_dict(), architecture, tmp_path / "out")
    for place in (tmp_path / "theirs", folder):
        images = transformers.AutoImageProcessor.from_pretrained(place, use_fast=False)
        found = images(pictures(), return_tensors="pt")
        rows = torch.stack(
            [
                for_evaluation(decode_image(x), 32, architecture.resize, architecture.patches)
                for x in pictures()
            ]
        )
        expected = theirs_of(rows, 8)
        assert torch.equal(found["spatial_shapes"], expected["spatial_shapes"])
        assert torch.equal(found["pixel_attention_mask"].long(), expected["pixel_attention_mask"])
        real = expected["pixel_attention_mask"].bool()
        apart = (found["pixel_values"].double() - expected["pixel_values"])[real].abs() / 2 * 255
        assert apart.max() <= 2.001
        both = transformers.AutoProcessor.from_pretrained(place)
        # 64 tokens by default, whatever the model's length
        ids = both(text=TEXTS, max_length=16, return_tensors="pt")["input_ids"]
        assert torch.equal(ids, tokenizer_of(architecture)(TEXTS))


@pytest.mark.parametrize(("width", "heads", "hidden"), [(768, 12, 3072), (1152, 16, 4304)])
def test_the_layouts_on_the_hub_are_those_of_timm(tmp_path: Path, width, heads, hidden):
    """Sizes of google/siglip2-base-patch16-naflex and so400m, with two blocks: each has its name in
    timm, and every parameter has its place."""
    theirs = save_siglip2(
        tmp_path, side=16, most=256, hidden_size=width, intermediate_size=hidden,
        num_attention_heads=heads, patch_size=16, text={"hidden_size": width, "projection_size": width},
    )  # fmt: skip
    model = started(tmp_path)
    architecture = model.architecture
    base = {768: "base", 1152: "so400m"}[width]
    name = architecture.vision_cfg.model_dump()["timm_model_name"]
    assert name == f"naflexvit_{base}_patch16_siglip"
    assert architecture.patches == Patches(16, 256) and architecture.vision_cfg.image_size == 256
    image = torch.randint(0, 256, (3, 16 * 12, 16 * 20), dtype=torch.uint8)
    rows = to_rows(image, 16, 256)[None]
    with torch.no_grad():
        expected = theirs.vision_model(
            **{
                {"pixel_attention_mask": "attention_mask"}.get(key, key): value
                for key, value in theirs_of(rows, 16).items()
            }
        ).pooler_output
        found = model(rows)[0]
    expected = torch.nn.functional.normalize(expected, dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


def recipe_of(folder: Path, **data: Any) -> Any:
    path = folder / "recipe.yaml"
    keys = {"kind": "synthetic", **data}
    content = {"run": {"steps": 3000}, "model": {"init_from": str(folder)}, "data": keys}
    path.write_text(json.dumps(content))
    return load_config(str(path), [])


def test_the_processor_says_how_images_are_resized(tmp_path: Path):
    save_siglip2(tmp_path)
    config = ModelConfig(init_from=str(tmp_path))
    resize = {"interpolation": "bilinear", "resize_mode": "native", "image_tokens": 20}
    assert resize_of(config) == resize
    for trained in ({}, resize):  # before and after the weights are there
        assert recipe_of(tmp_path).architecture(trained=trained).patches == Patches(8, 20)
    other = recipe_of(tmp_path, resize="native", tokens={9: 1, 12: 2}).architecture(trained=resize)
    assert other.patches == Patches(8, 12)
    square = recipe_of(tmp_path, resize="squash").architecture(trained=resize)
    assert square.patches is None and square.resize_mode == "squash"
    with pytest.raises(UserError, match=r"keeps the aspect ratio.*data.resize is squash"):
        export_transformers({}, square, tmp_path / "out")


def test_an_export_keeps_native_resolution(tmp_path: Path):
    save_siglip2(tmp_path / "theirs")
    model = started(tmp_path / "theirs")
    folder = export_openclip(model.state_dict(), model.architecture, tmp_path / "export")
    again = load_architecture(f"open_clip:{folder}")
    assert again.patches == Patches(8, 20)
    name = {"open_clip": model.architecture.open_clip, "resize_mode": "native"}
    assert again.model_copy(update=name) == model.architecture
    state = load_openclip(folder, again)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.float(), state[name].float().view(tensor.shape)), name


@torch.no_grad()
def test_openclip_reads_an_export_and_computes_the_same(tmp_path: Path):
    """The tower with the sizes of timm's name, beside a small text tower."""
    text = {"context_length": 16, "vocab_size": 120, "width": 32, "heads": 2, "layers": 1}
    config = {
        "embed_dim": 768,
        "custom_text": True,
        "init_logit_bias": -10,
        "vision_cfg": {
            "image_size": 256, "timm_model_name": "naflexvit_base_patch16_siglip",
            "timm_pool": "map", "timm_proj": "none",
        },
        "text_cfg": {**text, "no_causal_mask": True, "pool_type": "last"},
    }  # fmt: skip
    preprocess = {"mean": [0.5] * 3, "std": [0.5] * 3, "image_tokens": 64}
    content = {"model_cfg": config, "preprocess_cfg": preprocess}
    (tmp_path / "model.json").write_text(json.dumps(content))
    torch.manual_seed(0)
    model = build_model(load_architecture(f"open_clip:{tmp_path / 'model.json'}")).eval()
    folder = export_openclip(model.state_dict(), model.architecture, tmp_path / "export")
    peer = open_clip.create_model(f"local-dir:{folder}").eval()
    image = torch.randint(0, 256, (3, 16 * 5, 16 * 12), dtype=torch.uint8)
    rows = to_rows(image, 16, 64)[None]
    theirs = theirs_of(rows, 16)
    places = torch.cartesian_prod(torch.arange(5), torch.arange(12))
    inputs = {
        "patches": theirs["pixel_values"].float(),
        "patch_coord": torch.cat([places, torch.zeros(4, 2, dtype=torch.int64)])[None],
        "patch_valid": theirs["pixel_attention_mask"].bool(),
    }
    found = peer.encode_image(inputs, normalize=True)
    torch.testing.assert_close(found, model(rows)[0], rtol=0, atol=1e-5)


def write_mixed(folder: Path) -> str:
    """A shard with images of several shapes."""
    from tests.data.shards import write_shard

    folder.mkdir()
    members = []
    for i in range(48):
        buffer = io.BytesIO()
        pictures()[i % len(SHAPES)].save(buffer, "PNG")
        members += [(f"{i:03d}.png", buffer.getvalue()), (f"{i:03d}.txt", f"photo {i}".encode())]
    return str(write_shard(folder / "000.tar", members))


def test_the_recipe_of_siglip_2_trains_at_native_resolution(tmp_path: Path):
    theirs = save_siglip2(tmp_path / "theirs").float()
    theirs.save_pretrained(tmp_path / "theirs")  # as the hub's, in float32
    train = write_mixed(tmp_path / "data")
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "siglip2_finetune.yaml"
    line = (
        f"model.init_from={tmp_path / 'theirs'}", f"data.train={train}", f"data.val={train}",
        "run.steps=2", "schedule.warmup_steps=0", "batch.global_size=16", "batch.micro_tokens=64",
        "evaluate.every_steps=2", "engine.kind=fsdp", "engine.precision=fp32", "data.workers=0",
        "log.tensorboard=false", f"run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    status, out = command("train", str(recipe), *line)
    assert status == 0, out
    metrics = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(12 < each["image_tokens"] <= 20 for each in metrics)
    folder = tmp_path / "export"
    status, out = command(
        "export", str(recipe), *line, "--format", "transformers", "--output", str(folder)
    )
    assert status == 0 and "transformers.Siglip2Model.from_pretrained" in out, out
    peer, info = transformers.Siglip2Model.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    for part in ("vision_model.", "text_model."):
        assert any(
            key.startswith(part) and not torch.equal(t, theirs.state_dict()[key])
            for key, t in peer.state_dict().items()
        )
    from clip_tools.embed import load

    here = load(str(folder))
    processor = transformers.AutoImageProcessor.from_pretrained(folder, use_fast=False)
    with torch.no_grad():
        found = peer.eval().get_image_features(**processor(pictures(), return_tensors="pt"))
    found = torch.nn.functional.normalize(found, dim=1)
    # of the image of one column, torch resizes the positions wrongly on a CPU (test_native_images)
    same = [i for i, (width, _) in enumerate(SHAPES) if width > 1]
    torch.testing.assert_close(here.images(pictures())[same], found[same], rtol=0, atol=5e-3)
