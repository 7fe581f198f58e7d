"""Running statistics under both engines: those of plain full-batch training, in checkpoints, and no layout shows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from clip_train import dist
from clip_train.engines.base import PlainEngine
from clip_train.losses.info_nce import InfoNCE
from clip_train.models.clip import CLIP
from clip_train.models.weights import WholeState
from clip_train.optim.config import OptimConfig
from clip_train.optim.optimizer import build_optimizer
from clip_train.step import train_step
from clip_train.task import Batch
from tests import tolerances
from tests.engine.layouts import engine_at
from tests.models.convolutional import convolutional_clip
from tests.models.small import inputs
from tests.ranks import run_ranks
from tests.toy import columns_of, share

pytestmark = pytest.mark.engine
N, LR = 8, 0.05
OPTIM = OptimConfig(name="sgd", lr=LR, weight_decay=0.0)


def train(
    layout: str,
    micro_size: int,
    precision: str = "fp32",
    kept: int = 1,
    checkpointing: bool = False,
) -> Any:
    """Two steps; losses, and all that this rank saves."""

    def make() -> CLIP:
        torch.manual_seed(5)
        return convolutional_clip(checkpointing=checkpointing)

    if layout == "plain":
        model = make()
        engine: Any = PlainEngine(model, build_optimizer(OPTIM, model.named_parameters()))
    else:
        engine = engine_at(layout, make, OPTIM, precision=precision)
    losses = []
    for step in range(2):
        batch = share(
            Batch(columns_of(*inputs(N, seed=step), [str(i) for i in range(N)])),
            dist.rank(),
            dist.world_size(),
        )
        losses.append(
            train_step(
                engine, batch, InfoNCE(), micro_size=micro_size, kept_graphs=kept, lr=LR
            ).loss
        )
    saved = {(f.name, f.start): f.tensors["param"].clone() for f in engine.state_fragments()}
    engine.close()
    return losses, saved


def merged(parts: list[Any]) -> dict[str, torch.Tensor]:
    rows = sorted(
        itertools.chain.from_iterable(saved.items() for _, saved in parts), key=lambda row: row[0]
    )
    groups = itertools.groupby(rows, lambda row: row[0][0])
    return {name: torch.cat([tensor for _, tensor in group]) for name, group in groups}


@pytest.mark.parametrize("layout", ["plain", "zero 1", "zero 3", "fsdp 2", "fsdp 3"])
def test_running_statistics_are_those_of_plain_training(layout: str):
    ((losses, saved),) = run_ranks(train, 1, "plain", N)
    parts = run_ranks(train, 2, layout, N // 2)
    for told, _ in parts:
        assert told == pytest.approx(losses, rel=tolerances.loss(2, "sgd"))
    for name, tensor in merged(parts).items():
        torch.testing.assert_close(
            tensor, saved[name, 0], rtol=2e-3, atol=2e-4, msg=lambda m, n=name: n + m
        )
    replayed = merged(run_ranks(train, 2, layout, 2))
    kept = merged(run_ranks(train, 2, layout, 2, "fp32", 2, True))
    tracked = {int(t) for name, t in kept.items() if name.endswith("tracked")}
    assert tracked == {4}  # two steps of two micro-batches
    for name, tensor in kept.items():
        torch.testing.assert_close(
            tensor, replayed[name], rtol=2e-3, atol=2e-4, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("layout", ["zero 1", "fsdp 3"])
def test_running_statistics_are_wide_in_bf16(layout: str):
    _, saved = run_ranks(train, 1, layout, 4, "bf16")[0]
    kinds = {
        name.rpartition(".")[2]: tensor.dtype for (name, _), tensor in saved.items() if "bn" in name
    }
    assert kinds["running_mean"] == kinds["running_var"] == torch.float32
    assert kinds["num_batches_tracked"] == torch.int64


def resume(layout: str, state: dict[str, torch.Tensor]) -> Any:
    engine = engine_at(layout, convolutional_clip, OPTIM)
    engine.load_fragments(WholeState(state), {})
    saved = {f.name: f.tensors["param"].clone() for f in engine.state_fragments()}
    engine.train(False)
    with torch.no_grad():
        seen = engine.encode("image", inputs(4)[0])
    engine.close()
    return saved, seen


@pytest.mark.parametrize("layout", ["zero 3", "fsdp 3"])
def test_running_statistics_are_loaded_and_saved_again(layout: str):
    torch.manual_seed(6)
    model = convolutional_clip().eval()
    for buffer in model.buffers():
        buffer.copy_(torch.rand_like(buffer) if buffer.is_floating_point() else torch.tensor(7))
    (saved, seen), (others, _) = run_ranks(resume, 2, layout, model.state_dict())
    for name, buffer in model.named_buffers():
        assert torch.equal(saved[name], buffer.flatten()) and name not in others, name
    torch.testing.assert_close(seen, model(inputs(4)[0])[0], rtol=0, atol=1e-5)
