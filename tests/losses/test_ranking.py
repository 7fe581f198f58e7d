"""Losses of embedders beside their formulas, written for one batch on one machine, by autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clip_train.library import contrastive_step
from clip_train.losses.maxsim import MaxSim
from clip_train.losses.ranking import Ranking
from clip_train.losses.views import matryoshka, over_pairs
from tests.ranks import run_ranks

N = 7
LQ, LD = 3, 5
# of two documents for each query; the last query's own documents are unknown
IDS = torch.tensor([3, 20, 4, 21, 3, 22, 5, 4, 6, 6, 7, 24, -1, -1])


class Embedder(nn.Module):
    """Queries and documents, one vector each, or one for each token."""

    def __init__(self, *, tokens: bool, learned_scale: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.query, self.document = nn.Linear(6, 4), nn.Linear(9, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.1)) if learned_scale else None
        self.tokens = tokens
        self.double()

    def forward(self, query, document, **more):
        out = {
            "query": F.normalize(self.query(query), dim=-1),
            "document": F.normalize(self.document(document), dim=-1),
            **more,
        }
        if not self.tokens:
            out["query"] = F.normalize(out["query"].mean(1), dim=-1)
            out["document"] = F.normalize(out["document"].mean(1), dim=-1)
        if self.logit_scale is not None:
            out["logit_scale"] = self.logit_scale.exp()
        return out


def batch(m: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "query": torch.randn(N, LQ, 6, generator=g).double(),
        "document": torch.randn(N * m, LD, 9, generator=g).double(),
    }


def masks(m: int) -> dict[str, Tensor]:
    """No query or document is without tokens; lengths differ."""
    lengths_q = 1 + torch.arange(N) % LQ
    lengths_d = 1 + torch.arange(N * m) * 2 % LD
    return {
        "query_mask": (torch.arange(LQ) < lengths_q[:, None]).double(),
        "document_mask": (torch.arange(LD) < lengths_d[:, None]).double(),
    }


def late_scores(out: dict[str, Any], *, mean: bool, padding: str) -> Tensor:
    """[N, M], as the papers write it."""
    similar = torch.einsum("iqd,jtd->ijqt", out["query"], out["document"])
    if "document_mask" in out:
        allowed = out["document_mask"].bool()[None, :, None]
        similar = similar.masked_fill(~allowed, -torch.inf if padding == "lowest" else 0.0)
    best = similar.amax(-1)  # no ties here
    weights = out.get("query_mask", torch.ones(out["query"].shape[:2]).double())
    if mean:
        weights = weights / weights.sum(1, keepdim=True)
    return (best * weights[:, None]).sum(-1)


def textbook(
    S: Tensor,
    out: dict[str, Any],
    *,
    scale: float | None = None,
    symmetric: bool = False,
    margin: float = 0.0,
    exclude_above: float | None = None,
    exclude_by: str = "absolute",
    distill: str | None = None,
    contrastive_weight: float = 1.0,
    distill_weight: float = 1.0,
    ids: Tensor | None = None,
) -> Tensor:
    m, rows = len(S.T) // len(S), torch.arange(len(S))
    own = rows * m
    s = out["logit_scale"] if scale is None else scale
    factor = s / out.get("temperature", torch.ones(len(S), 1).double())
    margins = (
        out["margin"][:, 0] if "margin" in out else torch.full((len(S),), margin, dtype=S.dtype)
    )
    is_own = F.one_hot(own, len(S.T))
    Z = factor * (S - margins[:, None] * is_own)
    leave_out = torch.zeros_like(S, dtype=torch.bool)
    if ids is not None:
        leave_out |= (ids[own][:, None] == ids[None]) & (ids[own] >= 0)[:, None]
    if exclude_above is not None:
        judge = S.detach()
        if "guide_query" in out:
            judge = out["guide_query"] @ out["guide_document"].T
        p = judge[rows, own][:, None]
        bound = p - exclude_above if exclude_by == "absolute" else p * (1 - exclude_above)
        leave_out |= judge > bound
    Z = Z.masked_fill(leave_out & ~is_own.bool(), -torch.inf)
    loss = F.cross_entropy(Z, own)
    if symmetric:
        loss = (loss + F.cross_entropy(Z[:, own].T, rows)) / 2
    loss = contrastive_weight * loss
    if distill is None:
        return loss
    candidates = torch.stack([S[i, own[i] : own[i] + m] for i in rows])
    if distill == "kl":
        target = out["scores"].softmax(1)
        extra = F.kl_div((factor * candidates).log_softmax(1), target, reduction="batchmean")
    else:
        lead = candidates[:, :1] - candidates[:, 1:]
        extra = F.mse_loss(lead, out["scores"][:, :1] - out["scores"][:, 1:])
    return loss + distill_weight * extra


def more_columns(m: int) -> dict[str, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(2)
    return {
        "margin": {"margin": 0.3 * torch.rand(N, 1, generator=g).double()},
        "temperature": {"temperature": 0.5 + torch.rand(N, 1, generator=g).double()},
        "scores": {"scores": 3 * torch.randn(N, m, generator=g).double()},
        "guide": {
            "guide_query": torch.randn(N, 3, generator=g).double(),
            "guide_document": torch.randn(N * m, 3, generator=g).double(),
        },
    }


CASES: dict[str, tuple[int, dict[str, Any], list[str], bool]] = {
    # m, options, further outputs of the model, whether there are ids
    "one document": (1, {}, [], False),
    "two documents": (2, {}, [], False),
    "both directions": (2, {"symmetric": True}, [], False),
    "a scale of its own": (2, {"scale": 7.0, "symmetric": True}, [], False),
    "margin": (2, {"margin": 0.2, "symmetric": True}, [], False),
    "margins by sample": (1, {}, ["margin"], False),
    "temperatures by sample": (2, {"symmetric": True}, ["temperature", "margin"], False),
    "ids": (2, {"symmetric": True}, [], True),
    "a bound": (2, {"exclude_above": 0.1, "symmetric": True}, [], True),
    "a relative bound": (2, {"exclude_above": 0.2, "exclude_by": "relative"}, [], False),
    "a guide": (2, {"exclude_above": 0.1}, ["guide"], False),
    "kl": (3, {"distill": "kl", "distill_weight": 0.7}, ["scores", "temperature"], False),
    "kl alone": (2, {"distill": "kl", "contrastive_weight": 0.0}, ["scores"], False),
    "margin mse": (3, {"distill": "margin_mse", "margin": 0.1}, ["scores"], False),
}


def inputs_of(case: str, *, masked: bool) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    m, options, further, has_ids = CASES[case]
    inputs = batch(m) | (masks(m) if masked else {})
    for name in further:
        inputs |= more_columns(m)[name]
    return m, inputs, options | ({"ids": IDS[: N * m]} if has_ids else {})


def expected_of(reference: Embedder, inputs: dict[str, Tensor], options: dict[str, Any], **late):
    out = reference(**inputs)
    S = late_scores(out, **late) if late else out["query"] @ out["document"].T
    loss = textbook(S, out, **options)
    loss.backward()
    return loss.item(), [p.grad for p in reference.parameters()]


def step_of(model: nn.Module, inputs: dict[str, Tensor], options: dict[str, Any], late, **more):
    options = {**options}
    ids = options.pop("ids", None)
    loss = MaxSim(**late, tile=50, **options) if late else Ranking(**options)
    return contrastive_step(model, **inputs, loss=loss, ids=ids, **more).item()


def assert_alike(told, gradients, expected) -> None:
    assert told == pytest.approx(expected[0], rel=1e-11)
    for ours, theirs in zip(gradients, expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


LATE = [
    {},
    {"mean": False, "padding": "lowest"},
    {"mean": True, "padding": "zero"},
]


@pytest.mark.parametrize("late", LATE, ids=["dot", "lowest", "zero"])
@pytest.mark.parametrize("micro_size", [1, 3, N])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_formula(case, micro_size, late):
    _, inputs, options = inputs_of(case, masked=bool(late))
    learned = "scale" not in options
    model, reference = (Embedder(tokens=bool(late), learned_scale=learned) for _ in range(2))
    expected = expected_of(reference, inputs, options, **late)
    told = step_of(model, inputs, options, late, micro_size=micro_size)
    assert_alike(told, [p.grad for p in model.parameters()], expected)


def on_ranks(shares: list[int], case: str, late: dict[str, Any], micro_size: int):
    rank = torch_dist.get_rank()
    first, stop = sum(shares[:rank]), sum(shares[: rank + 1])
    m, inputs, options = inputs_of(case, masked=bool(late))
    own = {}
    for name, x in inputs.items():
        rows = len(x) // N
        own[name] = x[first * rows : stop * rows]
    if late:  # each rank pads to its own longest query and document
        longest_q = int(own["query_mask"].sum(1).max())
        longest_d = int(own["document_mask"].sum(1).max())
        own["query"] = own["query"][:, :longest_q]
        own["query_mask"] = own["query_mask"][:, :longest_q]
        own["document"] = own["document"][:, : longest_d + 1]  # all documents have some padding
        own["document_mask"] = own["document_mask"][:, : longest_d + 1]
    if "ids" in options:
        options["ids"] = options["ids"][first * m : stop * m]
    model = Embedder(tokens=bool(late), learned_scale="scale" not in options)
    told = step_of(
        DistributedDataParallel(model), own, options, late, micro_size=micro_size, shares=shares
    )
    return told, [p.grad for p in model.parameters()]


@pytest.mark.distributed
@pytest.mark.parametrize("late", [{}, {"mean": True, "padding": "lowest"}], ids=["dot", "maxsim"])
@pytest.mark.parametrize(
    "shares, case, micro_size",
    [
        ([4, 3], "both directions", 2),
        ([2, 2, 3], "a bound", 1),
        ([1, 2, 3, 1], "kl", 2),
        ([3, 4], "a guide", 4),
        ([4, 3], "margin mse", 2),
        ([4, 3], "temperatures by sample", 2),
    ],
)
def test_ranks_do_not_matter(shares, case, micro_size, late):
    _, inputs, options = inputs_of(case, masked=bool(late))
    expected = expected_of(Embedder(tokens=bool(late)), inputs, options, **late)
    for told, gradients in run_ranks(on_ranks, len(shares), shares, case, late, micro_size):
        assert_alike(told, gradients, expected)


def test_nested_widths_of_tokens():
    inputs = batch(2) | masks(2)
    model, reference = Embedder(tokens=True), Embedder(tokens=True)
    out = reference(**inputs)
    total: Any = 0.0
    for width, weight in ((4, 1.0), (2, 0.5)):
        cut = {**out}
        for name in ("query", "document"):
            cut[name] = F.normalize(out[name][..., :width], dim=-1)
        scores = late_scores(cut, mean=False, padding="lowest")
        total = total + weight * textbook(scores, cut, symmetric=True)
    total.backward()
    loss = matryoshka({4: 1.0, 2: 0.5}, MaxSim(symmetric=True))
    told = contrastive_step(model, **inputs, loss=loss, micro_size=3).item()
    assert_alike(
        told,
        [p.grad for p in model.parameters()],
        (total.item(), [p.grad for p in reference.parameters()]),
    )


def test_a_tiny_loss_keeps_its_gradient():
    """Where the positive has nearly all of the softmax, in float32."""
    torch.manual_seed(0)
    features = F.normalize(torch.eye(8) + 0.01 * torch.randn(8, 8), dim=1)

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8))

        def forward(self, x):
            return {"query": x @ self.weight, "document": x}

    model = Given()
    contrastive_step(model, features, loss=Ranking(scale=25.0), micro_size=8)
    double = Given().double()
    out = double(features.double())
    F.cross_entropy(25 * out["query"] @ out["document"].T, torch.arange(8)).backward()
    error = (model.weight.grad - double.weight.grad).norm() / double.weight.grad.norm()
    assert error < 1e-5


@pytest.mark.parametrize(
    "loss, outputs, message",
    [
        (lambda: Ranking(scale=0.0), None, r"scale \(0.0\) must be above 0"),
        (lambda: Ranking(exclude_by="x"), None, "must be 'absolute' or 'relative'"),
        (lambda: Ranking(distill="x"), None, "must be 'kl', 'margin_mse' or None"),
        (lambda: MaxSim(padding="x"), None, "must be 'lowest' or 'zero'"),
        (lambda: Ranking(distill="kl"), {}, "needs a teacher's scores"),
        (Ranking, {"margin": torch.zeros(N, 2)}, r"margin is \[3, 2\].*must be \[3, 1\]"),
        (Ranking, {"guide_query": torch.zeros(N, 2)}, "a guide needs guide_query"),
        (MaxSim, {"query_mask": torch.zeros(N, 2)}, r"mask of the queries is \[3, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused(loss, outputs, message):
    with pytest.raises(ValueError, match=message.replace("[3,", f"[{N},")):
        made = loss()
        model = Embedder(tokens=isinstance(made, MaxSim))
        contrastive_step(model, **batch(1), **outputs, loss=made, micro_size=N)


def test_vectors_for_maxsim_and_tokens_for_ranking_are_refused():
    with pytest.raises(ValueError, match=r"return \[b, tokens, D\]"):
        contrastive_step(Embedder(tokens=False), **batch(1), loss=MaxSim(), micro_size=2)
    with pytest.raises(ValueError, match="pool tokens in the model"):
        contrastive_step(Embedder(tokens=True), **batch(1), loss=Ranking(), micro_size=2)


def test_pairs_of_three_towers_by_tokens():
    """`over_pairs` hands on the masks of its pair."""
    inputs = batch(1) | masks(1)

    class Named(Embedder):
        def forward(self, **inputs):
            out = super().forward(**inputs)
            return {
                "page": out["document"],
                "page_mask": out["document_mask"],
                "question": out["query"],
                "question_mask": out["query_mask"],
                "logit_scale": out["logit_scale"],
            }

    model, reference = Named(tokens=True), Embedder(tokens=True)
    loss = over_pairs({("question", "page"): 1.0}, MaxSim())
    told = contrastive_step(model, **inputs, loss=loss, micro_size=2).item()
    expected = expected_of(reference, inputs, {}, mean=False, padding="lowest")
    assert_alike(told, [p.grad for p in model.parameters()], expected)
