"""Both towers of a native ViT against every token computed by plain torch, in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train.models.openclip.config import IMAGE_MEAN, IMAGE_STD
from tests.models.small import inputs, small_model


def blocks(p: dict[str, Tensor], prefix: str, x: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    width = x.shape[2]
    for i in range(2):
        w = {
            name.removeprefix(key): t
            for name, t in p.items()
            if name.startswith(key := f"{prefix}resblocks.{i}.")
        }
        h = F.layer_norm(x, (width,), w["ln_1.weight"], w["ln_1.bias"])
        q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in
                   F.linear(h, w["attn.in_proj_weight"], w["attn.in_proj_bias"]).chunk(3, dim=2))  # fmt: skip
        scores = q @ k.transpose(2, 3) / math.sqrt(width // heads) + (0 if mask is None else mask)
        h = (scores.softmax(3) @ v).transpose(1, 2).flatten(2)
        x = x + F.linear(h, w["attn.out_proj.weight"], w["attn.out_proj.bias"])
        h = F.gelu(F.linear(F.layer_norm(x, (width,), w["ln_2.weight"], w["ln_2.bias"]), w["mlp.c_fc.weight"],
                            w["mlp.c_fc.bias"]))  # fmt: skip
        x = x + F.linear(h, w["mlp.c_proj.weight"], w["mlp.c_proj.bias"])
    return x


def oracle(p: dict[str, Tensor], images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
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
    x = F.layer_norm(x, (32,), p["visual.ln_pre.weight"], p["visual.ln_pre.bias"])
    x = blocks(p, "visual.transformer.", x, 2, None)
    x = F.layer_norm(x[:, 0], (32,), p["visual.ln_post.weight"], p["visual.ln_post.bias"])
    mask = torch.full((8, 8), -math.inf, dtype=torch.float64).triu(1)
    t = blocks(
        p, "transformer.", p["token_embedding.weight"][texts] + p["positional_embedding"], 2, mask
    )
    t = torch.stack([row[ids.index(max(ids))] for row, ids in zip(t, texts.tolist(), strict=True)])
    t = F.layer_norm(t, (20,), p["ln_final.weight"], p["ln_final.bias"])
    return F.normalize(x @ p["visual.proj"], dim=1), F.normalize(t @ p["text_projection"], dim=1)


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_features_and_gradients_are_plain_torchs(activation_checkpointing: bool):
    model = small_model(dtype=torch.float64, activation_checkpointing=activation_checkpointing)
    torch.manual_seed(2)
    for each in model.parameters():
        each.data += 0.1 * torch.randn_like(each)
    images, texts, _ = inputs(6)
    leaves = {
        name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()
    }
    expected = oracle(leaves, images, texts)
    ours = model(images, texts)[:2]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)
    cotangents = [torch.randn(6, 24, dtype=torch.float64) for _ in range(2)]
    for features in (ours, expected):
        sum((f * c).sum() for f, c in zip(features, cotangents, strict=True)).backward()
    for name, each in model.named_parameters():
        if name != "logit_scale":
            torch.testing.assert_close(
                each.grad, leaves[name].grad, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: n + m
            )


def test_a_text_may_be_cut_behind_its_end():
    _, texts, _ = inputs(3)
    texts[:, 2] = 99  # the highest id
    model = small_model(dtype=torch.float64)
    torch.testing.assert_close(
        model(None, texts[:, :3])[1], model(None, texts)[1], rtol=0, atol=1e-14
    )
