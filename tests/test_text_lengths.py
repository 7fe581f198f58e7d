"""Samples in the order of their texts' lengths, and without their padding: nobody sees it but the one who counts FLOPs.

The oracle is one graph over whole contexts in the canonical order, and textbook losses.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from clip_train import dist
from clip_train.engines.base import PlainEngine
from clip_train.losses.info_nce import InfoNCE
from clip_train.losses.sigmoid import SigmoidLoss
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step, two_pass
from clip_train.task import NO_CONTEXT, Batch, Context, LossOutput, Objective, text_lengths
from tests import tolerances
from tests.engine.layouts import engine_at
from tests.models.small import inputs, small_architecture, small_model
from tests.ranks import run_ranks
from tests.toy import columns_of, oracle_loss, share

N, CONTEXT = 13, 24
TEXT = {"context_length": CONTEXT, "vocab_size": 100, "width": 20, "heads": 2, "layers": 2}
LAYOUTS = {2: ["zero 2", "zero 3"], 3: ["zero 2", "fsdp 3"]}  # which send within each micro-batch
KINDS = ("info_nce", "sigmoid", "by key")


class ByKey(Objective):
    """Each pair has a weight of its own: only rows in the order of their keys give the gradient."""

    def prepare(self, micro_batch):
        return {"seeds": micro_batch.sample_seeds[:, None]}

    def __call__(self, features, context=NO_CONTEXT):
        keys = torch.tensor([int(key) for key in context.columns["keys"]])
        assert context.prepared["seeds"][:, 0].tolist() == keys.tolist()
        image, text = features["image"], features["text"]
        weight = weights(keys).to(image.dtype)[:, None]
        loss = (weight * image * text).sum().double()
        dist.all_reduce_sum(loss)
        gradients = {"image": weight * text, "text": weight * image}
        zeros = {"logit_scale": torch.zeros_like(features["logit_scale"])}
        return LossOutput(loss, gradients | zeros)


def weights(keys):
    return torch.sin(keys.double())


def model(kind: str, dtype: torch.dtype):
    architecture = small_architecture(
        text_cfg=TEXT, init_logit_bias=-3.0 if kind == "sigmoid" else None
    )
    return small_model(dtype=dtype, architecture=architecture, dropout=0.3).train()


def whole_batch() -> Batch:
    """Texts of 3 to 23 tokens, the longest in the midst."""
    images, _, _ = inputs(N)
    lengths = torch.tensor([(7 * i) % 21 + 3 for i in range(N)])
    texts = torch.randint(1, 99, (N, CONTEXT), generator=torch.Generator().manual_seed(2))
    texts[torch.arange(N), lengths - 1] = 99
    texts[torch.arange(CONTEXT) >= lengths[:, None]] = 0
    return Batch(
        columns_of(images, texts, torch.arange(N) + 70, keys=[str(i + 70) for i in range(N)])
    )


def oracle(kind: str, dtype: torch.dtype):
    clip, batch = model(kind, dtype), whole_batch()
    image, text, scale, bias = clip(batch.images, batch.texts, batch.sample_seeds)
    if kind == "info_nce":
        loss = oracle_loss(image, text, scale)
    elif kind == "sigmoid":
        signs = 2 * torch.eye(N, dtype=dtype) - 1
        loss = -F.logsigmoid(signs * (scale * image @ text.T + bias)).sum() / N
    else:
        loss = (
            weights(batch.sample_seeds).to(dtype) * (image * text).sum(1)
        ).sum() + 0 * scale.sum()
    loss.backward()
    return loss.item(), flat_gradient(clip)


def flat_gradient(clip):
    return torch.cat([p.grad.flatten() for p in clip.parameters() if p.grad is not None])


def objective(kind: str) -> Objective:
    return {"info_nce": InfoNCE, "sigmoid": SigmoidLoss, "by key": ByKey}[kind]()


def on_ranks(kind: str, dtype: torch.dtype, micro_size: int, pack: bool):
    """Loss and gradient, summed over the ranks."""
    own = share(whole_batch(), dist.rank(), dist.world_size())
    columns = own.columns.plus(text_lengths=text_lengths(own.texts))
    own = replace(own, columns=columns, pack_texts=pack)
    assert pack == any(m.num_tokens is not None for m in own.micro_batches(micro_size))
    engine = PlainEngine(model(kind, dtype))
    output = two_pass(
        engine,
        own.micro_batches(micro_size),
        objective(kind),
        Context(N, own.columns),
        kept_graphs=2,
    )
    gradient = [p.grad for p in engine.module.parameters() if p.grad is not None]
    for each in gradient:
        dist.all_reduce_sum(each)
    return output.loss.item(), torch.cat([each.flatten() for each in gradient])


def cases():
    sizes = [(2, False), (3, False), (3, True), (N, True)]
    return [(kind, dtype, *size) for kind in KINDS for dtype in TOLERANCE for size in sizes]


def all_cases():
    return [on_ranks(*case) for case in cases()]


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gradient_is_that_of_whole_texts_in_their_order(world_size):
    told = [all_cases()] if world_size == 1 else run_ranks(all_cases, world_size)
    expected = {(kind, dtype): oracle(kind, dtype) for kind in KINDS for dtype in TOLERANCE}
    for of_rank in told:
        for (kind, dtype, *_), (loss, gradient) in zip(cases(), of_rank, strict=True):
            its_loss, its_gradient = expected[kind, dtype]
            assert loss == pytest.approx(its_loss, rel=TOLERANCE[dtype])
            error = (gradient - its_gradient).norm() / its_gradient.norm()
            assert error < TOLERANCE[dtype], (kind, dtype, error)


def captions(n: int) -> Batch:
    """Texts of 24 tokens on average, most of them shorter, as captions of the web are."""
    drawn = 22 * torch.exp(0.45 * torch.randn(n, generator=torch.Generator().manual_seed(4)))
    lengths = drawn.round().long().clamp(3, 77)
    texts = torch.ones(n, 77, dtype=torch.int64)
    texts[torch.arange(n), lengths - 1] = 99
    images = torch.zeros(n, 3, 16, 16, dtype=torch.uint8)
    return Batch(columns_of(images, texts, torch.arange(n), text_lengths=text_lengths(texts)))


def test_sorted_and_packed_texts_take_fewer_operations():
    """Text tower alone, its cost in tokens: the linear layers of one block over all of them."""
    batch = captions(256)
    assert sum(batch.columns["text_lengths"]) == pytest.approx(24 * 256, rel=0.03)
    architecture = small_architecture(
        text_cfg=TEXT | {"context_length": 77, "width": 512, "heads": 8}
    )
    clip = small_model(architecture=architecture).to("meta")

    def flops(micro_batches) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            for texts, tokens in micro_batches:
                clip(None, texts.to("meta"), num_tokens=tokens)
        return counter.get_total_flops()

    def of_micro_batches(size: int) -> int:
        return flops((m.texts, m.num_tokens) for m in batch.micro_batches(size))

    padded = flops([(batch.texts, None)])
    lengths = batch.columns["text_lengths"]
    parts = [(batch.texts[i : i + 32], lengths[i : i + 32]) for i in range(0, 256, 32)]
    cut = flops((texts[:, : min(77, -(-max(n) // 8) * 8)], None) for texts, n in parts)
    ordered = of_micro_batches(32)
    batch.pack_texts = True
    packed, whole = of_micro_batches(32), of_micro_batches(256)
    share = {"cut": cut, "sorted": ordered, "packed": packed, "packed at once": whole}
    print({name: round(value / padded, 3) for name, value in share.items()})
    assert packed < 0.85 * ordered < 0.85 * 0.65 * cut and whole < 0.4 * padded


def unlike() -> Batch:
    """Of texts of 3 or 4 tokens and full ones, in two halves: ranks have nothing in common."""
    batch = whole_batch()
    lengths = torch.tensor([3 + i % 2 if i < 5 else CONTEXT for i in range(N)])
    texts = torch.randint(1, 99, (N, CONTEXT), generator=torch.Generator().manual_seed(5))
    batch.columns = batch.columns.plus(texts=texts)
    batch.texts[torch.arange(N), lengths - 1] = 99
    batch.texts[torch.arange(CONTEXT) >= lengths[:, None]] = 0
    return batch


def clip_with_checkpoints(checkpointing: bool):
    architecture = small_architecture(text_cfg=TEXT)
    return small_model(
        architecture=architecture, dropout=0.3, activation_checkpointing=checkpointing
    )


def on_engine(layout: str, pack: bool, kept: int) -> list[float]:
    """Losses and norms of three steps, and the norm of the weights behind them."""
    make = partial(clip_with_checkpoints, kept > 1)
    engine = engine_at(layout, make, OptimConfig(name="sgd", lr=0.1, weight_decay=0.0))
    results = []
    for whole in (unlike(), whole_batch(), unlike()):
        own = share(whole, dist.rank(), dist.world_size())
        columns = own.columns.plus(text_lengths=text_lengths(own.texts))
        own = replace(own, columns=columns, pack_texts=pack)
        results.append(train_step(engine, own, InfoNCE(), micro_size=2, kept_graphs=kept, lr=0.1))
    weights = [fragment.tensors["param"].clone() for fragment in engine.state_fragments()]
    engine.close()
    told = [value for each in results for value in (each.loss, each.grad_norm)]
    return [*told, torch.cat(weights).norm().item()]


def on_engines(layouts: list[str]) -> list[tuple[list[float], list[float]]]:
    return [
        (on_engine(layout, True, kept), on_engine(layout, False, kept))
        for layout in layouts
        for kept in (1, 3)
    ]


@pytest.mark.engine
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_packed_texts_on_engines(world_size):
    """Ranks of short and of full texts build the same graph, or ZeRO 2 sums what is not alike."""
    for of_rank in run_ranks(on_engines, world_size, LAYOUTS[world_size]):
        for packed, padded in of_rank:
            assert packed == pytest.approx(padded, rel=tolerances.norm(3, "sgd"))
