"""Metrics from captions: retrieval under three rules, and OpenCLIP's validation loss.

`n` images and `t` captions on this rank, `N` and `T` on all, `D` features.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clip_train import dist
from clip_train.evaluate.config import EvaluateConfig
from clip_train.evaluate.features import Encoded

_BLOCK_ELEMENTS = 1 << 24  # similarities held at once: 64 MiB of float32


class Groups(NamedTuple):
    """Candidates of a query's own group are its matches; those of group -1 take no part."""

    queries: Tensor  # int64 [n]
    candidates: Tensor  # int64 [N]
    # candidates that tie with a match are ranked before it; else only those that come before it
    ties_ahead: bool = False


def ranks_of_matches(
    queries: Tensor,
    candidates: Tensor,
    rules: Sequence[Groups],
    block_elements: int = _BLOCK_ELEMENTS,
) -> list[Tensor]:
    """The rank, from 1, of each query's best match among the non-matching candidates, under each
    rule.

    Ties are ranked as by a stable sort, like OpenCLIP's on a CPU. With `ties_ahead`, the rank does
    not depend on the samples' order, and a collapsed model finds nothing. A NaN is never found.

    Args:
        queries: [n, D] float32.
        candidates: [N, D] float32.
        rules: each query's group is among the candidates', or the query is of no interest.
        block_elements: how many similarities to hold at once.

    Returns:
        int64 [n] for each rule.
    """
    rows = max(1, block_elements // max(1, len(candidates)))
    order = torch.arange(len(candidates), device=queries.device)
    places: list[list[Tensor]] = [[groups.queries[:0]] for groups in rules]
    for start in range(0, len(queries), rows):
        similarity = queries[start : start + rows] @ candidates.T  # [rows, N]
        for groups, found in zip(rules, places, strict=True):
            match = groups.queries[start : start + rows, None] == groups.candidates
            best, at = similarity.masked_fill(~match, -torch.inf).max(dim=1, keepdim=True)
            ahead = ~(similarity < best)  # rather than `at least`, for a NaN's sake
            if not groups.ties_ahead:
                ahead &= (similarity != best) | (order < at)
            found.append(1 + (ahead & ~match & (groups.candidates >= 0)).sum(dim=1))
    return [torch.cat(found) for found in places]


def caption_metrics(
    whole: Encoded, num_images: list[int], num_texts: list[int], config: EvaluateConfig
) -> dict[str, float]:
    """Retrieval metrics, each under the name of the project that defines it (docs/evaluation.md).
    Recalls are from 0 to 1. Collective.

    Args:
        whole: the samples of all ranks, as `gather` returns them.
        num_images, num_texts: how many of them each rank has encoded, and ranks now.

    Returns:
        With `config.retrieval`, from each image's first caption: OpenCLIP's `image_to_text_R@1` ...
        `text_to_image_median_rank` (`get_clip_metrics`), and `dedup_...`, where equal captions are
        interchangeable. From all captions: clip_benchmark's `image_retrieval_recall@1` ...
        `text_retrieval_recall@10`, where a hit on any of an image's captions counts. With
        `config.val_loss`: `val_loss`, OpenCLIP's `clip_val_loss`.
    """
    image, text, owners = whole.image, whole.text, whole.owners  # [N, D], [T, D], [T]
    first = torch.ones_like(owners, dtype=torch.bool)
    first[1:] = owners[1:] != owners[:-1]
    out: dict[str, float] = {}
    if config.val_loss:
        pairs = image[owners[first]], text[first], whole.logit_scale, config.batch_size
        out["val_loss"] = dist.agreed(validation_loss, *pairs)
    if not config.retrieval:
        return out
    same = torch.unique(whole.texts, dim=0, return_inverse=True)[1]  # [T]
    indices = torch.arange(len(image), device=image.device)
    rules = {  # of images and captions, and of captions and images
        ("image_to_text_R", "text_to_image_R"): Groups(indices, owners.where(first, -1)),
        ("dedup_image_to_text_R", "dedup_text_to_image_R"): Groups(
            same[first], same.where(first, -1), ties_ahead=True
        ),
        ("text_retrieval_recall", "image_retrieval_recall"): Groups(indices, owners),
    }
    sides = ((image, text, num_images), (text, image, num_texts))
    for side, (all_queries, candidates, lengths) in enumerate(sides):
        queries = all_queries.split(lengths)[dist.rank()]
        of_side = list(rules.values())
        if side == 1:
            of_side = [Groups(texts, images, ahead) for images, texts, ahead in of_side]
        mine = [
            groups._replace(queries=groups.queries.split(lengths)[dist.rank()])
            for groups in of_side
        ]
        matches = dist.agreed(partial(ranks_of_matches, queries, candidates, mine))
        for names, groups, found in zip(rules, of_side, matches, strict=True):
            places = dist.gather_rows(found, lengths)[groups.queries >= 0].double()
            out |= {f"{names[side]}@{k}": (places <= k).double().mean().item() for k in (1, 5, 10)}
            if names[side] in ("image_to_text_R", "text_to_image_R"):
                out[f"{names[side][:-2]}_mean_rank"] = places.mean().item()
                out[f"{names[side][:-2]}_median_rank"] = places.quantile(0.5).floor().item()
    return out


def validation_loss(image: Tensor, text: Tensor, logit_scale: Tensor, batch_size: int) -> float:
    """The mean over samples of the contrastive loss, [N, D] and [N, D] of pairs, whose negatives
    are the others of its batch: OpenCLIP's `clip_val_loss` in `open_clip_train.train.evaluate`. No
    bias, whatever the loss in training."""
    total = torch.zeros((), dtype=torch.float64, device=image.device)
    for I, T in zip(image.split(batch_size), text.split(batch_size), strict=True):
        logits = logit_scale * I @ T.T
        indices = torch.arange(len(I), device=I.device)
        total += (
            (F.cross_entropy(logits, indices) + F.cross_entropy(logits.T, indices)) / 2 * len(I)
        )
    return total.item() / len(image)
