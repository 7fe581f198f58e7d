"""Equality with OpenCLIP itself, in the environment that `scripts/setup_peers.sh` builds."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train.models.clip import CLIP, build_model
from clip_train.models.config import ModelConfig, load_architecture, preset_names
from clip_train.models.freeze import frozen_names
from clip_train.models.openclip.config import parse_openclip
from clip_train.models.weights import export_openclip, load_openclip

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("default"),  # the peers' warnings are not ours
]
open_clip = pytest.importorskip(
    "open_clip",
    reason="PEER MISSING: nothing here was compared with OpenCLIP. Run scripts/setup_peers.sh, then "
    ".venv-peers/bin/python -m pytest -m peer",
    exc_type=ImportError,
)


def _small(**changes: Any) -> dict[str, Any]:
    return {
        "embed_dim": 32,
        "vision_cfg": {
            "image_size": 32,
            "layers": 3,
            "width": 64,
            "head_width": 16,
            "mlp_ratio": 3.7,
            "patch_size": 8,
        },
        "text_cfg": {
            "context_length": 16,
            "vocab_size": 49408,
            "width": 48,
            "heads": 4,
            "layers": 2,
        },
        **changes,
    }


VARIANTS = {"plain": {}, "quick_gelu": {"quick_gelu": True}, "bias": {"init_logit_bias": -10.0}}


def _architecture(content: dict[str, Any], tmp_path: Path):
    (tmp_path / "model.json").write_text(json.dumps(content))
    return load_architecture(str(tmp_path / "model.json"))


def _inputs(size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pixels; texts that end at 49407 and are padded with 0."""
    torch.manual_seed(2)
    texts = torch.randint(1, 49000, (6, context))
    for i in range(6):
        end = 2 + i * (context - 3) // 5
        texts[i, end], texts[i, end + 1 :] = 49407, 0
    return torch.randint(0, 256, (6, 3, size, size), dtype=torch.uint8), texts


def _compare(ours: CLIP, peer: Any, preprocess: Any = None, tolerance: float = 1e-5) -> None:
    vision = ours.architecture.vision_cfg
    images, texts = _inputs(vision.image_size, ours.context_length)
    if preprocess is None:
        mean, std = (
            torch.tensor(v).view(3, 1, 1)
            for v in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
        )
        pixels = (images / 255 - mean) / std
    else:  # through the peer's own pipeline, from an image of the right size
        from PIL import Image

        pixels = torch.stack(
            [preprocess(Image.fromarray(i.permute(1, 2, 0).numpy())) for i in images]
        )
    ours.eval()
    peer.eval()
    with torch.no_grad():
        image, text, scale, bias = ours(images, texts)
        expected = peer(pixels, texts)
    expected = expected if isinstance(expected, dict) else dict(enumerate(expected))
    named = list(expected.values())
    errors = [(image - named[0]).abs().max().item(), (text - named[1]).abs().max().item()]
    print(f"largest difference: image {errors[0]:.1e}, text {errors[1]:.1e}")
    assert max(errors) < tolerance
    torch.testing.assert_close(scale[0], named[2].squeeze(), rtol=1e-6, atol=0)
    if bias is not None:
        torch.testing.assert_close(bias[0], named[3].squeeze())


def _perturbed(model: Any) -> Any:
    """Away from zero biases and unit norms, which would hide a swapped name."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_our_export_loads_in_openclip(tmp_path: Path, variant: str):
    architecture = _architecture(_small(**VARIANTS[variant]), tmp_path)
    ours = _perturbed(CLIP(architecture))
    export_openclip(ours.state_dict(), architecture, tmp_path / "export")
    peer, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'export'}")
    _compare(ours, peer, preprocess)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("wrapped", [False, True], ids=["weights", "training checkpoint"])
def test_openclips_checkpoint_loads_in_ours(tmp_path: Path, variant: str, wrapped: bool):
    content = _small(**VARIANTS[variant])
    peer = _perturbed(open_clip.model.CLIP(**content))
    state = peer.state_dict()
    if wrapped:  # as open_clip_train saves it under DDP
        state = {
            "epoch": 1,
            "name": "run",
            "state_dict": {f"module.{k}": v for k, v in state.items()},
        }
    torch.save(state, tmp_path / "epoch_1.pt")
    architecture = _architecture(content, tmp_path)
    ours = CLIP(architecture)
    ours.load_state_dict(load_openclip(tmp_path / "epoch_1.pt", architecture))
    _compare(ours, peer)


@pytest.mark.parametrize("sizes", [(224, 336), (336, 224), (224, 256)], ids=str)
def test_positions_are_interpolated_as_openclip_does(tmp_path: Path, sizes: tuple[int, int]):
    """ViT-B-32's grids, 7 x 7 and 10 x 10 (or 8 x 8), and contexts of 77 and 48, both ways."""
    before, after = (_small() for _ in sizes)
    for content, size, context in ((before, sizes[0], 77), (after, sizes[1], 48)):
        content["vision_cfg"] |= {"image_size": size // 32 * 32, "patch_size": 32}
        content["text_cfg"] |= {"context_length": context if sizes[0] < sizes[1] else 125 - context}
    peer = _perturbed(open_clip.model.CLIP(**before))
    torch.save(peer.state_dict(), tmp_path / "before.pt")
    resized = open_clip.model.CLIP(**after)
    open_clip.factory.load_checkpoint(resized, str(tmp_path / "before.pt"))
    architecture = _architecture(after, tmp_path)
    ours = CLIP(architecture)
    ours.load_state_dict(load_openclip(tmp_path / "before.pt", architecture))
    expected = resized.state_dict()
    for name in ("visual.positional_embedding", "positional_embedding"):
        assert torch.equal(ours.state_dict()[name], expected[name]) and len(expected[name]) != len(
            peer.state_dict()[name]
        )
    _compare(ours, resized)


@pytest.mark.parametrize("custom", [False, True])
def test_positions_of_a_model_that_openclip_builds(tmp_path: Path, custom: bool):
    """A longer context as OpenCLIP's --force-context-length, then as Long-CLIP."""
    content, kind = _small(), open_clip.model.CustomTextCLIP if custom else open_clip.model.CLIP
    peer = _perturbed(kind(**content))
    torch.save(peer.state_dict(), tmp_path / "before.pt")
    text = {**content["text_cfg"], "context_length": 31}
    resized = kind(**{**content, "text_cfg": text})
    open_clip.factory.load_checkpoint(resized, str(tmp_path / "before.pt"))
    name = "text.positional_embedding" if custom else "positional_embedding"
    architecture = parse_openclip({**content, "custom_text": custom}, "small")
    longer = architecture.changed(ModelConfig(), {}, {}, {"context_length": 31})
    expected, old = resized.state_dict()[name], peer.state_dict()[name]
    assert torch.equal(load_openclip(tmp_path / "before.pt", longer)[name], expected)
    kept = load_openclip(tmp_path / "before.pt", longer, keep_positions=11)
    assert torch.equal(kept[name][:11], old[:11])
    torch.testing.assert_close(kept[name][11::4], old[11:])
    build_model(longer).load_state_dict(kept)


def test_a_preset_of_full_size_agrees(tmp_path: Path):
    """ViT-B-32-quickgelu, 151 million parameters, at its own initialisation."""
    torch.manual_seed(0)
    name = "ViT-B-32-quickgelu"
    ours = CLIP(load_architecture(name))
    export_openclip(ours.state_dict(), ours.architecture, tmp_path / "export")
    peer, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'export'}")
    _compare(ours, peer, preprocess)


