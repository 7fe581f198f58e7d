"""What the last block is spared, and padding behind texts: against every token computed, written out in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train.models.dropout import SampleDropout
from clip_train.models.openclip.config import IMAGE_MEAN, IMAGE_STD
from clip_train.task import Batch, text_lengths
from tests.models.small import inputs, small_architecture, small_model
from tests.toy import columns_of

VISION_HEADS, TEXT_HEADS, LAYERS = 2, 2, 2


def hashes(seeds: Tensor, layer_id: int, count: int) -> np.ndarray:
    """splitmix64 on numpy's unsigned integers: [b, count]."""

    def mix(x: np.ndarray) -> np.ndarray:
        z = x + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    key = mix(mix(seeds.numpy().view(np.uint64)) + np.uint64(layer_id))
    return mix(key[:, None] + np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def dropped(x: Tensor, seeds: Tensor, layer_id: int, p: float) -> Tensor:
    b, L, width = x.shape
    share = round(p * 65536)
    values = hashes(seeds, layer_id, -(-L * width // 4)).astype("<u8").view("<i2")[:, : L * width]
    keep = torch.from_numpy(values.astype(np.int64) >= share - 32768).view(b, L, width)
    return x * keep * (65536 / (65536 - share))


def all_tokens(
    p: dict[str, Tensor], prefix: str, x: Tensor, heads: int, causal: bool, drop: Any
) -> Tensor:
    """Every block over every token."""
    b, L, width = x.shape
    for i in range(LAYERS):
        w = {name: p[f"{prefix}transformer.resblocks.{i}.{name}"] for name in BLOCK}
        h = F.layer_norm(x, (width,), w["ln_1.weight"], w["ln_1.bias"])
        parts = (h @ w["attn.in_proj_weight"].T + w["attn.in_proj_bias"]).chunk(3, dim=-1)
        q, k, v = (part.view(b, L, heads, -1).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(2, 3) / (width / heads) ** 0.5
        if causal:
            scores = scores + torch.full((L, L), -torch.inf, dtype=x.dtype).triu(1)
        h = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, L, width)
        x = x + drop(h @ w["attn.out_proj.weight"].T + w["attn.out_proj.bias"], 2 * i)
        h = F.layer_norm(x, (width,), w["ln_2.weight"], w["ln_2.bias"])
        h = F.gelu(h @ w["mlp.c_fc.weight"].T + w["mlp.c_fc.bias"])
        x = x + drop(h @ w["mlp.c_proj.weight"].T + w["mlp.c_proj.bias"], 2 * i + 1)
    return x


BLOCK = [
    *("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"),
    *("attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight", "attn.out_proj.bias"),
    *("mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"),
]


def oracle(
    p: dict[str, Tensor],
    images: Tensor,
    texts: Tensor,
    seeds: Tensor,
    rate: float,
    patch_rate: float,
) -> Any:
    mean, std = (
        torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (IMAGE_MEAN, IMAGE_STD)
    )
    x = (
        F.conv2d((images.double() / 255 - mean) / std, p["visual.conv1.weight"], stride=4)
        .flatten(2)
        .transpose(1, 2)
    )
    x = (
        torch.cat([p["visual.class_embedding"].expand(len(x), 1, -1), x], 1)
        + p["visual.positional_embedding"]
    )
    if patch_rate:
        order = np.argsort(-hashes(seeds, 1, 16).view(np.int64), axis=1)[
            :, : int(16 * (1 - patch_rate))
        ]
        kept = torch.from_numpy(np.sort(order, axis=1)) + 1
        x = torch.stack([torch.cat([row[:1], row[own]]) for row, own in zip(x, kept, strict=True)])
    x = F.layer_norm(x, (32,), p["visual.ln_pre.weight"], p["visual.ln_pre.bias"])
    x = all_tokens(
        p, "visual.", x, VISION_HEADS, False, lambda h, i: dropped(h, seeds, (1 << 16) + i, rate)
    )
    x = (
        F.layer_norm(x, (32,), p["visual.ln_post.weight"], p["visual.ln_post.bias"])[:, 0]
        @ p["visual.proj"]
    )
    t = p["token_embedding.weight"][texts] + p["positional_embedding"]
    t = all_tokens(p, "", t, TEXT_HEADS, True, lambda h, i: dropped(h, seeds, (2 << 16) + i, rate))
    t = F.layer_norm(t, (t.shape[2],), p["ln_final.weight"], p["ln_final.bias"])
    t = torch.stack(
        [row[(text == 99).nonzero().item()] for row, text in zip(t, texts, strict=True)]
    )
    return F.normalize(x, dim=1), F.normalize(t @ p["text_projection"], dim=1)


def small(width: int, **options: Any) -> Any:
    text = {
        "context_length": 8,
        "vocab_size": 100,
        "width": width,
        "heads": TEXT_HEADS,
        "layers": LAYERS,
    }
    model = small_model(
        dtype=torch.float64, architecture=small_architecture(text_cfg=text), **options
    )
    torch.manual_seed(2)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # away from zero biases and unit norms
    return model


@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.parametrize(
    "width", [20, 18]
)  # 18: a token does not begin where one of dropout's hashes does
@pytest.mark.parametrize("rate, patch_rate", [(0.0, 0.0), (0.3, 0.5)])
def test_features_and_gradients_are_those_of_all_tokens(
    width, rate, patch_rate, activation_checkpointing
):
    model = small(
        width,
        dropout=rate,
        patch_dropout=patch_rate,
        activation_checkpointing=activation_checkpointing,
    ).train()
    images, texts, seeds = inputs(7)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = oracle(leaves, images, texts, seeds, rate, patch_rate)
    ours = model(images, texts, seeds)[:2]
    torch.manual_seed(9)
    cotangents = [torch.randn(7, 24, dtype=torch.float64) for _ in range(2)]
    sum((f * c).sum() for f, c in zip(expected, cotangents, strict=True)).backward()
    sum((f * c).sum() for f, c in zip(ours, cotangents, strict=True)).backward()
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    for name, p in model.named_parameters():
        if name not in ("logit_scale", "logit_bias"):
            torch.testing.assert_close(
                p.grad, leaves[name].grad, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: n + m
            )


def batch_of(lengths: list[int], context: int) -> Batch:
    images, _, seeds = inputs(len(lengths))
    texts = torch.zeros(len(lengths), context, dtype=torch.int64)
    for row, length in zip(texts, lengths, strict=True):
        row[: length - 1] = torch.arange(1, length) % 90 + 1
        row[length - 1] = 99
    return Batch(columns_of(images, texts, seeds, text_lengths=text_lengths(texts)))


def test_texts_are_cut_where_the_longest_of_a_micro_batch_ends():
    batch = batch_of([3, 8, 9, 5, 20, 2, 4], context=20)
    assert batch.columns["text_lengths"] == [3, 8, 9, 5, 20, 2, 4]
    cut = batch.micro_batches(2)  # from short to long; equally long ones stay in order
    assert [m.texts.shape[1] for m in cut] == [8, 8, 16, 20]
    assert torch.cat([m.places for m in cut]).tolist() == [5, 0, 6, 3, 1, 2, 4]
    assert [m.texts.shape[1] for m in batch.to(torch.device("cpu")).micro_batches(7)] == [20]
    batch.columns = batch.columns.without("text_lengths")  # another model may read all of it
    assert [m.texts.shape[1] for m in batch.micro_batches(2)] == [20] * 4


@pytest.mark.parametrize("micro_size", [1, 2, 5])
def test_a_cut_text_gives_the_same_features_and_gradients(micro_size):
    text = {"context_length": 20, "vocab_size": 100, "width": 20, "heads": 2, "layers": 2}
    batch = batch_of([3, 8, 9, 5, 16], context=20)
    outcomes = []
    for cut in (False, True):
        model = small_model(
            dtype=torch.float64, architecture=small_architecture(text_cfg=text), dropout=0.3
        )
        if cut:
            cuts = batch.micro_batches(micro_size)
            features = torch.cat([model(None, m.texts, m.sample_seeds)[1] for m in cuts])
            if len(cuts) > 1:
                features = features[torch.cat([m.places for m in cuts]).argsort()]
        else:
            features = model(None, batch.texts, batch.sample_seeds)[1]
        (features * torch.linspace(-1, 1, features.numel()).view_as(features)).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        outcomes.append((features, gradients))
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-10, atol=1e-13)
    assert not outcomes[1][1]["positional_embedding"][16:].any()


@pytest.mark.parametrize("width", [4, 5, 6, 7])
def test_one_token_gets_the_mask_that_it_has_among_all(width):
    layer = SampleDropout(0.4, layer_id=3)
    x, seeds, at = torch.randn(50, 9, width), torch.arange(50), torch.arange(50) % 9
    assert torch.equal(
        layer(x[torch.arange(50), at], seeds, at), layer(x, seeds)[torch.arange(50), at]
    )
