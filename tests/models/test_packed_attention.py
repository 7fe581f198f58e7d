"""Packed texts with variable-length attention, which only a GPU has: its place is taken by a loop over the texts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import varlen

from clip_train.models.blocks import Packing
from clip_train.models.clip import build_model
from clip_train.models.lora import Lora
from tests.models.small import small_architecture

CONTEXT = 20
LENGTHS = [3, 8, 1, 5, 20, 2, 8]
TEXT = {"context_length": CONTEXT, "vocab_size": 100, "width": 20, "heads": 2, "layers": 2}
calls: list[tuple[int, int]] = []  # the longest query and the number of queries, of each call


def each_text(q, k, v, starts_q, starts_k, max_q, max_k, *, window_size):
    """Attention within each text. Flash attention aligns the last query with the last key, and (-1, 0) hides the keys
    behind each query."""
    calls.append((max_q, len(q)))
    assert (q.dtype, starts_q.dtype, starts_k.dtype) == (k.dtype, torch.int32, torch.int32)
    assert starts_q[-1] == len(q) and starts_k[-1] == len(k) == len(v)
    assert max(starts_q.diff()) <= max_q and max(starts_k.diff()) <= max_k
    parts = []
    for i in range(len(starts_k) - 1):
        queries, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
        scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys]) / q.shape[2] ** 0.5
        if window_size == (-1, 0):
            num_q, num_k = scores.shape[1:]
            visible = torch.ones(num_q, num_k).tril(num_k - num_q).bool()
            scores = scores.masked_fill(~visible, -torch.inf)
        else:
            assert window_size == (-1, -1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys]))
    return torch.cat(parts)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    calls.clear()
    monkeypatch.setattr(varlen, "varlen_attn", each_text)


def transformed(packed, lora=None, checkpointing=False):
    """The features of texts, those of their last tokens, and all gradients."""
    architecture = small_architecture(text_cfg=TEXT).model_copy(update={"lora": lora})
    torch.manual_seed(3)
    model = build_model(architecture, dropout=0.3, activation_checkpointing=checkpointing)
    model = model.double().train()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    seeds = torch.arange(len(LENGTHS)) + 70
    token = torch.tensor(LENGTHS) - 1
    x = torch.randn(len(LENGTHS), CONTEXT, 20, dtype=torch.float64, requires_grad=True)
    out = x
    packing = None
    if packed:
        packing = Packing.of(token, CONTEXT, sum(LENGTHS), seeds, flash=True)
        out = packing.packed(x)
    out = model.transformer(out, seeds, token, packing)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    gradients = {
        name: p.grad for name, p in model.transformer.named_parameters() if p.grad is not None
    }
    return out, x.grad, gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [None, Lora(rank=2, on=("attention", "mlp"))])
def test_packed_texts_have_the_features_and_gradients_of_padded(lora, checkpointing):
    padded = transformed(False, lora, checkpointing)
    assert not calls
    packed = transformed(True, lora, checkpointing)
    assert calls
    torch.testing.assert_close(packed, padded, rtol=1e-9, atol=1e-13)


def test_the_last_block_has_one_query_a_text():
    transformed(True)
    assert calls == [(CONTEXT, sum(LENGTHS)), (1, len(LENGTHS))]
