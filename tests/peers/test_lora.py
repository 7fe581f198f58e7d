"""Adapters beside Hugging Face's peft on OpenCLIP's own module, and through its files."""

from __future__ import annotations

import json

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


def test_a_fused_qkv_is_adapted_like_three_layers_by_peft(tmp_path):
    """A SigLIP of transformers, whose q, k and v are layers of their own, with peft's adapters."""
    transformers = pytest.importorskip("transformers", reason="peers' environment: make peers")
    from clip_train.models.weights import initial_weights
    from tests.peers.siglip import save_siglip

    theirs = save_siglip(tmp_path)
    lora = Lora(
        rank=2, alpha=6, on=("qkv", "blocks.*.attn.proj", "in_proj_weight", "out_proj", "mlp")
    )
    config = ModelConfig(init_from=str(tmp_path), lora=lora)
    ours = build_model(config.architecture()).double().eval()
    ours.load_state_dict(dict(initial_weights(config, 0).whole()))
    torch.manual_seed(1)
    layers = r".*encoder\.layers\.\d+\.self_attn\.(q|k|v|out)_proj|.*\.mlp\.fc[12]"
    peft_config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=layers)
    peer = peft.get_peft_model(theirs, peft_config).double().eval()
    named = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): p
        for name, p in peer.named_parameters()
    }
    renamed = {
        "visual.trunk.blocks": "vision_model.encoder.layers",
        "text.transformer.resblocks": "text_model.encoder.layers",
        "visual.trunk.attn_pool.mlp": "vision_model.head.mlp",
        "attn.out_proj": "self_attn.out_proj",
        "attn.proj": "self_attn.out_proj",
        "mlp.c_fc": "mlp.fc1",
        "mlp.c_proj": "mlp.fc2",
    }
    used = set()
    for name, p in ours.named_parameters():
        if "lora_" not in name:
            continue
        p.data.normal_()
        for here, there in renamed.items():
            name = name.replace(here, there)  # noqa: PLW2901
        fused = [f"{part}_proj" for part in "qkv"]
        layer = name.removesuffix("qkv.lora_A").removesuffix("qkv.lora_B")
        layer = layer.removesuffix("lora_A").removesuffix("lora_B")
        if layer.endswith(".attn."):
            layer = layer.replace(".attn.", ".self_attn.")
            places = [f"{layer}{part}.{name[-6:]}" for part in fused]
        else:
            places = [name]
        for place, part in zip(places, p.data.chunk(len(places)), strict=True):
            assert named[place].shape == part.shape
            named[place].data.copy_(part)
            used.add(place)
    assert used == {name for name in named if "lora_" in name}
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    ids = torch.randint(0, 20, (3, 16))
    with torch.no_grad():
        image, text, *_ = ours(images, ids)
        out = peer(pixel_values=(images.double() / 255 - 0.5) / 0.5, input_ids=ids)
    torch.testing.assert_close(image, out.image_embeds, rtol=0, atol=1e-10)
    torch.testing.assert_close(text, out.text_embeds, rtol=0, atol=1e-10)
    plain = transformers.SiglipModel.from_pretrained(tmp_path).double().eval()
    with torch.no_grad():
        before = plain(pixel_values=(images.double() / 255 - 0.5) / 0.5, input_ids=ids)
    assert not torch.allclose(before.image_embeds, image, atol=1e-2)


def test_the_attention_pools_of_timm_and_resnets_are_adapted(tmp_path):
    """By the textbook: W + factor B A for each of the projections in W."""
    from torch.func import functional_call

    from clip_train.models.config import load_architecture
    from clip_train.models.low_rank import merged
    from tests.peers.siglip import save_siglip

    save_siglip(tmp_path)
    resnet = {
        "embed_dim": 24,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16},
        "text_cfg": small_architecture().model_cfg()["text_cfg"],
    }
    (tmp_path / "resnet.json").write_text(json.dumps(resnet))
    cases = {
        str(tmp_path): ("attention", {"q": 1, "kv": 2, "proj": 1}, "visual.trunk.attn_pool."),
        f"open_clip:{tmp_path}/resnet.json": (
            "attnpool.*", {"q_proj": 1, "k_proj": 1, "v_proj": 1, "c_proj": 1}, "visual.attnpool.",
        ),
    }  # fmt: skip
    for name, (on, layers, pool) in cases.items():
        lora = Lora(rank=2, alpha=6, on=(on,))
        base = load_architecture(name)
        torch.manual_seed(0)
        ours = build_model(base.model_copy(update={"lora": lora})).double().eval()
        plain = build_model(base).double().eval()
        named = dict(ours.named_parameters())
        weights = {key: p for key, p in ours.state_dict().items() if "lora_" not in key}
        for layer, count in layers.items():
            A, B = (named[f"{pool}{layer}.lora_{x}"] for x in "AB")
            assert A.shape[0] == 2 * count
            B.data.normal_()
            delta = torch.cat([b @ a for a, b in zip(A.split(2), B.chunk(count), strict=True)])
            weights[f"{pool}{layer}.weight"] = weights[f"{pool}{layer}.weight"] + 3 * delta
        side = base.vision_cfg.image_size
        images = torch.randint(0, 256, (3, 3, side, side), dtype=torch.uint8)
        found = ours(images)[0]
        torch.testing.assert_close(found, functional_call(plain, weights, (images,))[0])
        assert not torch.allclose(found, plain(images)[0], atol=1e-2)
        plain.load_state_dict(merged(ours.state_dict(), lora))
        torch.testing.assert_close(found, plain(images)[0], rtol=1e-10, atol=1e-12)
        found.sum().backward()
        assert all(named[f"{pool}{layer}.lora_A"].grad.abs().sum() > 0 for layer in layers)


def test_peft_reads_the_adapters_of_fused_layers(tmp_path):
    """Three adapters of a fused layer are one of block matrices in peft."""
    from clip_train.models.config import load_architecture
    from tests.peers.siglip import save_siglip

    save_siglip(tmp_path)
    lora = Lora(rank=2, alpha=6, on=("attn.qkv", "attn_pool.kv", "attn_pool.q", "mlp"))
    base = load_architecture(str(tmp_path))
    torch.manual_seed(0)
    plain = build_model(base).eval()
    ours = build_model(base.model_copy(update={"lora": lora})).eval()
    ours.load_state_dict(plain.state_dict(), strict=False)
    adapters = {name: p for name, p in ours.named_parameters() if "lora_" in name}
    for p in adapters.values():
        p.data.normal_(std=0.3)
    folder = export_peft(adapters, lora, str(tmp_path / "peft"))
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    ids = torch.randint(0, 20, (3, 16))
    with torch.no_grad():
        found = ours(images, ids)[:2]
        before = plain(images, ids)[:2]
        truth = peft.PeftModel.from_pretrained(plain, folder).eval()(images, ids)[:2]
    for mine, peer, base_features in zip(found, truth, before, strict=True):
        torch.testing.assert_close(mine, peer, rtol=0, atol=1e-5)
        assert not torch.allclose(mine, base_features, atol=1e-2)
