"""Retrieval: where in the ranking of all captions does an image find its own, and the other way round.

`n` samples on this rank, `N` on all, `D` features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clip_train import dist

_BLOCK_ELEMENTS = 1 << 24  # similarities held at once: 64 MiB of float32


def ranks_of_matches(
    queries: Tensor,
    candidates: Tensor,
    query_groups: Tensor,
    candidate_groups: Tensor,
    block_elements: int = _BLOCK_ELEMENTS,
) -> Tensor:
    """The place, from 1, of each query's best match among the candidates.

    Candidates of the query's own group are its matches: samples with the very same caption are
    interchangeable. One that is no match and ties with it is ranked before it, so the place does not
    depend on the samples' order, and a collapsed model finds nothing.

    Args:
        queries: [n, D] float32.
        candidates: [N, D] float32.
        query_groups: int64 [n], each of them among `candidate_groups`.
        candidate_groups: int64 [N].
        block_elements: how many similarities to hold at once.

    Returns:
        int64 [n].
    """
    rows = max(1, block_elements // max(1, len(candidates)))
    places = []
    for block, groups in zip(queries.split(rows), query_groups.split(rows), strict=True):
        similarity = block @ candidates.T  # [rows, N]
        match = groups[:, None] == candidate_groups[None]
        best = similarity.masked_fill(~match, -torch.inf).amax(dim=1, keepdim=True)
        # `not less` rather than `at least`: a NaN is never found
        places.append(1 + (~(similarity < best) & ~match).sum(dim=1))
    return torch.cat(places) if places else query_groups.new_zeros(0)


def retrieval_metrics(image: Tensor, text: Tensor, texts: Tensor) -> dict[str, float]:
    """Recall at 1, 5 and 10 and the median place, in both directions, under OpenCLIP's names.

    Args:
        image: [n, D] float32, normalised: this rank's.
        text: [n, D] float32, normalised.
        texts: int64 [n, context_length]: equal rows are the same caption.
    """
    counts = dist.gather_objects(len(image))  # n of each rank
    all_image, all_text, all_texts = (dist.gather_rows(x, counts) for x in (image, text, texts))
    groups = torch.unique(all_texts, dim=0, return_inverse=True)[1]  # [N]
    mine = groups.split(counts)[dist.rank()]
    out: dict[str, float] = {}
    for name, queries, candidates in (
        ("image_to_text", image, all_text),
        ("text_to_image", text, all_image),
    ):
        places = dist.gather_rows(ranks_of_matches(queries, candidates, mine, groups), counts)
        for k in (1, 5, 10):
            out[f"{name}_R@{k}"] = (places <= k).double().mean().item()
        out[f"{name}_median_rank"] = places.double().quantile(0.5).item()
    return out
