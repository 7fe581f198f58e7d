"""Adapters beside Hugging Face's peft on OpenCLIP's own module, and through its files."""

from __future__ import annotations

import pytest
import torch

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_tools.exports import export_peft
from clip_train.models.clip import build_model
from clip_train.models.config import ModelConfig
from clip_train.models.freeze import freeze
from clip_train.models.lora import Lora
from tests.models.small import inputs, small_architecture, small_model

open_clip = pytest.importorskip("open_clip", reason="peers' environment: make peers")
peft = pytest.importorskip("peft", reason="peers' environment: make peers")


@pytest.mark.parametrize(
    "on", [("attention", "mlp"), ("in_proj_weight", "mlp"), ("c_fc", "c_proj")]
)
def test_peft_computes_the_same_from_an_export(tmp_path, on):
    """What each adapter adds, features, and gradients.

    peft 0.18.1 counts the adapter of an attention's `out_proj` twice, in its forward and when it merges.
    """
    lora = Lora(rank=3, alpha=6, on=on)
    architecture = small_architecture()
    torch.manual_seed(0)
    ours = build_model(architecture.model_copy(update={"lora": lora}))
    ours.load_state_dict(small_model().state_dict(), strict=False)
    freeze(ours, ModelConfig(lora=lora))
    for name, p in ours.named_parameters():
        if name.endswith("lora_B"):
            p.data.normal_(std=0.3)
    state = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    folder = export_peft(state, lora, str(tmp_path))
    theirs = open_clip.CLIP(**architecture.model_cfg(), nonscalar_logit_scale=True)
    theirs.load_state_dict(small_model().state_dict())
    theirs = peft.PeftModel.from_pretrained(theirs, folder, is_trainable=True)
    for name, layer in theirs.named_modules():
        if hasattr(layer, "get_delta_weight"):
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")  # noqa: PLW2901
            A, B = (state.get(f"{name}.lora_{x}") for x in "AB")
            expected = torch.zeros(())
            if A is not None:
                pairs = zip(A.split(3), B.chunk(len(A) // 3), strict=True)
                expected = 2 * torch.cat([b @ a for a, b in pairs])
            delta = layer.get_delta_weight("default")
            torch.testing.assert_close(delta, expected.expand_as(delta), rtol=1e-5, atol=1e-6)
    images, texts, seeds = inputs(5)
    image, text, *_ = ours(images, texts, seeds)
    mean, std = (torch.tensor(getattr(architecture, f"image_{x}")) for x in ("mean", "std"))
    pixels = (images / 255 - mean[:, None, None]) / std[:, None, None]
    other = theirs.encode_image(pixels, normalize=True), theirs.encode_text(texts, normalize=True)
    if "attention" not in on:
        torch.testing.assert_close(other[0], image, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other[1], text, rtol=1e-4, atol=1e-5)
    plain = small_model()(images, texts, seeds)
    assert not torch.allclose(plain[0], image, atol=1e-2)
    if on == ("c_fc", "c_proj"):
        weights = torch.linspace(-1, 1, 24)
        ((image + text) * weights).sum().backward()
        ((other[0] + other[1]) * weights).sum().backward()
        named = dict(theirs.named_parameters())
        for name, p in state.items():
            if "lora" in name:
                peer = named[f"base_model.model.{name}.default.weight"]
                torch.testing.assert_close(p.grad, peer.grad, rtol=1e-3, atol=1e-5)
