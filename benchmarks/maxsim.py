"""The loss of late interaction, its gradient included, beside the formula and beside chunks of queries.

    .venv/bin/python benchmarks/maxsim.py [--quick]

Features are random, [N, 32, 128] queries and [N, L, 128] documents, normalized, in float32, on one process.

- formula: all N x N x 32 x L similarities, the maximum, cross-entropy, autograd.
- chunks: the same for 16 queries at a time, backward after each (as losses that cache features do it).
- ours: `MaxSim`.

Seconds are of the CPU, one run after the other; MiB are what a run adds at its peak.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cached_ranking import peak
from common import finish, parser
from torch import Tensor

LQ, D, SCALE, CHUNK = 32, 128, 20.0, 16
TARGETS = {
    "seconds": "at the largest N of the formula, no more than the formula's or the chunks'",
    "memory": "at that N at most a tenth of the formula's",
    "equal": "loss and gradients within 1e-5 of the formula's",
}


def features(n: int, tokens: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(n)
    return (
        F.normalize(torch.randn(n, LQ, D, generator=g), dim=-1) / LQ,
        F.normalize(torch.randn(n, tokens, D, generator=g), dim=-1),
    )


def formula(query: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """loss, and both gradients"""
    leaves = [x.clone().requires_grad_() for x in (query, document)]
    scores = torch.einsum("iqd,jtd->ijqt", *leaves).amax(-1).sum(-1)
    loss = F.cross_entropy(SCALE * scores, torch.arange(len(query)))
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def chunks(query: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    leaves = [x.clone().requires_grad_() for x in (query, document)]
    total = torch.zeros(())
    for start in range(0, len(query), CHUNK):
        part = slice(start, start + CHUNK)
        scores = torch.einsum("iqd,jtd->ijqt", leaves[0][part], leaves[1]).amax(-1).sum(-1)
        own = torch.arange(start, start + len(scores))
        loss = F.cross_entropy(SCALE * scores, own, reduction="sum") / len(query)
        loss.backward()
        total += loss.detach()
    return total, *[x.grad for x in leaves]  # type: ignore[return-value]


def ours(query: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from clip_train.losses.maxsim import MaxSim

    output = MaxSim(scale=SCALE)({"query": query, "document": document})
    return output.loss, output.gradients["query"], output.gradients["document"]


WAYS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "formula": formula,
    "chunks": chunks,
    "ours": ours,
}


def measured(way: str, n: int, tokens: int) -> tuple[dict[str, Any], Any]:
    """A row of the table, and the results."""
    inputs = features(n, tokens)
    results: list[Any] = []

    def run() -> None:
        results.append(WAYS[way](*inputs))

    start = time.process_time()
    mib = peak(run)
    row = {"way": way, "N": n, "L": tokens, "CPU s": time.process_time() - start, "MiB": mib}
    print(row, file=sys.stderr, flush=True)
    return row, results[0]


def apart(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> float:
    """The largest relative difference of loss and gradients."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(one, other, strict=True))


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--large", type=int, default=1024, help="N of ours alone for 128 tokens")
    p.add_argument("--pages", type=int, default=512, help="N of ours alone for 700 tokens")
    args = p.parse_args()
    torch.set_num_threads(1)  # CPU seconds of two threads count their waiting
    missed: list[str] = []
    rows = []
    # tokens of a document, N of all ways, N of ours alone
    sizes = ((128, 384, args.large), (700, 160, args.pages))
    if args.quick:
        sizes = ((128, 64, 128), (700, 64, 128))
    for tokens, both, large in sizes:
        for way in WAYS.values():  # imports
            way(*features(4, tokens))
        of_way = {}
        for way in WAYS:
            row, of_way[way] = measured(way, both, tokens)
            rows.append(row)
        at = {row["way"]: row for row in rows[-3:]}
        rows[-1]["apart"] = apart(of_way["ours"], of_way["formula"])
        if rows[-1]["apart"] > 1e-5:
            missed.append(f"equal: {rows[-1]}")
        if at["ours"]["CPU s"] > min(at["formula"]["CPU s"], at["chunks"]["CPU s"]):
            missed.append(f"seconds: {at}")
        if at["ours"]["MiB"] > at["formula"]["MiB"] / 10 and not args.quick:
            missed.append(f"memory: {at}")
        del of_way
        rows.append(measured("ours", large, tokens)[0])
    return finish("maxsim", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
