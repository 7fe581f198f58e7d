"""The loss of examples/sentence_transformers_trainer.py beside MultipleNegativesRankingLoss over the whole batch.

The environment is that of test_late_interaction.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tests.peers.torchvision_shim  # noqa: F401  before transformers
from tests.ranks import run_ranks

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
pytest.importorskip(
    "sentence_transformers",
    minversion="5",
    reason="PEER MISSING: see the first lines of test_late_interaction.py",
)
example = pytest.importorskip(
    "examples.sentence_transformers_trainer",
    reason="PEER MISSING: see the first lines of test_late_interaction.py",
    exc_type=ImportError,
)

N = 12


def features(model: Any, start: int, stop: int) -> list[dict[str, Tensor]]:
    """As their collator gives them: each column is padded by itself."""
    rows = example.pairs(N)[start:stop]
    return [model.tokenize(rows[name]) for name in ("anchor", "positive", "negative")]


@pytest.fixture(scope="module")
def folder() -> str:
    return example.save_small_bert()


def plain(folder: str) -> tuple[float, list[Tensor | None]]:
    model = example.small_model(folder).double()
    loss = example.losses.MultipleNegativesRankingLoss(model, scale=20.0)(
        features(model, 0, N), torch.empty(0)
    )
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


def exact(folder: str, kind: str, mini_batch_size: int, shares: list[int]) -> Any:
    rank = torch_dist.get_rank() if torch_dist.is_initialized() else 0
    model = example.small_model(folder).double()
    loss = example.ExactRankingLoss(model, scale=20.0, mini_batch_size=mini_batch_size)
    if kind == "ddp":
        loss.model = DistributedDataParallel(model)
    elif kind == "fsdp":
        for layer in model[0].auto_model.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
    start = sum(shares[:rank])
    own = features(model, start, start + shares[rank])
    # half of it twice, as with gradient_accumulation_steps=2
    for _ in range(2):
        value = loss(own, torch.empty(0))
        (value / 2).backward()
    grads = [p.grad for p in model.parameters()]
    return value.item(), [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


def assert_alike(found: Any, folder: str) -> None:
    value, gradients = plain(folder)
    assert found[0] == pytest.approx(value, rel=1e-6)  # a float32
    compared = 0
    for ours, theirs in zip(found[1], gradients, strict=True):
        if theirs is None:  # BERT's pooler, which the loss does not read
            assert ours is None or not ours.any()
            continue
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)
        compared += 1
    assert compared > 30


@pytest.mark.parametrize("mini_batch_size", [1, 5, 12])
def test_alone(mini_batch_size, folder):
    assert_alike(exact(folder, "alone", mini_batch_size, [N]), folder)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("shares", [[6, 6], [7, 5]])
def test_on_ranks(kind, shares, folder):
    for found in run_ranks(exact, 2, folder, kind, 3, shares):
        assert_alike(found, folder)
