"""`mine_hard_negatives` beside the function of that name in sentence-transformers, on the same embeddings.

Needs sentence-transformers 6.2.0 and datasets; 5.3.0 has other negatives where a query has several positives and a
margin.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from clip_train.mine import Selection, mine_hard_negatives

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
datasets = pytest.importorskip(
    "datasets", reason="PEER MISSING: see the first lines of this file", exc_type=ImportError
)
sentence_transformers = pytest.importorskip(
    "sentence_transformers",
    minversion="6.2.0",
    reason="PEER MISSING: see the first lines of this file",
    exc_type=ImportError,
)
NUM = 300


class Embedded:
    """In place of their model: texts "q N" and "d N" have given embeddings."""

    device = torch.device("cpu")
    model_card_data = SimpleNamespace(base_model="")

    def __init__(self, queries: np.ndarray, documents: np.ndarray) -> None:
        self.queries, self.documents = queries, documents

    def encode_query(self, texts: list[str], **_: Any) -> np.ndarray:
        return self.queries[[int(text.split()[1]) for text in texts]]

    def encode_document(self, texts: list[str], **_: Any) -> np.ndarray:
        return self.documents[[int(text.split()[1]) for text in texts]]

    def similarity(self, a: Any, b: Any) -> torch.Tensor:
        return torch.as_tensor(a) @ torch.as_tensor(b).T

    def similarity_pairwise(self, a: Any, b: Any) -> torch.Tensor:
        return (torch.as_tensor(a) * torch.as_tensor(b)).sum(1)


@pytest.mark.parametrize(
    ("positives", "options"),
    [
        (1, {}),
        (2, {"relative_margin": 0.05, "num_negatives": 5}),
        (2, {"absolute_margin": 0.1, "range_min": 4}),
        # with several positives, theirs looks at more candidates than `range_max`
        (1, {"max_score": 0.6, "min_score": 0.5, "range_min": 2, "range_max": 40}),
        (2, {"relative_margin": 0.5, "absolute_margin": 0.2, "max_score": 0.35}),
    ],
    ids=str,
)
def test_the_same_negatives(positives, options):
    """In float64. Theirs considers 33 candidates by default if there is a margin, so it gets all."""
    rng = np.random.default_rng(1)
    documents = rng.standard_normal((NUM, 12))
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    queries = documents + 0.15 * rng.standard_normal((NUM, 12))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    own = [[(i + k * 17) % NUM for k in range(positives)] for i in range(NUM)]
    pairs = [(f"q {i:04d}", f"d {j}") for i, each in enumerate(own) for j in each]
    rows = datasets.Dataset.from_dict(
        {"query": [query for query, _ in pairs], "document": [text for _, text in pairs]}
    )
    theirs = sentence_transformers.util.mine_hard_negatives(
        rows,
        Embedded(queries, documents),
        corpus=[f"d {j}" for j in range(NUM)],
        output_format="triplet",
        verbose=False,
        **{"range_max": NUM - positives, **options},
    )
    wanted: list[list[int]] = [[] for _ in range(NUM)]
    for query, document, negative in zip(
        theirs["query"], theirs["document"], theirs["negative"], strict=True
    ):
        number = int(query.split()[1])
        if int(document.split()[1]) == own[number][0]:  # they repeat the list for each positive
            wanted[number].append(int(negative.split()[1]))
    found = mine_hard_negatives(
        torch.from_numpy(queries),
        torch.from_numpy(documents),
        own,
        Selection(**{"range_max": NUM - positives, **options}),
        texts=[f"d {j}" for j in range(NUM)],
    )
    assert [[j for j in row if j >= 0] for row in found.indices.tolist()] == wanted
