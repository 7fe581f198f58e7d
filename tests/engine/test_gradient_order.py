"""Gradients come in another order on one rank than on the other: each still meets its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clip_train import dist
from clip_train.errors import UserError
from clip_train.optim.config import OptimConfig
from tests import tolerances
from tests.engine.layouts import engine_at
from tests.engine.test_engines import (
    LR,
    MAX_NORM,
    assemble,
    oracle,
    pieces,
    relative_error,
    steps,
)
from tests.ranks import run_ranks
from tests.toy import ToyCLIP

pytestmark = pytest.mark.engine
SGD = OptimConfig(name="sgd", lr=LR, weight_decay=0.1)


class WeightFirst(torch.autograd.Function):
    """A linear layer whose weight's gradient comes before its bias's. Those of F.linear come the other way."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x, gradient.sum(0)


class RankLinear(nn.Linear):
    def forward(self, x):
        if dist.rank() == 0:
            return super().forward(x)
        return WeightFirst.apply(x, self.weight, self.bias)


class TextFirst(ToyCLIP):
    """On one rank, the text tower is called before the image tower."""

    def forward(self, images, texts, sample_seeds=None):
        if dist.rank() == 0:
            return super().forward(images, texts, sample_seeds)
        text = super().forward(None, texts)[1]
        image, _, scale, bias = super().forward(images, None)
        return image, text, scale, bias


def weight_first_on_one_rank():
    torch.manual_seed(5)
    model = ToyCLIP()
    for tower in (model.visual, model.text):
        tower.into.__class__ = tower.out.__class__ = RankLinear
    return model


def text_first():
    torch.manual_seed(5)
    return TextFirst()


def trained(layout: str, bucket: int, folder: str, reduce_gradients: str):
    base = Path(folder) / "ds.json"
    base.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": bucket}}))
    engine = engine_at(
        layout,
        weight_first_on_one_rank,
        SGD,
        clip=MAX_NORM,
        reduce_gradients=reduce_gradients,
        ds_config=str(base),
    )
    steps(engine, 0, 4, 5, 2)
    out = pieces(engine)
    engine.close()
    return out


@pytest.mark.parametrize("layout", ["zero 2", "zero 3"])
@pytest.mark.parametrize("bucket", [300, 10**6])  # between a weight and its bias; all in one
@pytest.mark.parametrize("reduce_gradients", ["each_backward", "once"])
def test_gradients_are_added_to_those_of_the_same_parameter(
    layout, bucket, reduce_gradients, tmp_path
):
    reference, _ = oracle("sgd", 4)
    state = assemble(run_ranks(trained, 2, layout, bucket, str(tmp_path), reduce_gradients))
    assert relative_error(state, reference) < tolerances.UPDATE["sgd"]


def refused(layout: str) -> str:
    engine = engine_at(layout, text_first, SGD)
    try:
        steps(engine, 0, 1, 5, 2)
    except UserError as e:
        return str(e)
    finally:
        engine.close()
    return ""


def test_other_orders_of_modules_are_refused():
    for said in run_ranks(refused, 2, "zero 2"):
        assert "call the model's modules in different orders" in said
        assert "set engine.reduce_gradients=once" in said
