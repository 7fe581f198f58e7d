"""The promise of `exactness.py` for the losses of embedders, `Ranking` and `MaxSim`, through `contrastive_step`.

    .venv/bin/python benchmarks/exactness_embedders.py [--quick]

Each row is a loss on 1 to 4 ranks under DDP, with unequal shares of 50 queries and their documents, in micro-batches of
1, 7 and all samples of a rank; the table has the worst of them. The oracle is the formula over the whole batch by
autograd in float64, as in tests/losses/test_ranking.py. `plain fp32` is the same formula and autograd in float32: what
rounding alone does.

Scores are of one vector for each text (dot), or of one for each token by MaxSim, where padding is left out (lowest) or
a similarity of 0 (zero).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from common import finish, parser
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clip_train import MaxSim, Ranking, contrastive_step
from tests.losses.test_ranking import CASES, LATE, late_scores, textbook
from tests.ranks import run_ranks

N, LQ, LD, D = 50, 6, 11, 32
SHARES = {1: [50], 2: [27, 23], 3: [20, 13, 17], 4: [8, 17, 12, 13]}
MICRO_SIZES = (1, 7, N)
TARGETS = {
    "float64": "loss and gradient within 1e-9 (relative)",
    "fp32": "loss and gradient within 1e-6",
}


class Embedder(nn.Module):
    def __init__(self, *, tokens: bool, learned_scale: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.query, self.document = (
            nn.Sequential(nn.Linear(d, 64), nn.Tanh(), nn.Linear(64, D)) for d in (24, 40)
        )
        self.logit_scale = nn.Parameter(torch.tensor(2.5)) if learned_scale else None
        self.tokens = tokens

    def forward(self, query: Tensor, document: Tensor, **more: Tensor) -> dict[str, Tensor]:
        out = {"query": self.query(query), "document": self.document(document), **more}
        for name in ("query", "document"):
            pooled = out[name] if self.tokens else out[name].mean(1)
            out[name] = F.normalize(pooled, dim=-1)
        if self.logit_scale is not None:
            out["logit_scale"] = self.logit_scale.exp()
        return out


def batch(case: str, late: bool) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    """Documents of a query, inputs of the model in float64, options of the loss."""
    m, options, further, has_ids = CASES[case]
    g = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).double()

    # queries resemble their documents, so that scores spread
    shared = drawn(N, 1, 12)
    inputs = {
        "query": torch.cat([shared + 0.5 * drawn(N, LQ, 12), drawn(N, LQ, 12)], -1),
        "document": torch.cat(
            [shared.repeat_interleave(m, 0) + drawn(N * m, LD, 12), drawn(N * m, LD, 28)], -1
        ),
    }
    if late:
        inputs["query_mask"] = (torch.arange(LQ) < 1 + torch.arange(N)[:, None] % LQ).double()
        # all documents have some padding: ranks may then pad to different lengths
        lengths = 1 + torch.arange(N * m)[:, None] * 2 % (LD - 1)
        inputs["document_mask"] = (torch.arange(LD) < lengths).double()
    columns = {
        "margin": {"margin": 0.3 * torch.rand(N, 1, generator=g).double()},
        "temperature": {"temperature": 0.5 + torch.rand(N, 1, generator=g).double()},
        "scores": {"scores": 3 * drawn(N, m)},
        "guide": {"guide_query": drawn(N, 3), "guide_document": drawn(N * m, 3)},
    }
    for name in further:
        inputs |= columns[name]
    if has_ids:
        options = options | {"ids": torch.arange(N * m) * 7 % 30 - 1}
    return m, inputs, options


def formula(case: str, late: dict[str, Any], dtype: torch.dtype) -> tuple[float, Tensor]:
    _, inputs, options = batch(case, bool(late))
    model = Embedder(tokens=bool(late), learned_scale="scale" not in options).to(dtype)
    out = model(**{name: x.to(dtype) for name, x in inputs.items()})
    scores = late_scores(out, **late) if late else out["query"] @ out["document"].T
    loss = textbook(scores, out, **options)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def steps(shares: list[int], dtype: torch.dtype, cases: list[str]) -> dict[Any, Any]:
    """(case, scores, micro_size) -> loss and gradient, on a rank."""
    rank = torch_dist.get_rank()
    first, stop = sum(shares[:rank]), sum(shares[: rank + 1])
    found = {}
    for case in cases:
        for i, late in enumerate(LATE):
            m, inputs, options = batch(case, bool(late))
            own = {}
            for name, x in inputs.items():
                rows = len(x) // N
                own[name] = x[first * rows : stop * rows].to(dtype)
            ids = options.pop("ids", None) if "ids" in options else None
            loss = MaxSim(**late, tile=50, **options) if late else Ranking(**options)
            for micro_size in MICRO_SIZES:
                model = Embedder(tokens=bool(late), learned_scale="scale" not in options).to(dtype)
                told = contrastive_step(
                    DistributedDataParallel(model),
                    **own,
                    loss=loss,
                    micro_size=micro_size,
                    shares=shares,
                    ids=None if ids is None else ids[first * m : stop * m],
                )
                gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
                found[case, i, micro_size] = told.item(), gradient
    return found


def apart(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def main() -> int:
    command = parser(__doc__ or "")
    command.add_argument("--fp32", action="store_true", help="without the rows in float64")
    args = command.parse_args()
    cases, worlds = [*CASES], [*SHARES]
    if args.quick:
        cases, worlds = ["both directions", "kl"], [1, 3]
    rows, missed = [], []
    for dtype in (torch.float32,) if args.fp32 else (torch.float64, torch.float32):
        found: dict[Any, list[Any]] = {}
        for world in worlds:
            for of_rank in run_ranks(steps, world, SHARES[world], dtype, cases):
                for key, result in of_rank.items():
                    found.setdefault(key[:2], []).append((world, key[2], *result))
        for (case, i), results in found.items():
            late = LATE[i]
            loss, gradient = formula(case, late, torch.float64)
            losses = [abs(told / loss - 1) for _, _, told, _ in results]
            errors = [apart(ours, gradient) for *_, ours in results]
            worst = results[errors.index(max(errors))]
            row = {
                "loss": case,
                "scores": late["padding"] if late else "dot",
                "dtype": str(dtype)[6:],
                "worst at": f"{worst[0]} ranks, micro_size {worst[1]}",
                "loss error": max(losses),
                "gradient error": max(errors),
                "plain fp32": apart(formula(case, late, torch.float32)[1], gradient),
            }
            rows.append(row)
            limit = 1e-9 if dtype == torch.float64 else 1e-6
            missed += [
                f"{row}: {name}" for name in ("loss error", "gradient error") if row[name] > limit
            ]
    return finish("exactness_embedders", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
