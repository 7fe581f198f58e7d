"""Adapters against textbook formulas in float64, dropout under any cut, and what a checkpoint holds of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from clip_train.engines.base import PlainEngine
from clip_train.errors import UserError
from clip_train.models.clip import CLIP, build_model
from clip_train.models.config import ModelConfig
from clip_train.models.freeze import freeze, frozen_names
from clip_train.models.lora import Lora
from clip_train.models.low_rank import adapt, merged
from clip_train.models.weights import WholeState
from tests.models.small import inputs, small_architecture, small_model


def adapted(lora: Lora, *, learned: bool = True, **options) -> CLIP:
    """learned: B is not 0."""
    torch.manual_seed(0)
    model = build_model(small_architecture().model_copy(update={"lora": lora}), **options).double()
    freeze(model, ModelConfig(lora=lora))
    for name, p in model.named_parameters():
        if learned and name.endswith("lora_B"):
            p.data.normal_(std=0.3)
    return model


def textbook(model: CLIP, factor: float, rank: int) -> dict[str, Tensor]:
    """Of a plain model: W + factor B A; of packed attention weights for each third of the rows."""
    named = dict(model.named_parameters())
    out = {name: p for name, p in named.items() if "lora" not in name}
    for name, p in out.items():
        layer = name.rpartition(".")[0]
        A, B = named.get(f"{layer}.lora_A"), named.get(f"{layer}.lora_B")
        if A is not None and B is not None and p.ndim == 2:
            delta = [b @ a for a, b in zip(A.split(rank), B.chunk(len(A) // rank), strict=True)]
            out[name] = p + factor * torch.cat(delta)
    return out


def parts(model: CLIP, sizes: list[int], **more: int) -> list[Tensor]:
    """Features of 6 samples in micro-batches, and gradients of what is trained."""
    cut = zip(*(x.split(sizes) for x in inputs(6)), strict=True)
    out = [torch.cat(each) for each in zip(*(model(*x, **more)[:2] for x in cut), strict=True)]
    weights = torch.linspace(-1, 1, 24, dtype=torch.float64)
    trained = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    return [*out, *torch.autograd.grad(sum((x * weights).sum() for x in out), trained)]


@pytest.mark.parametrize("on", [("attention", "mlp"), ("in_proj_weight",), ("visual.*.c_fc",)])
def test_float64_equals_the_textbook_and_the_merged_model(on):
    lora = Lora(rank=3, alpha=6, on=on)
    model, plain = adapted(lora), small_model(dtype=torch.float64)
    weights = textbook(model, 6 / 3, 3)
    expected = functional_call(plain, weights, inputs(6))
    for ours, truth in zip(model(*inputs(6)), expected[:3], strict=False):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-13)
    plain.load_state_dict(merged(model.state_dict(), lora))
    for ours, truth in zip(model(*inputs(6)), plain(*inputs(6))[:3], strict=False):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-13)
    ones = torch.ones(24, dtype=torch.float64)
    sum((x @ ones).sin().sum() for x in model(*inputs(6))[:2]).backward()
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    total = sum((x @ ones).sin().sum() for x in functional_call(plain, weights, inputs(6))[:2])
    truths = torch.autograd.grad(total, [*trained.values()])
    assert trained and all("lora" in name for name in trained)
    for p, truth in zip(trained.values(), truths, strict=True):
        torch.testing.assert_close(p.grad, truth, rtol=1e-10, atol=1e-13)


class Fused(nn.Module):
    """Attention whose queries, keys and values are one product, then a pool, as in timm's towers."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.attn_pool = nn.Module(), nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.attn_pool.q, self.attn_pool.kv = nn.Linear(8, 8), nn.Linear(8, 16)
        self.attn_pool.proj, self.attn_pool.mlp = nn.Linear(8, 8), nn.Module()
        self.attn_pool.mlp.fc1 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[b, L, 8] -> [b, 8]"""
        q, k, v = self.attn.qkv(x).chunk(3, dim=-1)
        x = self.attn.proj((q @ k.mT).softmax(-1) @ v)
        k, v = self.attn_pool.kv(x).chunk(2, dim=-1)
        x = self.attn_pool.proj((self.attn_pool.q(x.mean(1, True)) @ k.mT).softmax(-1) @ v)
        return (x + self.attn_pool.mlp.fc1(x))[:, 0]


@pytest.mark.parametrize("on", ["attention", "qkv", "kv"])
def test_fused_layers_have_an_adapter_for_each_projection(on):
    """The same as adapters of three layers, by the textbook."""
    torch.manual_seed(0)
    base = Fused().double()
    model = copy.deepcopy(base)
    adapt(model, Lora(rank=2, alpha=6, on=(on,)))
    model.double()
    for name, p in model.named_parameters():
        if name.endswith("lora_B"):
            p.data.normal_()
    sizes = {name: len(p) // 2 for name, p in model.named_parameters() if name.endswith("lora_A")}
    attention = {
        "attn.qkv": 3,
        "attn.proj": 1,
        "attn_pool.q": 1,
        "attn_pool.kv": 2,
        "attn_pool.proj": 1,
    }
    expected = {"attention": attention, "qkv": {"attn.qkv": 3}, "kv": {"attn_pool.kv": 2}}[on]
    assert sizes == {f"{name}.lora_A": count for name, count in expected.items()}
    x = torch.randn(5, 4, 8, dtype=torch.float64)
    found, truth = model(x), functional_call(base, textbook(model, 6 / 2, 2), x)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(found, base(x), rtol=1e-3)
    base.load_state_dict(merged(model.state_dict(), Lora(rank=2, alpha=6, on=(on,))))
    torch.testing.assert_close(found, base(x), rtol=1e-12, atol=1e-13)


def test_it_begins_as_its_base_to_the_bit():
    model, base = adapted(Lora(), learned=False).float(), small_model().requires_grad_(False)
    for ours, truth in zip(model(*inputs(6)), base(*inputs(6))[:3], strict=False):
        assert torch.equal(ours, truth)


def test_dropout_belongs_to_the_sample():
    """However samples are cut and packed, and blocks are computed again."""
    lora = Lora(rank=3, dropout=0.4)
    whole = parts(adapted(lora), [6])
    lengths = int((inputs(6)[1].argmax(1) + 1).sum())
    others = [parts(adapted(lora), [6], num_tokens=lengths)]
    for recomputes in (True, "pointwise"):
        others += [
            parts(adapted(lora, activation_checkpointing=recomputes), [1, 2, 3]),
            parts(adapted(lora, activation_checkpointing=recomputes), [6], num_tokens=lengths),
        ]
    for other in others:
        for x, expected in zip(other, whole, strict=True):
            torch.testing.assert_close(x, expected, rtol=1e-10, atol=1e-13)
    none = parts(adapted(Lora(rank=3)), [6])
    assert not any(torch.allclose(x, y, rtol=1e-3) for x, y in zip(whole, none, strict=True))


def test_mistakes_name_what_is_near():
    for on, message in {
        "c_fcc": r"model.lora.on \(\[c_fcc\]\): no layer's name ends with c_fcc; give one of c_fc,",
        "q_proj": r"give one of c_proj, out_proj, in_proj_weight, or attention, mlp or linear",
    }.items():
        with pytest.raises(UserError, match=message):
            adapted(Lora(on=(on,)))
    with pytest.raises(UserError, match=r"model.lora.train \(\[projj\]\): projj matches none"):
        adapted(Lora(train=("projj",)))


def test_a_checkpoint_holds_trained_weights_to_lay_over_the_base():
    lora = Lora(rank=2, train=("*proj",))
    model, other = adapted(lora), adapted(lora, learned=False)
    engines = [PlainEngine(each, torch.optim.AdamW(each.parameters())) for each in (model, other)]
    for engine in engines:
        engine.saves_frozen = False
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    saved = {f.name: f.tensors["param"].clone() for f in engines[0].state_fragments()}
    names = dict(model.named_parameters())
    adapters = {name for name in names if "lora" in name}
    assert saved.keys() == trained == adapters | {"visual.proj", "logit_scale"}
    assert frozen_names(ModelConfig(lora=lora), names) == names.keys() - trained

    class Saved(WholeState):
        def slots(self, name: str) -> set[str]:
            return {"param"} if name in saved else set()

    engines[1].load_fragments(Saved(saved), {})
    for ours, truth in zip(other(*inputs(6)), model(*inputs(6))[:3], strict=False):
        assert torch.equal(ours, truth)
