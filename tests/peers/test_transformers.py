"""Exports as transformers itself reads them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import tests.peers.torchvision_shim  # noqa: F401  before transformers
from clip_tools.exports import export_transformers, huggingface_files
from clip_train.data.tokenizer import Tokenizer
from clip_train.errors import UserError
from clip_train.models.clip import CLIP
from clip_train.models.config import parse_architecture

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
transformers = pytest.importorskip(
    "transformers",
    reason="PEER MISSING: nothing here was compared with transformers. Run scripts/setup_peers.sh, then "
    ".venv-peers/bin/python -m pytest -m peer",
)
CONTEXT = 16


def architecture(**changes: Any) -> Any:
    content = {
        "embed_dim": 24,
        "vision_cfg": {
            "image_size": 32,
            "layers": 3,
            "width": 64,
            "head_width": 16,
            "mlp_ratio": 3.7,
            "patch_size": 8,
        },
        "text_cfg": {
            "context_length": CONTEXT,
            "vocab_size": 49408,
            "width": 48,
            "heads": 4,
            "layers": 2,
        },
    }
    return parse_architecture({**content, **changes}, "test")


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_features_of_an_export_are_equal(tmp_path: Path, quick_gelu: bool):
    """From images and texts, through the peer's own processor and tokenizer, found by what is in the folder alone."""
    torch.manual_seed(1)
    ours = CLIP(architecture(quick_gelu=quick_gelu)).eval()
    with torch.no_grad():
        for p in (
            ours.parameters()
        ):  # away from zero biases and unit norms, which would hide a swapped name
            p.add_(0.05 * torch.randn_like(p))
    folder = export_transformers(ours.state_dict(), ours.architecture, tmp_path / "export")
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
    peer, info = transformers.CLIPModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    processor = transformers.CLIPImageProcessor.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    texts = ["a photo of a cat", "Two dogs, 1999's best!", "x", "a " * 40, "blue shapes on red"]
    pixels = processor(
        [Image.fromarray(i.permute(1, 2, 0).numpy()) for i in images], return_tensors="pt"
    )
    tokens = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
    with torch.no_grad():
        image, text, scale, _ = ours(images, Tokenizer(CONTEXT)(texts))
        found = peer.eval()(pixel_values=pixels["pixel_values"], **tokens)
    torch.testing.assert_close(found.image_embeds, image, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.text_embeds, text, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.logits_per_image, scale * image @ text.T, rtol=0, atol=1e-4)


def test_the_tokenizer_is_the_same_on_plain_text(tmp_path: Path):
    """Text that ftfy mends or HTML entities differ: transformers does not mend."""
    for name, text in huggingface_files(77).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    peer, ours, rng = (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        Tokenizer(77),
        random.Random(0),
    )
    words = [
        "a",
        "photo",
        "Eiffel",
        "night,",
        "1999's",
        "best-seller",
        "naïve",
        "ÜBER",
        "straße",
        "we'll",
        "日本語",
        "👩",
    ]
    for _ in range(300):
        text = " ".join(rng.choices(words, k=rng.randint(0, 90)))
        ids = peer(text, truncation=True)["input_ids"]
        mine = ours(text)[0].tolist()
        assert ids == mine[: len(ids)] and not any(mine[len(ids) :]), text
    assert peer.model_max_length == 77


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"init_logit_bias": -10.0}, "init_logit_bias"),
        (
            {"text_cfg": {"vocab_size": 100, "width": 48, "heads": 4, "layers": 2}},
            r"text_cfg.vocab_size \(100",
        ),
    ],
)
def test_what_it_cannot_hold_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str):
    of = architecture(**changes)
    with pytest.raises(UserError, match=f"has no .*{reason}.*: export with --format open_clip"):
        export_transformers(CLIP(of).state_dict(), of, tmp_path / "export")
    assert not (tmp_path / "export").exists()