# OpenCLIP builds the ResNets itself: tests/peers/test_openclip_models.py trains one.
@pytest.mark.parametrize("name", [n for n in preset_names() if n != "tiny" and n[:2] != "RN"])
def test_presets_are_openclips(tmp_path: Path, name: str):
    content = open_clip.get_model_config(name)
    assert _architecture(content, tmp_path) == load_architecture(name)
    with torch.device("meta"):
        peer, ours = open_clip.model.CLIP(**content), CLIP(load_architecture(name))
    shapes = {key: tuple(t.shape) or (1,) for key, t in peer.state_dict().items()}
    assert {key: tuple(t.shape) or (1,) for key, t in ours.state_dict().items()} == shapes
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in peer.parameters())


def test_initialisation_has_openclips_statistics(tmp_path: Path):
    """The spread of every tensor; its mean size tells normal from uniform."""
    content = open_clip.get_model_config("ViT-B-32")
    content["vision_cfg"]["layers"] = content["text_cfg"]["layers"] = 2
    torch.manual_seed(0)
    ours = CLIP(_architecture(content, tmp_path)).state_dict()
    for name, tensor in open_clip.model.CLIP(**content).state_dict().items():
        mine = ours[name].reshape(tensor.shape)
        if tensor.numel() < 2 or tensor.std() == 0:
            torch.testing.assert_close(mine, tensor, msg=name)
            continue
        tolerance = 0.02 if tensor.numel() > 100_000 else 0.2
        assert mine.std().item() == pytest.approx(tensor.std().item(), rel=tolerance), name
        assert mine.abs().mean().item() == pytest.approx(
            tensor.abs().mean().item(), rel=tolerance
        ), name


@pytest.mark.parametrize("unlocked", range(7))
def test_locked_towers_are_openclips(tmp_path: Path, unlocked: int):
    names = [name for name, _ in CLIP(_architecture(_small(), tmp_path)).named_parameters()]
    locks = {"lock_image": True, "lock_text": True}
    groups = {"lock_image_unlocked_groups": unlocked, "lock_text_unlocked_layers": unlocked}
    peer = open_clip.CLIP(**_small())
    peer.lock_image_tower(unlocked)
    peer.lock_text_tower(unlocked)
    theirs = {name for name, p in peer.named_parameters() if not p.requires_grad}
    assert frozen_names(ModelConfig(**locks, **groups), names) == theirs


def _captions(num: int) -> list[str]:
    rng = random.Random(0)
    words = [
        "a",
        "photo",
        "Eiffel",
        "night,",
        "1999's",
        "best-seller",
        "&",
        "naïve",
        "ÜBER",
        "straße",
        "we'll",
    ]
    odd = [
        "👩‍👩‍👧",
        "日本語のテキスト",
        "&lt;b&gt;",
        "&amp;amp;",
        "\u00a0",
        "ﬁne",
        "x" * 300,
        "\t\n",
        "<start_of_text>",
        "½",
        "e\u0301",
    ]
    out = []
    for _ in range(num):
        parts = rng.choices(words, k=rng.randint(0, 90)) + rng.choices(
            odd, k=rng.choice([0, 0, 1, 3])
        )
        parts += ["".join(rng.choices(string.printable, k=rng.randint(1, 30)))] * rng.choice([0, 1])
        rng.shuffle(parts)
        out.append(" ".join(parts))
    return out


@pytest.mark.parametrize("context_length", [16, 77])
def test_the_tokenizer_is_openclips(context_length: int):
    from clip_train.data.tokenizer import Tokenizer

    captions = _captions(2000)
    peer = open_clip.SimpleTokenizer(context_length=context_length)(captions)
    assert torch.equal(Tokenizer(context_length)(captions), peer)
