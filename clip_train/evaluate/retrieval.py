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
    """The group of each query and candidate. A query's matches are the candidates of its group.
    Candidates of group -1 are ignored."""

    queries: Tensor  # int64 [n]
    candidates: Tensor  # int64 [N]
    # True: a candidate with the same similarity as the match is ranked before it. False: only if
    # its index is smaller.
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
        rules: the result for a query without a match has no meaning.
        block_elements: how many similarities to hold at once.

    Returns:
        int64 [n] for each rule.
    """
    rows = max(1, block_elements // max(1, len(candidates)))
    order = torch.arange(len(candidates), device=queries.device)
    ranks: list[list[Tensor]] = [[groups.queries[:0]] for groups in rules]
    for start in range(0, len(queries), rows):
        similarity = queries[start : start + rows] @ candidates.T  # [rows, N]
        for groups, rule_ranks in zip(rules, ranks, strict=True):
            match = groups.queries[start : start + rows, None] == groups.candidates
            best, best_index = similarity.masked_fill(~match, -torch.inf).max(dim=1, keepdim=True)
            ahead = ~(similarity < best)  # not `>=`: a NaN counts as ahead
            if not groups.ties_ahead:
                ahead &= (similarity != best) | (order < best_index)
            rule_ranks.append(1 + (ahead & ~match & (groups.candidates >= 0)).sum(dim=1))
    return [torch.cat(rule_ranks) for rule_ranks in ranks]


def caption_metrics(
    encoded: Encoded, num_images: list[int], num_texts: list[int], config: EvaluateConfig
) -> dict[str, float]:
    """Retrieval metrics, each under the name of the project that defines it (docs/evaluation.md).
    Recalls are from 0 to 1. Collective.

    Args:
        encoded: the samples of all ranks, as `gather` returns them.
        num_images, num_texts: how many images and captions each rank has encoded. It computes the
            ranks of their matches.

    Returns:
        With `config.retrieval`, from each image's first caption: OpenCLIP's `image_to_text_R@1` ...
        `text_to_image_median_rank` (`get_clip_metrics`), and `dedup_...`, where equal captions are
        interchangeable. From all captions: clip_benchmark's `image_retrieval_recall@1` ...
        `text_retrieval_recall@10`, where a hit on any of an image's captions counts. With
        `config.val_loss`: `val_loss`, OpenCLIP's `clip_val_loss`.
    """
    image, text, owners = encoded.image, encoded.text, encoded.owners  # [N, D], [T, D], [T]
    is_first = torch.ones_like(owners, dtype=torch.bool)  # [T]: the first caption of its image
    is_first[1:] = owners[1:] != owners[:-1]
    out: dict[str, float] = {}
    if config.val_loss:
        out["val_loss"] = dist.agreed(
            validation_loss,
            image[owners[is_first]],
            text[is_first],
            encoded.logit_scale,
            config.batch_size,
        )
    if not config.retrieval:
        return out
    # [T]: captions with equal tokens have the same number
    caption_ids = torch.unique(encoded.texts, dim=0, return_inverse=True)[1]
    indices = torch.arange(len(image), device=image.device)
    # by the names of both directions: the groups of images (queries) and captions (candidates)
    rules = {
        ("image_to_text_R", "text_to_image_R"): Groups(indices, owners.where(is_first, -1)),
        ("dedup_image_to_text_R", "dedup_text_to_image_R"): Groups(
            caption_ids[is_first], caption_ids.where(is_first, -1), ties_ahead=True
        ),
        ("text_retrieval_recall", "image_retrieval_recall"): Groups(indices, owners),
    }
    directions = ((image, text, num_images), (text, image, num_texts))
    for direction, (all_queries, candidates, lengths) in enumerate(directions):
        queries = all_queries.split(lengths)[dist.rank()]
        all_groups = list(rules.values())
        if direction == 1:  # captions are the queries
            all_groups = [
                Groups(groups.candidates, groups.queries, groups.ties_ahead)
                for groups in all_groups
            ]
        rank_groups = [
            groups._replace(queries=groups.queries.split(lengths)[dist.rank()])
            for groups in all_groups
        ]
        ranks = dist.agreed(partial(ranks_of_matches, queries, candidates, rank_groups))
        for names, groups, rule_ranks in zip(rules, all_groups, ranks, strict=True):
            name = names[direction]
            all_ranks = dist.gather_rows(rule_ranks, lengths)[groups.queries >= 0].double()
            for k in (1, 5, 10):
                out[f"{name}@{k}"] = (all_ranks <= k).double().mean().item()
            if name in ("image_to_text_R", "text_to_image_R"):
                prefix = name.removesuffix("_R")
                out[f"{prefix}_mean_rank"] = all_ranks.mean().item()
                out[f"{prefix}_median_rank"] = all_ranks.quantile(0.5).floor().item()
    return out


def validation_loss(image: Tensor, text: Tensor, logit_scale: Tensor, batch_size: int) -> float:
    """The mean contrastive loss over N pairs, whose negatives are the other pairs of their batch:
    OpenCLIP's `clip_val_loss` in `open_clip_train.train.evaluate`. Always without a bias.

    image, text: [N, D].
    """
    total = torch.zeros((), dtype=torch.float64, device=image.device)
    for I, T in zip(image.split(batch_size), text.split(batch_size), strict=True):
        logits = logit_scale * I @ T.T  # [b, b]
        indices = torch.arange(len(I), device=I.device)
        loss = (F.cross_entropy(logits, indices) + F.cross_entropy(logits.T, indices)) / 2
        total += loss * len(I)
    return total.item() / len(image)
