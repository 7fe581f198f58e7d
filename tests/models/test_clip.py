"""Names, shapes, precisions, initialisation, and independence from how samples are cut up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clip_train.models.clip import CLIP, count_parameters, flops_per_sample
from clip_train.models.config import ModelConfig, load_architecture
from clip_train.models.dropout import PATCH_DROPOUT_ID, SampleDropout
from clip_train.models.openclip.config import IMAGE_MEAN, IMAGE_STD
from clip_train.models.weights import initial_weights
from tests.models.small import inputs, small_architecture, small_model

_BLOCK = {
    "ln_1.weight",
    "ln_1.bias",
    "attn.in_proj_weight",
    "attn.in_proj_bias",
    "attn.out_proj.weight",
    "attn.out_proj.bias",
    "ln_2.weight",
    "ln_2.bias",
    "mlp.c_fc.weight",
    "mlp.c_fc.bias",
    "mlp.c_proj.weight",
    "mlp.c_proj.bias",
}
_KEYS = {
    "logit_scale",
    "positional_embedding",
    "text_projection",
    "token_embedding.weight",
    "ln_final.weight",
    "ln_final.bias",
    "visual.class_embedding",
    "visual.positional_embedding",
    "visual.proj",
    "visual.conv1.weight",
    "visual.ln_pre.weight",
    "visual.ln_pre.bias",
    "visual.ln_post.weight",
    "visual.ln_post.bias",
} | {
    f"{tower}transformer.resblocks.{i}.{k}"
    for tower in ("", "visual.")
    for i in (0, 1)
    for k in _BLOCK
}


def test_state_dict_has_openclips_names():
    model = small_model()
    assert set(model.state_dict()) == _KEYS
    assert {name for name, _ in model.named_parameters()} == _KEYS
    assert all(p.is_contiguous() and p.ndim > 0 for p in model.parameters())
    with_bias = small_model(architecture=small_architecture(init_logit_bias=-10.0))
    assert set(with_bias.state_dict()) == _KEYS | {"logit_bias"}
    assert with_bias.logit_bias is not None
    assert with_bias.logit_bias.tolist() == [-10.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_features_are_normalised_and_wide_in_every_precision(dtype: torch.dtype):
    architecture = small_architecture(init_logit_bias=-10.0)
    model = small_model(dtype=dtype, architecture=architecture)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for out in model(*inputs(3)):
        assert out.dtype == wide
    image, text, scale, bias = model(*inputs(3))
    assert image.shape == text.shape == (3, 24)
    assert scale.shape == bias.shape == (1,)
    for features in (image, text):
        torch.testing.assert_close(features.norm(dim=1), torch.ones(3, dtype=wide))
    # exp is taken in float32, of the parameter as rounded
    torch.testing.assert_close(scale, model.logit_scale.to(wide).exp(), rtol=0, atol=0)
    reference = small_model(dtype=torch.float64, architecture=architecture)(*inputs(3))
    tolerance = {
        torch.float64: 1e-12,
        torch.float32: 1e-5,
        torch.float16: 5e-3,
        torch.bfloat16: 4e-2,
    }[dtype]
    torch.testing.assert_close(image.double(), reference[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(text.double(), reference[1], rtol=0, atol=tolerance)


def test_only_what_is_asked_for_is_encoded():
    model = small_model()
    images, texts, _ = inputs(2)
    image, none, _, bias = model(images)
    assert none is None
    assert bias is None
    torch.testing.assert_close(image, model(images, texts)[0], rtol=0, atol=0)
    none, text, _, _ = model(None, texts)
    assert none is None
    torch.testing.assert_close(text, model(images, texts)[1], rtol=0, atol=0)


def test_inputs_of_another_size_are_refused():
    model = small_model()
    with pytest.raises(ValueError, match=r"\[b, 3, 16, 16\], not \[2, 3, 8, 16\]"):
        model(torch.zeros(2, 3, 8, 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\[b, 8\], not \[2, 9\]"):
        model(None, torch.zeros(2, 9, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uint8_images_are_normalised_as_torchvision_does(dtype: torch.dtype):
    model = small_model(dtype=dtype)
    images, _, _ = inputs(4)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGE_MEAN, IMAGE_STD))
    normalised = images.float().div(255).sub(mean).div(std)  # rounded to bf16 by the model, once
    torch.testing.assert_close(model(images)[0], model(normalised)[0], rtol=0, atol=0)


def test_the_architectures_own_statistics_are_used():
    images, _, _ = inputs(2)
    half = small_architecture().model_copy(
        update={"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}
    )
    model = small_model(architecture=half)
    torch.testing.assert_close(
        model(images)[0], model(images.float() / 127.5 - 1)[0], rtol=0, atol=1e-6
    )


def test_the_text_is_read_at_its_end_and_looks_back_only():
    model = small_model(dtype=torch.float64)
    _, texts, _ = inputs(6)
    features = model(None, texts)[1]
    changed = texts.clone()
    changed[:, 3:][changed[:, 3:] == 0] = 5  # the padding behind the end
    torch.testing.assert_close(model(None, changed)[1], features, rtol=0, atol=1e-14)
    changed = texts.clone()
    changed[:, 0] = (changed[:, 0] % 98) + 1
    assert ((model(None, changed)[1] - features).norm(dim=1) > 1e-4).all()


def test_blocks_equal_plain_torch():
    """Against `nn.MultiheadAttention` with OpenCLIP's additive mask, in float64."""
    model = small_model(dtype=torch.float64)
    block: Any = model.transformer.resblocks[1]
    torch.manual_seed(5)
    x = torch.randn(3, 8, 20, dtype=torch.float64)
    for p in block.parameters():
        p.data += 0.1 * torch.randn_like(p)  # away from zero biases and unit norms
    peer = torch.nn.MultiheadAttention(20, 2, batch_first=True, dtype=torch.float64)
    peer.load_state_dict(block.attn.state_dict())
    mask = torch.full((8, 8), -math.inf, dtype=torch.float64).triu(1)
    h = F.layer_norm(x, (20,), block.ln_1.weight, block.ln_1.bias)
    expected = x + peer(h, h, h, attn_mask=mask, need_weights=False)[0]
    h = F.layer_norm(expected, (20,), block.ln_2.weight, block.ln_2.bias)
    h = h @ block.mlp.c_fc.weight.T + block.mlp.c_fc.bias
    h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    expected = expected + h @ block.mlp.c_proj.weight.T + block.mlp.c_proj.bias
    torch.testing.assert_close(block(x, None), expected, rtol=0, atol=1e-12)


