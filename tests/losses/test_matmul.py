"""`loss.matmul`: the loss alone is computed as the recipe says, whatever the model's own products are."""

from __future__ import annotations

import pytest
import torch

from clip_train.engines.base import PlainEngine
from clip_train.losses.config import LossConfig
from clip_train.losses.info_nce import InfoNCE
from clip_train.step import train_step
from tests.toy import ToyCLIP, toy_batch


class Recorded(InfoNCE):
    def __call__(self, *args):
        self.seen = torch.get_float32_matmul_precision()
        return super().__call__(*args)


@pytest.mark.parametrize(("matmul", "of_loss"), [("highest", "highest"), ("tf32", "high")])
def test_a_step_computes_its_loss_as_the_recipe_says(matmul, of_loss):
    of_model, model, objective = set(), ToyCLIP(), Recorded()
    model.register_forward_pre_hook(lambda *_: of_model.add(torch.get_float32_matmul_precision()))
    objective.matmul = LossConfig(matmul=matmul).build().matmul
    engine = PlainEngine(model, torch.optim.SGD(model.parameters(), lr=0.5))
    train_step(engine, toy_batch(20), objective, micro_size=7, kept_graphs=1, lr=0.5)
    assert (of_model, objective.seen) == ({"highest"}, of_loss)
