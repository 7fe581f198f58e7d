"""What OpenCLIP's native ViT configs ask for, one by one: against every token computed by plain torch, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train.models.config import IMAGE_MEAN, IMAGE_STD, parse_architecture
from tests.models.small import inputs, small_architecture, small_model

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "read at an id": {"text_cfg": {"pool_type": "eos", "eos_id": 7}},
}


def architecture(case: str) -> Any:
    content = small_architecture().model_cfg()
    return parse_architecture(
        content | {key: content[key] | own for key, own in CASES[case].items()}, "test"
    )


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
        x = x + F.linear(h, w["attn.out_proj.weight"], w["attn.out_proj.bias"]) * w.get(
            "ls_1.gamma", 1.0
        )
        h = F.gelu(F.linear(F.layer_norm(x, (width,), w["ln_2.weight"], w["ln_2.bias"]), w["mlp.c_fc.weight"],
                            w["mlp.c_fc.bias"]))  # fmt: skip
        x = x + F.linear(h, w["mlp.c_proj.weight"], w["mlp.c_proj.bias"]) * w.get("ls_2.gamma", 1.0)
    return x


def oracle(
    p: dict[str, Tensor], vision: Any, text: Any, images: Tensor, texts: Tensor
) -> tuple[Tensor, Tensor]:
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
    if not vision.get("no_ln_pre"):
        x = F.layer_norm(x, (32,), p["visual.ln_pre.weight"], p["visual.ln_pre.bias"])
    x = blocks(p, "visual.transformer.", x, 2, None)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (32,), p["visual.ln_post.weight"], p["visual.ln_post.bias"])

    if vision.get("pool_type") == "avg":
        x = norm(x[:, 1:].mean(1)) if vision.get("final_ln_after_pool") else norm(x[:, 1:]).mean(1)
    else:
        x = norm(x[:, 0])
    mask = (
        None
        if text.get("no_causal_mask")
        else torch.full((8, 8), -math.inf, dtype=torch.float64).triu(1)
    )
    t = blocks(
        p, "transformer.", p["token_embedding.weight"][texts] + p["positional_embedding"], 2, mask
    )
    place = {
        "first": lambda ids: 0,
        "last": lambda ids: 7,
        "eos": lambda ids: ids.index(7) if 7 in ids else 0,
        "argmax": lambda ids: ids.index(max(ids)),
    }[text.get("pool_type", "argmax")]
    t = torch.stack([row[place(ids)] for row, ids in zip(t, texts.tolist(), strict=True)])
    t = F.layer_norm(t, (20,), p["ln_final.weight"], p["ln_final.bias"])
    return F.normalize(x @ p["visual.proj"], dim=1), F.normalize(t @ p["text_projection"], dim=1)


@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_features_and_gradients_are_plain_torchs(case: str, activation_checkpointing: bool):
    model = small_model(
        dtype=torch.float64,
        architecture=architecture(case),
        activation_checkpointing=activation_checkpointing,
    )
    torch.manual_seed(2)
    for each in model.parameters():
        each.data += 0.1 * torch.randn_like(each)
    images, texts, _ = inputs(6)
    for i in range(5):  # the sixth has none of this id
        texts[i, i + 1] = 7
    texts[1, 5] = 7
    leaves = {
        name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()
    }
    expected = oracle(
        leaves, *(CASES[case].get(key, {}) for key in ("vision_cfg", "text_cfg")), images, texts
    )
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


@pytest.mark.parametrize("case", CASES)
def test_a_text_may_be_cut_behind_its_end(case: str):
    _, texts, _ = inputs(3)
    texts[:, 2] = 7
    model = small_model(dtype=torch.float64, architecture=architecture(case))
    cut = 4 if case == "read at an id" else 8
    torch.testing.assert_close(
        model(None, texts[:, :cut])[1], model(None, texts)[1], rtol=0, atol=1e-14
    )
