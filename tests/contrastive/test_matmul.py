"""`loss.matmul`: the loss alone is computed as the recipe says, whatever the model's own products are."""

from __future__ import annotations

import pytest
import torch

from clip_train.contrastive.build import build_loss
from clip_train.contrastive.config import LossConfig
from clip_train.contrastive.info_nce import InfoNCE
from clip_train.engine import PlainEngine
from clip_train.step import train_step
from tests.toy import ToyCLIP, toy_batch


@pytest.mark.parametrize(("matmul", "of_loss"), [("highest", "highest"), ("tf32", "high")])
def test_a_step_computes_its_loss_as_the_recipe_says(monkeypatch, matmul, of_loss):
    seen = {"model": set(), "loss": set()}
    model, whole = ToyCLIP(), InfoNCE.__call__

    def recorded(*args):
        seen["loss"].add(torch.get_float32_matmul_precision())
        return whole(*args)

    monkeypatch.setattr(InfoNCE, "__call__", recorded)
    model.register_forward_pre_hook(
        lambda *_: seen["model"].add(torch.get_float32_matmul_precision())
    )
    engine = PlainEngine(model, torch.optim.SGD(model.parameters(), lr=0.5))
    objective = build_loss(LossConfig(matmul=matmul))
    train_step(engine, toy_batch(20), objective, micro_size=7, kept_graphs=1, lr=0.5)
    assert seen == {"model": {"highest"}, "loss": {of_loss}}
