"""The moving average against timm's ModelEmaV3, updated as timm's train.py does."""

from __future__ import annotations

import pytest
import torch

import tests.peers.torchvision_shim  # noqa: F401  before timm
from clip_train.engines.base import MovingAverage, PlainEngine
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import train_step
from clip_train.task import Batch
from tests.models.convolutional import convolutional_clip
from tests.models.small import inputs
from tests.toy import columns_of

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
utils = pytest.importorskip(
    "timm.utils", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)


def test_it_is_timms_with_its_warm_up():
    torch.manual_seed(5)
    model = convolutional_clip()
    optim = OptimConfig(lr=1e-3)
    engine = PlainEngine(model, build_optimizer(optim, model.named_parameters()))
    engine.ema = MovingAverage(0.7, warmup=True)
    engine.load_fragments(WholeState(model.state_dict()), {})
    theirs = utils.ModelEmaV3(model, decay=0.7, use_warmup=True)
    for step in range(1, 9):
        batch = Batch(columns_of(*inputs(8, seed=step), [str(i) for i in range(8)]))
        train_step(engine, batch, InfoNCE(), micro_size=4, kept_graphs=1, lr=1e-3)
        theirs.update(model, step=step)
        expected = theirs.module.state_dict()
        for fragment in engine.state_fragments():
            ours = fragment.tensors.get("param_ema", fragment.tensors["param"])
            assert torch.allclose(ours, expected[fragment.name].flatten(), rtol=1e-5, atol=1e-7), (
                fragment.name
            )
