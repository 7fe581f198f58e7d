"""Losses that add up over samples, beside the contrastive one, against autograd over the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clip_train import dist
from clip_train.engines.base import PlainEngine
from clip_train.losses.config import LossConfig
from clip_train.losses.info_nce import InfoNCE
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step
from tests import tolerances
from tests.covering import pairwise
from tests.engine.layouts import engine_at
from tests.ranks import run_ranks
from tests.toy import FEATURES, ToyCLIP, oracle_loss, share, toy_batch

SIZES, LR = (23, 8, 14), 0.3
WEIGHTS = {"contrastive_loss": 0.7, "word_loss": 2.0}
VARIANTS = ("none", "visual", "text", "head")  # what is frozen
VOCABULARY = 16


class Captioning(ToyCLIP):
    """Guesses a text's words, but 0, from both features; and, as a second loss, each pixel's mean from the image's."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2 * FEATURES, 6 * VOCABULARY)
        self.pixels = nn.Linear(FEATURES, 12)

    def guesses(self, images, texts):
        image, text, scale, _ = super().forward(images, texts)
        both = torch.cat([image, text], dim=1).to(self.head.weight.dtype)
        words = self.head(both).unflatten(1, (6, VOCABULARY)).to(scale.dtype)
        errors = self.pixels(image.to(self.pixels.weight.dtype)).to(scale.dtype)
        return image, text, scale, words, errors - images.flatten(1).to(scale.dtype) / 255

    def forward(self, images, texts, sample_seeds=None):
        if images is None or texts is None:
            return super().forward(images, texts, sample_seeds)
        image, text, scale, words, errors = self.guesses(images, texts)
        terms = F.cross_entropy(words.transpose(1, 2), texts, ignore_index=0, reduction="none")
        counted = (texts != 0).sum(dim=1)
        word_loss = torch.stack([terms.sum(dim=1), counted.to(terms)], dim=1)
        squares = torch.stack([errors.square().sum(dim=1), torch.full_like(errors[:, 0], 12)], 1)
        return image, text, scale, None, {"word_loss": word_loss, "pixel_loss": squares}


def model_of(frozen: str):
    torch.manual_seed(3)
    model = Captioning()
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    return model


def batch_of(step: int):
    batch = toy_batch(SIZES[step], seed=step)
    lengths = torch.arange(SIZES[step])[:, None] % 5 + 1  # of most samples less than all words
    batch.texts[torch.arange(6)[None] > lengths] = 0
    return batch


def oracle(frozen: str):
    model, told = model_of(frozen).double(), []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR)
    for step in range(len(SIZES)):
        batch = batch_of(step)
        image, text, scale, words, errors = model.guesses(batch.images, batch.texts)
        by_word = F.cross_entropy(words.flatten(0, 1), batch.texts.flatten(), ignore_index=0)
        parts = [oracle_loss(image, text, scale), by_word, errors.square().mean()]
        loss = 0.7 * parts[0] + 2 * parts[1] + parts[2]
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        told += [loss.item(), torch.stack(gradients).norm().item(), *(x.item() for x in parts)]
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), told


def steps(engine, micro_size: int, kept: int):
    objective, told = InfoNCE(), []
    objective.weights = WEIGHTS
    for step in range(len(SIZES)):
        own = share(batch_of(step), dist.rank(), dist.world_size())
        result = train_step(engine, own, objective, micro_size=micro_size, kept_graphs=kept, lr=LR)
        metrics = [result.metrics[f"{name}_loss"] for name in ("contrastive", "word", "pixel")]
        told += [result.loss, result.grad_norm, *metrics]
    return told


def plain(frozen: str, micro_size: int, kept: int):
    model = model_of(frozen).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    told = steps(PlainEngine(model, torch.optim.SGD(trained, LR)), micro_size, kept)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), told


CASES = pairwise(VARIANTS, (1, 2, 3), ((64, 1), (3, 1), (3, 2), (1, 1)))


@pytest.mark.distributed
@pytest.mark.parametrize("frozen, world_size, cut", CASES)
def test_they_divide_by_the_terms_of_the_global_batch(frozen, world_size, cut):
    weights, expected = oracle(frozen)
    for ours, told in run_ranks(plain, world_size, frozen, *cut):
        assert told == pytest.approx(expected, rel=1e-12)
        assert torch.allclose(ours, weights, rtol=1e-12, atol=1e-14)


def test_the_recipe_gives_the_factors():
    config = LossConfig(kind="sigmoid", caption_weight=3, contrastive_weight=0)
    assert config.build().weights == {"contrastive_loss": 0, "caption_loss": 3}


def on_engine(layout: str, frozen: str, precision: str, micro_size: int, more: dict[str, str]):
    optim = OptimConfig(name="sgd", lr=LR, weight_decay=0.0)
    engine = engine_at(layout, lambda: model_of(frozen), optim, precision=precision, **more)
    told = steps(engine, micro_size, 1)
    engine.close()
    return told


LAYOUTS = [f"{engine} {stage}" for engine in ("fsdp", "zero") for stage in (1, 2, 3)]


@pytest.mark.engine
@pytest.mark.parametrize(
    "layout, frozen, precision, world_size, micro_size",
    pairwise(
        LAYOUTS, ("text", "visual"), ("fp32", "bf16", "fp16"), (2, 3), (3, 64),
        keep=lambda case: case[0][0] == "z" or case[2] != "fp16",
    ),
)  # fmt: skip
def test_on_an_engine(layout, frozen, precision, world_size, micro_size, tmp_path):
    _, expected = oracle(frozen)
    base = tmp_path / "scale.json"
    base.write_text('{"fp16": {"initial_scale_power": 8}}')
    more = {"ds_config": str(base)} if precision == "fp16" else {}
    rel = tolerances.norm(len(SIZES), "sgd") if precision == "fp32" else 0.03
    for told in run_ranks(on_engine, world_size, layout, frozen, precision, micro_size, more):
        assert told == pytest.approx(expected, rel=rel)
