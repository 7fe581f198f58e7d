"""The objectives against OpenCLIP's own modules, in float64."""

from __future__ import annotations

import pytest
import torch

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train.losses.distillation import Distillation
from clip_train.task import Context, named_features
from tests.losses.oracles import leaves, pairs, relative

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
loss_module = pytest.importorskip(
    "open_clip.loss",
    reason="PEER MISSING: no loss was compared with OpenCLIP's. Run scripts/setup_peers.sh, then "
    ".venv-peers/bin/python -m pytest -m peer",
    exc_type=ImportError,
)


def test_distillation_is_openclips():
    image, text = pairs(20, 16, 1)
    U, V = pairs(20, 24, 2)
    z = torch.tensor([40.0]).double()
    I, T, s = leaves(image, text, 15.0)
    clip, distilled = loss_module.DistillClipLoss()(I, T, s, U, V, z)
    (clip + distilled).backward()  # as its training loop adds up the loss's parts
    loss = Distillation([lambda _: pytest.fail("not run here")], tile=7)
    teacher = {f"{name} 0": feature for name, feature in named_features(U, V, z).items()}
    ours = loss(named_features(image, text, s.detach()), Context(prepared=teacher))
    assert ours.loss.item() == pytest.approx((clip + distilled).item(), rel=1e-12)
    assert relative(ours.gradients["image"], I.grad) < 1e-11
    assert relative(ours.gradients["text"], T.grad) < 1e-11
    assert relative(ours.gradients["logit_scale"], s.grad) < 1e-11
