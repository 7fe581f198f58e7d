"""Several texts for each image, the first of them its own: against textbook autograd in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clip_train import dist
from clip_train.batch import shares
from clip_train.losses.function import FunctionLoss
from clip_train.losses.info_nce import InfoNCE
from clip_train.task import Context
from tests.losses.oracles import relative
from tests.ranks import run_ranks

M, SCALE = 3, 9.0


def inputs(N: int, spread: bool) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    image, text = (torch.randn(rows, 8, generator=g, dtype=torch.float64) for rows in (N, M * N))
    lengths = torch.logspace(-2, 2, N).double() if spread else torch.ones(N).double()
    return F.normalize(image, dim=1) * lengths[:, None], F.normalize(text, dim=1)


def both_ways(image, text, scale):
    logits, own = scale * image @ text.T, torch.arange(len(image))
    return (F.cross_entropy(logits, M * own) + F.cross_entropy(logits[:, ::M].T, own)) / 2


def one_way(image, text, scale, bias=None, rows=slice(None)):
    own = torch.arange(0, len(text), len(text) // len(image))[rows]
    return F.cross_entropy(scale * image[rows] @ text.T, own, reduction="sum") / len(image)


one_way.sums_over_rows = True
LOSSES = {
    "closed": (InfoNCE(tile=5), both_ways, False),
    "spread": (InfoNCE(tile=5), both_ways, True),  # logits so spread that the sums underflow
    "function": (FunctionLoss(one_way, {}, tile=5), one_way, False),
}


def on_a_rank(N: int):
    counts = shares(N, dist.world_size())
    start = sum(counts[: dist.rank()])
    stop = start + counts[dist.rank()]
    out = {}
    for name, (loss, _, spread) in LOSSES.items():
        image, text = inputs(N, spread)
        given = {"image": image[start:stop], "text": text[M * start : M * stop]}
        out[name] = loss({**given, "logit_scale": torch.tensor([SCALE]).double()}, Context(N))
    return {name: (each.loss, each.gradients) for name, each in out.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("W, N", [(1, 1), (1, 7), (2, 7), (3, 7)])
def test_an_image_finds_its_own_among_the_texts_of_all_ranks(W, N):
    results = run_ranks(on_a_rank, W, N) if W > 1 else [on_a_rank(N)]
    for name, (_, textbook, spread) in LOSSES.items():
        image, text = (x.requires_grad_() for x in inputs(N, spread))
        scale = torch.tensor([SCALE]).double().requires_grad_()
        expected = textbook(image, text, scale)
        expected.backward()
        for told, _ in (result[name] for result in results):
            assert told.item() == pytest.approx(expected.item(), rel=1e-12), name
        gradients = [result[name][1] for result in results]
        for key, leaf in (("image", image), ("text", text)):
            assert relative(torch.cat([each[key] for each in gradients]), leaf.grad) < 1e-11, name
        assert relative(sum(each["logit_scale"] for each in gradients), scale.grad) < 1e-11, name


@pytest.mark.parametrize("shape", [(5, 8), (0, 8), (4, 16)])
def test_texts_that_do_not_fit_are_refused(shape):
    given = {"image": torch.ones(2, 8), "text": torch.ones(shape), "logit_scale": torch.ones(1)}
    for loss in (InfoNCE(), FunctionLoss(one_way, {})):
        with pytest.raises(ValueError, match="do not fit image features"):
            loss(given)