def test_quick_gelu_is_another_activation():
    quick: Any = small_model(architecture=small_architecture(quick_gelu=True))
    x = torch.linspace(-3, 3, 7)
    activation = quick.visual.transformer.resblocks[0].mlp.gelu
    torch.testing.assert_close(activation(x), x / (1 + torch.exp(-1.702 * x)))
    assert not torch.equal(quick(*inputs(2))[1], small_model()(*inputs(2))[1])


def test_initialisation_is_openclips():
    torch.manual_seed(0)
    model = CLIP(load_architecture("tiny"))
    vision, text = 128, 64
    state = model.state_dict()
    block = "transformer.resblocks.1."
    normal = {
        "token_embedding.weight": 0.02,
        "positional_embedding": 0.01,
        "text_projection": text**-0.5,
        block + "attn.in_proj_weight": text**-0.5,
        block + "attn.out_proj.weight": text**-0.5 * 4**-0.5,
        block + "mlp.c_fc.weight": (2 * text) ** -0.5,
        block + "mlp.c_proj.weight": text**-0.5 * 4**-0.5,
        "visual.class_embedding": vision**-0.5,
        "visual.positional_embedding": vision**-0.5,
        "visual.proj": vision**-0.5,
    }
    uniform = {  # bounds
        "visual." + block + "attn.in_proj_weight": (6 / (4 * vision)) ** 0.5,
        "visual." + block + "attn.out_proj.weight": vision**-0.5,
        "visual." + block + "mlp.c_fc.weight": vision**-0.5,
        "visual." + block + "mlp.c_fc.bias": vision**-0.5,
        "visual." + block + "mlp.c_proj.weight": (4 * vision) ** -0.5,
        "visual.conv1.weight": (3 * 8 * 8) ** -0.5,
        block + "mlp.c_fc.bias": text**-0.5,
        block + "mlp.c_proj.bias": (4 * text) ** -0.5,
    }
    for name, std in normal.items():
        assert state[name].std().item() == pytest.approx(
            std, rel=0.2 if state[name].numel() < 1000 else 0.05
        ), name
    for name, bound in uniform.items():
        assert state[name].abs().max() <= bound, name
        assert state[name].std().item() == pytest.approx(
            bound / 3**0.5, rel=0.2 if state[name].ndim == 1 else 0.05
        )
    for name, value in state.items():
        if name.endswith(("in_proj_bias", "out_proj.bias")) or (
            ".ln_" in name and name.endswith("bias")
        ):
            assert not value.any(), name
    assert state["logit_scale"].tolist() == [pytest.approx(math.log(1 / 0.07))]


def test_the_seed_fixes_the_weights():
    first, again, other = small_model(3), small_model(3), small_model(4)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(first.visual.proj, other.visual.proj)
    weights = [initial_weights(ModelConfig(name="tiny"), seed) for seed in (3, 3, 4)]
    projections = [each.read("visual.proj", "param", 0, 1000) for each in weights]
    assert torch.equal(projections[0], projections[1]) and not torch.equal(
        projections[0], projections[2]
    )


