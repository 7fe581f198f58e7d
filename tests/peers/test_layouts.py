"""Files of weights as OpenCLIP, transformers and timm write them. Made by hand: tests/models/test_layouts.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train.errors import UserError
from clip_train.models.clip import CLIP, build_model
from clip_train.models.config import AnyArchitecture, load_architecture
from clip_train.models.hub import HubPlace, resolve
from clip_train.models.weights import load_openclip

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
REASON = "PEER MISSING: scripts/setup_peers.sh"
open_clip = pytest.importorskip("open_clip", reason=REASON, exc_type=ImportError)
transformers = pytest.importorskip("transformers", reason=REASON)
timm = pytest.importorskip("timm", reason=REASON)

VISION = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8}
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
SMALL = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": TEXT}
TIMM = {"image_size": 160, "timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none"}
SIGLIP = {
    "embed_dim": 64,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": TIMM,
    "text_cfg": {**TEXT, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"},
}


def architecture(content: dict[str, Any], folder: Path, prefix: str = "") -> AnyArchitecture:
    (folder / "model.json").write_text(json.dumps(content))
    return load_architecture(f"{prefix}{folder / 'model.json'}")


def perturbed(model: Any) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model.eval()


def inputs(side: int) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 images, the same normalised, texts"""
    torch.manual_seed(2)
    images = torch.randint(0, 256, (3, 3, side, side), dtype=torch.uint8)
    mean, std = (
        torch.tensor(v).view(3, 1, 1)
        for v in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
    )
    texts = torch.randint(1, 49000, (3, 16))
    texts[:, -2], texts[:, -1] = 49407, 0
    return images, (images / 255 - mean) / std, texts


def loaded(place: Path, of: AnyArchitecture, log: Any = print) -> nn.Module:
    model = build_model(of).eval()
    model.load_state_dict(load_openclip(place, of, log))
    return model


@torch.no_grad()
def compare(ours: nn.Module, image: Any, text: Any, tolerance: float = 1e-5) -> None:
    """image, text: the peer's functions of normalised images and of texts."""
    side = ours.architecture.vision_cfg.image_size
    images, pixels, texts = inputs(side)
    found = ours(images, texts)[:2]
    expected = [nn.functional.normalize(x, dim=-1) for x in (image(pixels), text(texts))]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("file_has_tower", [False, True])
def test_a_text_tower_moves_to_where_the_model_has_it(file_has_tower: bool, tmp_path: Path):
    """OpenCLIP's CLIP into a CustomTextCLIP, as its own loader does, and back."""
    kind = open_clip.model.CustomTextCLIP if file_has_tower else open_clip.model.CLIP
    peer = perturbed(kind(**SMALL))
    torch.save(peer.state_dict(), tmp_path / "weights.pt")
    content = {**SMALL, "custom_text": not file_has_tower}
    of = architecture(content, tmp_path, "" if file_has_tower else "open_clip:")
    lines: list[str] = []
    ours = loaded(tmp_path / "weights.pt", of, lines.append)
    assert len(lines) == 1 and "moved the text tower" in lines[0]
    compare(ours, peer.encode_image, peer.encode_text)


@pytest.mark.parametrize("bias", [None, -10.0])
def test_a_bias_is_repaired_as_openclips_own_loader_does(bias: float | None, tmp_path: Path):
    peer = perturbed(open_clip.model.CLIP(**SMALL))
    torch.save({"state_dict": peer.state_dict()}, tmp_path / "epoch_1.pt")
    theirs = open_clip.model.CLIP(**SMALL, init_logit_bias=bias)
    open_clip.factory.load_checkpoint(theirs, str(tmp_path / "epoch_1.pt"))
    of = architecture({**SMALL, "init_logit_bias": bias}, tmp_path)
    state = load_openclip(tmp_path / "epoch_1.pt", of)
    expected = theirs.state_dict()
    assert set(state) == set(expected)
    assert all(torch.equal(state[name].flatten(), expected[name].flatten()) for name in expected)


def test_openais_state_dict_has_openclips_features(tmp_path: Path):
    peer = perturbed(open_clip.model.CLIP(**SMALL, quick_gelu=True))
    sizes = {"input_resolution": 32, "context_length": 16, "vocab_size": 49408}
    buffers = {name: torch.tensor(size) for name, size in sizes.items()}
    torch.save({**peer.state_dict(), **buffers}, tmp_path / "openai.pt")
    ours = loaded(tmp_path / "openai.pt", architecture({**SMALL, "quick_gelu": True}, tmp_path))
    compare(ours, peer.encode_image, peer.encode_text)


def clip_of_transformers() -> Any:
    tower = {"num_hidden_layers": 2, "hidden_act": "gelu", "projection_dim": 24}
    text = {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "eos_token_id": 49407,
    }
    vision = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 2}
    text |= {"vocab_size": 49408, "max_position_embeddings": 16, **tower}
    vision |= {"image_size": 32, "patch_size": 8, **tower}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
    return perturbed(transformers.CLIPModel(config))


