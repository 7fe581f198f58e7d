"""Every native config of OpenCLIP (no timm, Hugging Face or CoCa tower in it), by its name: names, numbers, gradients.

At the config's own sizes, but for depth and vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train.models.clip import CLIP
from clip_train.models.config import load_architecture, parse_architecture, preset_names

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("default"),
]  # the peers' warnings are not ours
open_clip = pytest.importorskip(
    "open_clip", reason="PEER MISSING: see test_openclip.py", exc_type=ImportError
)

FOREIGN = ("timm_model_name", "hf_model_name")


def native_configs() -> dict[str, dict[str, Any]]:
    files = sorted((Path(open_clip.__file__).parent / "model_configs").glob("*.json"))
    found = {file.stem: json.loads(file.read_text()) for file in files}
    return {
        name: content
        for name, content in found.items()
        if "multimodal_cfg" not in content
        and {"vision_cfg", "text_cfg"} <= content.keys()  # the main branch has audio models too
        and not any(
            key in content[tower] for tower in ("vision_cfg", "text_cfg") for key in FOREIGN
        )
    }


CONFIGS = native_configs()
RESNETS = [name for name in CONFIGS if isinstance(CONFIGS[name]["vision_cfg"].get("layers"), list)]
NATIVE = [name for name in CONFIGS if name in preset_names() and name not in RESNETS]


def shallow(name: str) -> dict[str, Any]:
    content = json.loads(json.dumps(CONFIGS[name]))
    content["vision_cfg"]["layers"] = 2
    content["text_cfg"] |= {"layers": 2, "vocab_size": min(content["text_cfg"]["vocab_size"], 1000)}
    return content


def pair(name: str) -> tuple[CLIP, Any]:
    """Ours and OpenCLIP's with the same weights, away from zero biases and unit norms."""
    content = shallow(name)
    torch.manual_seed(0)
    peer = open_clip.model.CLIP(**content)
    with torch.no_grad():
        for p in peer.parameters():
            p.add_(0.02 * torch.randn_like(p))
    ours = CLIP(parse_architecture(content, name))
    state = {
        key: t.reshape(1) if key == "logit_scale" else t for key, t in peer.state_dict().items()
    }
    ours.load_state_dict(state)
    return ours, peer


def inputs(architecture: Any) -> tuple[torch.Tensor, torch.Tensor]:
    text, size = architecture.text_cfg, architecture.vision_cfg.image_size
    texts = torch.randint(3, text.vocab_size - 1, (2, text.context_length))
    for i, end in enumerate((5, text.context_length - 1)):
        texts[i, end], texts[i, end + 1 :] = text.vocab_size - 1, 0
    return torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8), texts


@pytest.mark.parametrize("name", NATIVE)
def test_features_and_gradients_are_openclips(name: str):
    ours, peer = pair(name)
    images, texts = inputs(ours.architecture)
    mean, std = (
        torch.tensor(v).view(3, 1, 1)
        for v in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
    )
    features = ours(images, texts)[:2]
    expected = peer((images.float() / 255 - mean) / std, texts)[:2]
    apart = [(a - b).abs().max().item() for a, b in zip(features, expected, strict=True)]
    cotangents = [torch.randn_like(f) for f in expected]
    for each in (features, expected):
        sum((f * c).sum() for f, c in zip(each, cotangents, strict=True)).backward()
    gradients = {key: p.grad for key, p in peer.named_parameters() if p.grad is not None}
    largest = max(g.abs().max() for g in gradients.values())
    worst, where = 0.0, ""
    for key, p in ours.named_parameters():
        if key != "logit_scale":
            other = gradients.pop(key)
            error = ((p.grad - other).abs().max() / (other.abs().max() + 1e-2 * largest)).item()
            worst, where = max((worst, where), (error, key))
    print(f"| {name} | {apart[0]:.1e} | {apart[1]:.1e} | {worst:.1e} ({where}) |")
    assert not gradients
    assert max(*apart, worst) < 1e-5


def test_all_are_presets():
    assert len(NATIVE) == 31 and len(RESNETS) == 10
    others = CONFIGS.keys() - set(preset_names())
    other_texts = ("CLIPA", "worldwide", "ViT-M-16-alt", "moderntext", "genlip")
    assert all(any(part in name for part in other_texts) for name in others), others


@pytest.mark.parametrize("name", NATIVE)
def test_the_export_describes_the_model_to_openclip(name: str):
    described = load_architecture(name).model_cfg()
    with torch.device("meta"):
        ours, theirs = open_clip.model.CLIP(**described), open_clip.model.CLIP(**CONFIGS[name])
    assert str(ours) == str(theirs)
    assert ours.text_pool_type == theirs.text_pool_type


@pytest.mark.parametrize("name", ["ViT-L-14", "ViT-M-16"])
def test_initialisation_has_openclips_statistics(name: str):
    """The spread of every tensor; its mean size tells normal from uniform."""
    torch.manual_seed(0)
    ours = CLIP(parse_architecture(shallow(name), name)).state_dict()
    for key, tensor in open_clip.model.CLIP(**shallow(name)).state_dict().items():
        mine = ours[key].reshape(tensor.shape)
        if tensor.numel() < 2 or tensor.std() == 0:
            torch.testing.assert_close(mine, tensor, msg=key)
            continue
        tolerance = 0.02 if tensor.numel() > 100_000 else 0.2
        assert mine.std().item() == pytest.approx(tensor.std().item(), rel=tolerance), key
        assert mine.abs().mean().item() == pytest.approx(
            tensor.abs().mean().item(), rel=tolerance
        ), key
