"""`loss.widths`: the loss of the first values of each feature, against float64 autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clip_train.errors import UserError
from clip_train.losses.config import LossConfig
from clip_train.losses.distillation import Distillation
from clip_train.recipe.resolve import resolve
from clip_train.task import Context, MicroBatch, named_features
from tests.launcher.test_same_run import recipe
from tests.losses.oracle import siglip
from tests.losses.oracles import distill_loss, leaves, pairs, relative
from tests.toy import columns_of, oracle_loss

N, D, WIDTHS = 36, 16, {16: 1.0, 7: 0.5, 1: 2.0}
LOSSES = {
    "softmax": LossConfig(widths=WIDTHS, tile=10),
    "ring": LossConfig(widths=WIDTHS, tile=10, exchange="ring"),
    "sigmoid": LossConfig(widths=WIDTHS, tile=10, kind="sigmoid"),
    "a teacher": LossConfig(widths=WIDTHS, tile=10),
}


@pytest.mark.parametrize("name", LOSSES)
def test_float64_equals_autograd(name):
    taught = named_features(*pairs(N, 24, 2), torch.tensor([9.0]).double())
    loss = LOSSES[name].build([lambda batch: taught] if name == "a teacher" else [])
    I, T, s = leaves(*pairs(N, D), 12.0)
    bias = torch.tensor([-3.0]).double() if name == "sigmoid" else None
    expected = torch.zeros(())
    for width, weight in WIDTHS.items():
        image, text = (F.normalize(x[:, :width], dim=1) for x in (I, T))
        if name == "a teacher":
            each = sum(distill_loss(image, text, s, *taught.values()))
        else:
            each = oracle_loss(image, text, s) if bias is None else siglip(image, text, s, bias)
        expected = expected + weight * each
    expected.backward()
    nothing = torch.zeros(N, 3, 8, 8)
    context = Context(prepared=loss.prepare(MicroBatch(columns_of(nothing, nothing, nothing))))
    captions = torch.rand(N, 2)  # a local loss is no feature
    features = named_features(I, T, s, bias, {"caption_loss": captions})
    out = loss({key: x.detach() for key, x in features.items()}, context)
    assert isinstance(loss.objective, Distillation) == (name == "a teacher")
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for key, x in {"image": I, "text": T, "logit_scale": s}.items():
        assert relative(out.gradients[key], x.grad) < 1e-12
    assert torch.equal(out.gradients["caption_loss"], torch.zeros(N, 2))
    if name == "a teacher":  # both parts of the loss, over all widths
        parts = out.metrics["clip_loss"] + out.metrics["distill_loss"]
        assert float(parts) == pytest.approx(expected.item(), rel=1e-12)


def test_what_cannot_be_cut_is_refused_by_name():
    with pytest.raises(UserError, match=r"loss.widths .*: 999 is more than the 512 values of a"):
        resolve(recipe(loss={"widths": {999: 1, 8: 1}}), 1, read_data=False)
    with pytest.raises(UserError, match=r"loss.widths \({8: 1.0}\) .*loss.kind \(memory_bank\) "):
        resolve(recipe(loss={"widths": {8: 1}, "kind": "memory_bank"}), 1, read_data=False)
    with pytest.raises(
        UserError, match=r"a number of values and a weight above 0; set loss\.widths"
    ):
        recipe(loss={"widths": {8: 0}})
