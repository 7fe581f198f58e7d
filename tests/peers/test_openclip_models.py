"""`open_clip:NAME`: the wrapped model against OpenCLIP's own, and one step in several micro-batches against one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train.engines.base import PlainEngine
from clip_train.errors import UserError
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.memory.probe import fake_profile
from clip_train.models.clip import build_model, count_parameters, flops_per_sample
from clip_train.models.config import AnyArchitecture, ModelConfig, load_architecture
from clip_train.models.drawing import Drawn, fill_buffers
from clip_train.models.weights import export_openclip, load_openclip
from clip_train.recipe.memory import micro_batch
from clip_train.recipe.tokenizer import tokenizer_of
from clip_train.step import train_step, two_pass
from clip_train.task import Batch, Context, MicroBatch
from tests.toy import columns_of

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
open_clip = pytest.importorskip(
    "open_clip", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)

TEXT = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
SIGLIP_TEXT = {
    "no_causal_mask": True,
    "proj_bias": True,
    "pool_type": "last",
    "norm_kwargs": {"eps": 1e-6},
}
MODELS: dict[str, dict[str, Any]] = {
    "siglip": {
        "embed_dim": 64,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": {"image_size": 160, "timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none"},
        "text_cfg": {**TEXT, **SIGLIP_TEXT, "act_kwargs": {"approximate": "tanh"}},
    },
    "convnext": {
        "embed_dim": 32,
        "vision_cfg": {
            "image_size": 64, "timm_model_name": "test_convnext", "timm_pool": "", "timm_proj": "linear",
            "timm_drop": 0.0, "timm_drop_path": 0.0,
        },
        "text_cfg": TEXT,
    },
    "resnet": {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 64, "layers": [2, 1, 1, 1], "width": 8, "head_width": 32},
        "text_cfg": TEXT,
    },
    "mobileclip": {
        "embed_dim": 32,
        "custom_text": True,
        "vision_cfg": {"image_size": 64, "timm_model_name": "fastvit_mci0", "timm_pool": "avg", "timm_proj": None},
        "text_cfg": {**TEXT, "no_causal_mask": True},
    },
    "coca": {
        "embed_dim": 32,
        "custom_text": True,
        "vision_cfg": {
            "image_size": 64, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16, "attentional_pool": True,
            "attn_pooler_heads": 2, "output_tokens": True,
        },
        "text_cfg": {**TEXT, "embed_cls": True, "output_tokens": True},
        "multimodal_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1,
                           "attn_pooler_heads": 2},
    },
}  # fmt: skip


def architecture_of(name: str, folder: Path, **vision: Any) -> AnyArchitecture:
    config = {**MODELS[name], "vision_cfg": {**MODELS[name]["vision_cfg"], **vision}}
    (folder / "model.json").write_text(json.dumps(config))
    return load_architecture(f"open_clip:{folder / 'model.json'}")


def model_of(architecture: AnyArchitecture, **options: Any) -> Any:
    torch.manual_seed(0)
    model = build_model(architecture, **options).double().train()
    for name, p in model.named_parameters():
        if name.endswith(
            "gamma"
        ):  # layer scales start at 1e-6: nothing of what a block does would be seen
            p.data.fill_(0.5)
        if name.endswith("bn3.weight"):  # a ResNet's blocks begin as the identity
            p.data.fill_(0.5)
    return model


def inputs(architecture: AnyArchitecture, n: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    g, side = torch.Generator().manual_seed(1), architecture.vision_cfg.image_size
    images = torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, generator=g)
    texts = torch.randint(1, 49000, (n, architecture.text_cfg.context_length), generator=g)
    texts[:, -3], texts[:, -2:] = 49407, 0
    return images, texts, torch.arange(n)


@pytest.mark.parametrize("name", MODELS)
def test_features_and_gradients_are_openclips(name: str, tmp_path: Path):
    architecture = architecture_of(name, tmp_path)
    ours = model_of(architecture)
    assert all(bool(each.isfinite().all()) for each in ours.state_dict().values())
    export = export_openclip(ours.state_dict(), architecture, tmp_path / "export")
    peer = open_clip.create_model(f"local-dir:{export}").double().train()
    assert {n: p.numel() for n, p in peer.named_parameters()} == {
        n: p.numel() for n, p in ours.named_parameters()
    }
    assert count_parameters(architecture) == sum(p.numel() for p in peer.parameters())
    images, texts, seeds = inputs(architecture)
    mean, std = (torch.tensor(each, dtype=torch.float64).view(3, 1, 1) for each in
                 (architecture.image_mean, architecture.image_std))  # fmt: skip
    image, text, scale, bias, *_ = ours.to(torch.float64)(images, texts, seeds)
    expected = (
        F.normalize(peer.encode_image((images.double() / 255 - mean) / std), dim=-1),
        F.normalize(peer.encode_text(texts), dim=-1),
    )
    torch.testing.assert_close((image, text), expected, rtol=1e-5, atol=1e-5)
    torch.manual_seed(3)
    weights = [torch.randn_like(image) for _ in range(2)]
    for (a, b), factor in (((image, text), scale), (expected, peer.logit_scale.exp())):
        (factor * ((a * weights[0]).sum() + (b * weights[1]).sum())).sum().backward()
    assert bias is None or bias.item() == -10
    theirs = dict(peer.named_parameters())
    for each, p in ours.named_parameters():
        if each.startswith("text_decoder."):
            assert p.grad is None and theirs[each].grad is None  # a CoCa's, without captions
        elif each != "logit_bias":
            torch.testing.assert_close(
                p.grad, theirs[each].grad.reshape(p.shape), rtol=1e-5, atol=1e-5, msg=each
            )
    loaded = load_openclip(export, architecture)
    assert all(
        torch.equal(loaded[each], value.to(loaded[each]))
        for each, value in ours.float().state_dict().items()
    )


def gradients(
    architecture: AnyArchitecture, k: int, kept: int, **options: Any
) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    model, parts = model_of(architecture, **options), inputs(architecture)
    batches = [
        MicroBatch(columns_of(*each))
        for each in zip(*(part.split(8 // k) for part in parts), strict=True)
    ]
    objective = InfoNCE() if architecture.init_logit_bias is None else SigmoidLoss()
    torch.manual_seed(5)
    output = two_pass(PlainEngine(model), batches, objective, Context(8), kept_graphs=kept)
    return (
        output.loss,
        {name: p.grad for name, p in model.named_parameters()},
        dict(model.named_buffers()),
    )


@pytest.mark.parametrize("name", ["siglip", "convnext", "coca"])
def test_four_micro_batches_give_the_step_of_one(name: str, tmp_path: Path):
    architecture = architecture_of(name, tmp_path)
    torch.testing.assert_close(
        gradients(architecture, 4, 1), gradients(architecture, 1, 1), rtol=1e-8, atol=1e-12
    )


def test_a_resnet_step_equals_all_graphs_kept_or_one_micro_batch(
    tmp_path: Path,
):
    """The rule of batch norms itself has its oracle in tests/engine/test_batch_statistics.py."""
    architecture = architecture_of("resnet", tmp_path)
    plain = gradients(architecture, 4, 4)
    assert {int(each) for each in plain[2].values() if each.dtype == torch.int64} == {4}
    for kept in (1, 2):
        again = gradients(architecture, 4, kept)
        torch.testing.assert_close(again, plain, rtol=1e-8, atol=1e-12)
    grouped = architecture_of("resnet", tmp_path, norm="group")
    once = gradients(grouped, 1, 1)
    torch.testing.assert_close(gradients(grouped, 8, 1), once, rtol=1e-8, atol=1e-12)
    assert not any("running" in name for name in once[2])


def test_resnets_have_the_published_number_of_parameters():
    for name, parameters in (("RN50", 102_007_137), ("RN101-quickgelu", 119_688_033)):
        assert count_parameters(load_architecture(name)) == parameters


@pytest.mark.parametrize(
    "name, vision", [("mobileclip", {"timm_drop_path": 0.3}), ("convnext", {"timm_drop_path": 0.5})]
)
def test_replays_draw_the_same_and_keep_running_statistics(
    name: str, vision: dict[str, Any], tmp_path: Path
):
    """Batch norms see a micro-batch, and stochastic depth draws for it: the step of as many, all graphs kept."""
    architecture = architecture_of(name, tmp_path, **vision)
    loss, grads, buffers = gradients(architecture, 4, 4)
    torch.testing.assert_close(
        gradients(architecture, 4, 1), (loss, grads, buffers), rtol=1e-8, atol=1e-12
    )
    assert {int(each) for each in buffers.values() if each.dtype == torch.int64} <= {4}
    still = gradients(architecture_of(name, tmp_path), 4, 4)[0]
    assert not torch.allclose(loss, still)  # there was something to draw


class Saved:
    """What an engine has saved, in memory."""

    def __init__(self, engine: PlainEngine):
        self.held = {
            (fragment.name, slot): tensor.clone().flatten()
            for fragment in engine.state_fragments()
            for slot, tensor in fragment.tensors.items()
        }

    def slots(self, name: str) -> set[str]:
        return {slot for each, slot in self.held if each == name}

    def prepare(self, wanted: Any) -> None:
        """It is all there."""

    def read(self, name: str, slot: str, start: int, numel: int) -> Tensor:
        return self.held[name, slot][start : start + numel]


@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_resumes_goes_on_as_if_never_stopped(name: str, tmp_path: Path):
    architecture = architecture_of(name, tmp_path)
    batch = Batch(columns_of(*inputs(architecture), keys=[str(i) for i in range(8)]))
    objective = InfoNCE() if architecture.init_logit_bias is None else SigmoidLoss()

    def engine() -> PlainEngine:
        model = model_of(architecture)
        return PlainEngine(model, torch.optim.AdamW(model.parameters(), 1e-3))

    def step(on: PlainEngine) -> float:
        return train_step(on, batch, objective, micro_size=2, kept_graphs=1, lr=1e-3).loss

    first = engine()
    before = step(first)
    saved, again = Saved(first), engine()
    again.load_fragments(saved, {"optimizer_steps": 1})
    assert [step(again), step(again)] == [step(first), step(first)]
    assert step(again) < before


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_known_without_data(name: str, tmp_path: Path):
    architecture = architecture_of(name, tmp_path)
    assert flops_per_sample(architecture) > 1e6

    def graph(checkpointing: bool) -> float:
        """Bytes of a sample."""
        make_model = partial(build_model, architecture, activation_checkpointing=checkpointing)
        return fake_profile(
            make_model, partial(micro_batch, architecture, torch.device("cpu"))
        ).graph

    whole = graph(False)
    assert whole > 1e5
    if name == "siglip":  # its blocks are alike; and profiles of a MobileCLIP take 20 s
        assert graph(True) < whole


def test_masks_that_no_checkpoint_holds_are_computed_again(tmp_path: Path):
    architecture = architecture_of("convnext", tmp_path)
    with torch.device("meta"):
        model = build_model(architecture)
    model.to_empty(device="cpu")
    fill_buffers(model, partial(build_model, architecture))
    assert torch.equal(model.attn_mask, build_model(architecture).attn_mask)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_drawn_one_by_one_as_openclip_draws_them(name: str, tmp_path: Path):
    build, state = partial(build_model, architecture_of(name, tmp_path)), {}
    assert Drawn(build, 3, large=256).draw(
        lambda name, tensor: state.update({name: tensor.clone()})
    )
    torch.manual_seed(3)
    expected = build().state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_tokens_are_clips_or_those_of_the_named_tokenizer(tmp_path: Path, monkeypatch):
    architecture = architecture_of("siglip", tmp_path)
    captions = ["a cat", "two dogs, and a photo of both"]
    assert torch.equal(
        tokenizer_of(architecture)(captions), open_clip.SimpleTokenizer(context_length=16)(captions)
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    named = architecture.text_cfg.model_copy(
        update={"hf_tokenizer_name": str(tmp_path / "nowhere")}
    )
    with pytest.raises(UserError, match=r"nowhere cannot be loaded.*Hugging Face hub"):
        tokenizer_of(architecture.model_copy(update={"text_cfg": named}))


def test_names_that_openclip_does_not_know_are_refused():
    with pytest.raises(UserError, match=r"has no such model"):
        ModelConfig(name="open_clip:ViT-B-17").architecture()
    siglip = ModelConfig(name="open_clip:ViT-B-16-SigLIP2").architecture()
    assert siglip.image_mean == (0.5,) * 3 and siglip.init_logit_bias == -10