def test_a_model_of_transformers_has_its_features(tmp_path: Path):
    peer = clip_of_transformers()
    peer.save_pretrained(tmp_path / "clip")
    of = architecture(SMALL, tmp_path)
    ours = loaded(tmp_path / "clip", of)
    compare(
        ours,
        lambda pixels: peer.get_image_features(pixel_values=pixels),
        lambda texts: peer.get_text_features(input_ids=texts),
    )
    # older releases saved the numbers of the positions, and pickled tensors
    for module in (peer.text_model.embeddings, peer.vision_model.embeddings):
        module.register_buffer("position_ids", module.position_ids, persistent=True)
    torch.save(peer.state_dict(), tmp_path / "clip" / "pytorch_model.bin")
    (tmp_path / "clip" / "model.safetensors").unlink()
    again = load_openclip(tmp_path / "clip", of)
    assert all(torch.equal(again[name], t) for name, t in ours.state_dict().items())
    # into OpenCLIP's own modules too
    custom = architecture({**SMALL, "custom_text": True}, tmp_path, "open_clip:")
    compare(
        loaded(tmp_path / "clip", custom),
        lambda pixels: peer.get_image_features(pixel_values=pixels),
        lambda texts: peer.get_text_features(input_ids=texts),
    )


def test_one_tower_of_transformers(tmp_path: Path):
    whole = clip_of_transformers()
    tower = transformers.CLIPVisionModelWithProjection(whole.config.vision_config)
    tower.load_state_dict(
        {n: t for n, t in whole.state_dict().items() if n.startswith(("vision_", "visual_"))}
    )
    tower.save_pretrained(tmp_path / "vision")
    of = architecture(SMALL, tmp_path)
    state = load_openclip(tmp_path / "vision" / "model.safetensors", of, tower="image")
    model = CLIP(of)
    model.load_state_dict(state, strict=False)
    images, pixels, _ = inputs(32)
    with torch.no_grad():
        expected = tower.eval()(pixel_values=pixels).image_embeds
        torch.testing.assert_close(
            model.eval()(images)[0], nn.functional.normalize(expected, dim=-1), rtol=0, atol=1e-5
        )


def test_transformers_siglip_is_named_and_not_loaded(tmp_path: Path):
    tower = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {**tower, "vocab_size": 1000, "max_position_embeddings": 16, "projection_size": 64}
    vision = {**tower, "image_size": 32, "patch_size": 8}
    config = transformers.SiglipConfig(text_config=text, vision_config=vision)
    transformers.SiglipModel(config).save_pretrained(tmp_path / "siglip")
    of = architecture(SIGLIP, tmp_path, "open_clip:")
    with pytest.raises(UserError, match=r"\(transformers' SigLIP layout\) does not fit"):
        load_openclip(tmp_path / "siglip", of)


def test_a_tower_of_timm_goes_where_openclip_has_one(tmp_path: Path):
    trunk = perturbed(timm.create_model("test_vit", num_classes=0, global_pool="map", img_size=160))
    torch.save(trunk.state_dict(), tmp_path / "timm.pt")
    of = architecture(SIGLIP, tmp_path, "open_clip:")
    state = load_openclip(tmp_path / "timm.pt", of, tower="image")
    assert {name.removeprefix("visual.trunk.") for name in state} == set(trunk.state_dict())
    with pytest.raises(
        UserError, match=r"the image tower of .*\(timm's layout of an image tower\)"
    ):
        load_openclip(tmp_path / "timm.pt", architecture(SMALL, tmp_path), tower="image")


def test_siglip_weights_and_a_loss_without_a_bias(tmp_path: Path):
    of = architecture(SIGLIP, tmp_path, "open_clip:")
    peer = perturbed(build_model(of))
    torch.save(peer.state_dict(), tmp_path / "siglip.pt")
    without = architecture({**SIGLIP, "init_logit_bias": None}, tmp_path, "open_clip:")
    lines: list[str] = []
    ours = loaded(tmp_path / "siglip.pt", without, lines.append)
    assert len(lines) == 1 and "dropped logit_bias" in lines[0]
    images, _, texts = inputs(160)
    with torch.no_grad():
        for a, b in zip(ours(images, texts)[:2], peer(images, texts)[:2], strict=True):
            assert torch.equal(a, b)


def test_every_tag_of_openclip_is_known_where_it_is_installed():
    for model, tag in open_clip.list_pretrained():
        config = open_clip.get_pretrained_cfg(model, tag)
        found = resolve(f"open_clip:{model}/{tag}")
        assert found == HubPlace.of(config["hf_hub"].rstrip("/"))
    version = re.escape(f"nor of the installed {open_clip.__version__}. ")
    with pytest.raises(UserError, match=rf"{version}ViT-B-16-SigLIP has the tags webli\."):
        resolve("open_clip:ViT-B-16-SigLIP/laion2b")


def test_checkpoints_of_version_4(tmp_path: Path):
    """Its single file loads. Its sharded folder is refused with a command, whose file loads."""
    task_module = pytest.importorskip("open_clip.task", reason="OpenCLIP 3.3 saves no shards")
    peer = perturbed(open_clip.model.CLIP(**SMALL))
    optimizer = torch.optim.AdamW(peer.parameters())
    task = open_clip.CLIPTask(peer, default_loss=False)
    saved = task_module.save_checkpoint(task, optimizer, epoch=1, global_step=3)
    torch.save(saved, tmp_path / "epoch_1.pt")
    folder = tmp_path / "epoch_1"
    task_module.save_sharded_checkpoint(task, optimizer, str(folder), epoch=1, global_step=3)
    of = architecture(SMALL, tmp_path)
    with pytest.raises(UserError, match=r"sharded checkpoint of torch.distributed") as refused:
        load_openclip(folder, of)
    assert f"format_utils dcp_to_torch {folder} weights.pt" in str(refused.value)
    dcp_to_torch_save(folder, tmp_path / "weights.pt")  # what the command does
    for file in ("epoch_1.pt", "weights.pt"):
        compare(loaded(tmp_path / file, of), peer.encode_image, peer.encode_text)