@pytest.mark.parametrize("cuts", [(16,), (5, 5, 5, 1), (1,) * 16])
def test_dropout_does_not_depend_on_the_micro_batch(cuts: tuple[int, ...]):
    model = small_model(dtype=torch.float64, dropout=0.2, patch_dropout=0.5)
    images, texts, seeds = inputs(16)
    whole = model(images, texts, seeds)
    parts = [
        model(*group)
        for group in zip(
            images.split(list(cuts)), texts.split(list(cuts)), seeds.split(list(cuts)), strict=True
        )
    ]
    for i in (0, 1):
        torch.testing.assert_close(torch.cat([p[i] for p in parts]), whole[i], rtol=0, atol=1e-13)
    for i, other in enumerate(model(images, texts, seeds + 1)[:2]):
        assert ((other - whole[i]).norm(dim=1) > 1e-3).all()
    order = torch.randperm(16)
    torch.testing.assert_close(
        model(images[order], texts[order], seeds[order])[0], whole[0][order], rtol=0, atol=1e-13
    )


def test_every_dropout_of_the_model_has_random_bits_of_its_own():
    model = small_model(dropout=0.2, patch_dropout=0.5)
    ids = [int(m.layer_id) for m in model.modules() if isinstance(m, SampleDropout)]
    assert len({*ids, PATCH_DROPOUT_ID}) == 2 * 2 * 2 + 1


def test_dropout_is_off_in_evaluation_and_seeded_in_training():
    model = small_model(dropout=0.2)
    images, texts, seeds = inputs(2)
    with pytest.raises(ValueError, match=r"dropout needs sample_seeds in training: int64 \[b\]"):
        model(images, texts)
    with pytest.raises(ValueError, match="dropout needs sample_seeds"):
        small_model(patch_dropout=0.5)(images, texts)
    model.eval()
    torch.testing.assert_close(
        model(images, texts), small_model()(images, texts, seeds), rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_activation_checkpointing_changes_no_gradient(dtype: torch.dtype):
    gradients = []
    for activation_checkpointing in (False, "pointwise", True):
        model = small_model(
            dtype=dtype,
            dropout=0.2,
            patch_dropout=0.5,
            activation_checkpointing=activation_checkpointing,
        )
        image, text, scale, _ = model(*inputs(5))
        torch.rand(7)  # the state of the generator has no part in it
        (scale * (image @ text.T)).logsumexp(1).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(g is not None for g in gradients[0].values())
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=0, atol=0)


def test_activation_checkpointing_computes_each_block_again():
    for on, forwards in ((True, 2), (False, 1)):
        model: Any = small_model(activation_checkpointing=on)
        calls: list[int] = []
        model.visual.transformer.resblocks[0].register_forward_pre_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        model(*inputs(2))[0].sum().backward()
        assert len(calls) == forwards


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("ViT-B-32", 151_277_313),
        ("ViT-B-32-quickgelu", 151_277_313),
        ("ViT-B-16", 149_620_737),
        ("ViT-L-14", 427_616_513),
        ("ViT-L-14-336", 427_944_193),
        ("ViT-H-14", 986_109_441),
        ("ViT-g-14", 1_366_678_273),
        ("ViT-bigG-14", 2_539_567_105),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, parameters: int):
    assert count_parameters(load_architecture(name)) == parameters


def test_flops_are_those_of_the_products():
    """Against torch's own counter, which sees every matrix product and convolution."""
    architecture = small_architecture()
    model = small_model(architecture=architecture, dropout=0.0, patch_dropout=0.5)
    for dropped in (0.0, 0.5):
        model.train(dropped > 0)
        with (
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):  # fused ones go uncounted
            model(*inputs(3))
        assert counter.get_total_flops() == 3 * flops_per_sample(
            architecture, patch_dropout=dropped
        )


def test_flops_of_vit_b_32_are_the_published_ones():
    # the published 4.41 + 2.98 GMACs for ViT-B-32, less their additions, and less what the last blocks are spared:
    # query, output and MLP (2 + 8 width^2) and attention of all tokens but one
    spared = 49 * (10 * 768**2 + 2 * 50 * 768) + 76 * (10 * 512**2 + 2 * 77 * 512)
    assert flops_per_sample(load_architecture("ViT-B-32")) + 2 * spared == pytest.approx(
        2 * 7.39e9, rel=0.02
    )


def test_a_compiled_backward_adds_no_zeros():
    """The gradient of a selection is zeros with one part filled; three of them were added."""
    seen: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    block = small_model().visual.transformer.resblocks[0]
    compiled = torch.compile(block, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    compiled(
        torch.randn(2, 5, block.ln_1.weight.numel(), requires_grad=True), None
    ).sum().backward()
    assert "aten.cat.default" in seen and not any("select" in name for name in seen)
