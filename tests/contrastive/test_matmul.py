"""`loss.matmul`: as far from textbook autograd in float64 as its rounding must be, and no further."""

from __future__ import annotations

import pytest
import torch

from clip_train.contrastive.build import build_loss
from clip_train.contrastive.config import LossConfig
from clip_train.contrastive.info_nce import InfoNCE
from clip_train.contrastive.matmul import matmul_precision
from clip_train.engine import PlainEngine
from clip_train.step import train_step
from clip_train.task import named_features
from tests.contrastive.oracle import autograd, features, relative
from tests.toy import ToyCLIP, toy_batch

BOUNDS = {"highest": (0.0, 2e-6), "bf16x3": (5e-7, 5e-5), "tf32": (5e-5, 5e-3)}


@pytest.mark.parametrize("matmul", BOUNDS)
def test_errors_are_those_of_the_rounding(matmul):
    image, text = features(256, 64, torch.float32, aligned=0.5)
    exact = autograd(image, text, 100.0)
    with matmul_precision(matmul):
        out = InfoNCE()(named_features(image, text, torch.tensor([100.0])))
    lowest, highest = BOUNDS[matmul]
    for ours, theirs in zip(
        (out.gradients["image"], out.gradients["text"]), exact[1:3], strict=True
    ):
        assert lowest <= relative(ours, theirs) <= highest
    assert out.loss.item() == pytest.approx(exact[0].item(), rel=10 * highest)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_step_computes_its_loss_as_the_recipe_says():
    def after_a_step(matmul: str) -> torch.Tensor:
        torch.manual_seed(3)
        model = ToyCLIP(logit_scale=4.6)
        engine = PlainEngine(model, torch.optim.SGD(model.parameters(), lr=0.5))
        objective = build_loss(LossConfig(matmul=matmul))  # type: ignore[arg-type]
        train_step(engine, toy_batch(20), objective, micro_size=7, kept_graphs=1, lr=0.5)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    exact = after_a_step("highest")
    near, far = (relative(after_a_step(each), exact) for each in ("bf16x3", "tf32"))
    assert 0 < near < far / 10 < 1e-3
