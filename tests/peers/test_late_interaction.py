"""`MaxSim` beside the losses of colpali-engine and PyLate, and what their gradients are.

python3 -m venv .venv-embedders && .venv-embedders/bin/pip install torch==2.13.0
.venv-embedders/bin/pip install --no-deps torchvision==0.28.0 colpali-engine==0.3.18 pylate==1.6.0
.venv-embedders/bin/pip install transformers==5.24.0 sentence-transformers==5.3.0 datasets ujson peft pillow
.venv-embedders/bin/pip install "pydantic>=2.7" simplejpeg braceexpand fsspec rich pytest pytest-xdist
.venv-embedders/bin/python -m pytest -m peer tests/peers/test_late_interaction.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tests.peers.torchvision_shim  # noqa: F401  before transformers
from clip_train.losses.maxsim import MaxSim

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
colpali = pytest.importorskip(
    "colpali_engine.loss",
    reason="PEER MISSING: see the first lines of this file",
    exc_type=ImportError,
)
pylate = pytest.importorskip(
    "pylate.losses", reason="PEER MISSING: see the first lines of this file", exc_type=ImportError
)
N, LQ, LD, D = 6, 4, 9, 8


def batch(m: int = 1, shortest: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalized queries and documents, float64, and the masks of their tokens."""
    g = torch.Generator().manual_seed(0)
    queries = F.normalize(torch.randn(N, LQ, D, generator=g).double(), dim=-1)
    documents = F.normalize(torch.randn(N * m, LD, D, generator=g).double(), dim=-1)
    of_query = torch.arange(LQ) < 2 + torch.arange(N)[:, None] % (LQ - 1)
    lengths = shortest + torch.arange(N * m)[:, None] % (LD - shortest + 1)
    return queries, documents, of_query, torch.arange(LD) < lengths


def ours(loss: MaxSim, queries: Tensor, documents: Tensor, of_query: Tensor, of_document: Tensor):
    output = loss(
        {
            "query": queries,
            "document": documents,
            "query_mask": of_query.double(),
            "document_mask": of_document.double(),
        }
    )
    return output.loss, output.gradients["query"], output.gradients["document"]


def assert_alike(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("normalize", [False, True])
def test_colpalis_loss_is_the_floor_of_zero(normalize):
    """It has no mask: padding is features of zero, whose products are zeros."""
    queries, documents, of_query, of_document = batch()
    leaves = [
        (queries * of_query[..., None]).requires_grad_(),
        (documents * of_document[..., None]).requires_grad_(),
    ]
    theirs = colpali.ColbertLoss(temperature=0.02, normalize_scores=normalize)(*leaves)
    gradients = torch.autograd.grad(theirs, leaves)
    masked = [gradients[0] * of_query[..., None], gradients[1] * of_document[..., None]]
    loss = MaxSim(scale=50.0, padding="zero", mean=normalize)
    assert_alike(ours(loss, queries, documents, of_query, of_document), (theirs.detach(), *masked))


class Handed(torch.nn.Module):
    """In place of PyLate's model: features that are there already."""

    do_query_expansion = False
    skiplist: tuple[int, ...] = ()

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"token_embeddings": features["token_embeddings"]}


def by_column(x: Tensor, m: int) -> list[Tensor]:
    return [*x.unflatten(0, (N, m)).unbind(1)]


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("cached", [False, True])
def test_pylates_loss_and_the_gradient_of_its_cached_form(monkeypatch, cached, m):
    """The cached loss returns the mean, and hands on the gradient of the sum."""
    monkeypatch.setattr("torch.nn.functional.normalize", lambda x, **_: x)  # already done
    queries, documents, of_query, of_document = batch(m)
    leaves = [queries.clone().requires_grad_(), documents.clone().requires_grad_()]
    sides = [leaves[0], *by_column(leaves[1], m)]
    masks = [of_query, *by_column(of_document, m)]
    if cached:
        theirs = pylate.CachedContrastive(Handed(), temperature=0.1)
        reps = [[x.detach().clone().requires_grad_()] for x in sides]
        value = theirs.calculate_loss(reps, masks, with_backward=True)
        d_sides = [rep[0].grad for rep in reps]
    else:
        theirs = pylate.Contrastive(Handed(), temperature=0.1)
        features = [
            {"token_embeddings": x, "attention_mask": mask, "input_ids": mask.long()}
            for x, mask in zip(sides, masks, strict=True)
        ]
        value = theirs(features)
        d_sides = list(torch.autograd.grad(value, sides))
    d_documents = torch.stack(d_sides[1:], dim=1).flatten(0, 1)
    found = ours(MaxSim(scale=10.0, padding="zero"), queries, documents, of_query, of_document)
    times = N if cached else 1
    assert_alike(found, (value.detach(), d_sides[0] / times, d_documents / times))
