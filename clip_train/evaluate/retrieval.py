"""Metrics from captions: retrieval under three rules, and OpenCLIP's validation loss.

`N` images and `T` captions on all processes, `D` features. Only here, a "rank" is the position of a
match among the candidates; the processes of the run are called processes.
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


class MatchRule(NamedTuple):
    """Which candidates match a query: those of its group. Also decides how ties are ranked."""

    query_groups: Tensor  # int64 [n]; the ranks of queries of group -1 have no meaning
    candidate_groups: Tensor  # int64 [N]; candidates of group -1 are ignored
    # True: a candidate with the same similarity as the match is ranked before it. False: only if
    # its index is smaller.
    ties_ahead: bool = False

    def reversed(self) -> "MatchRule":
        """The same rule for the other direction: the candidates are the queries."""
        return MatchRule(self.candidate_groups, self.query_groups, self.ties_ahead)


def ranks_of_matches(
    queries: Tensor,
    candidates: Tensor,
    rules: Sequence[MatchRule],
    block_elements: int = _BLOCK_ELEMENTS,
) -> list[Tensor]:
    """Compute the rank, from 1, of each query's best match among the non-matching candidates, under
    each rule.

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
    block_rows = max(1, block_elements // max(1, len(candidates)))
    order = torch.arange(len(candidates), device=queries.device)
    ranks = [torch.empty(len(queries), dtype=torch.int64, device=queries.device) for _ in rules]
    for start in range(0, len(queries), block_rows):
        block = slice(start, start + block_rows)
        similarity = queries[block] @ candidates.T  # [block_rows, N]
        for rule, rule_ranks in zip(rules, ranks, strict=True):
            match = rule.query_groups[block, None] == rule.candidate_groups
            best, best_index = similarity.masked_fill(~match, -torch.inf).max(dim=1, keepdim=True)
            # not `>=`: a NaN counts as ahead
            ahead = ~(similarity < best)
            if not rule.ties_ahead:
                ahead &= (similarity != best) | (order < best_index)
            competes = ~match & (rule.candidate_groups >= 0)
            rule_ranks[block] = 1 + (ahead & competes).sum(dim=1)
    return ranks


def caption_metrics(
    encoded: Encoded, num_images: list[int], num_texts: list[int], config: EvaluateConfig
) -> dict[str, float]:
    """Compute retrieval metrics, each under the name of the project that defines it
    (docs/evaluation.md). Recalls are from 0 to 1. Collective.

    Args:
        encoded: the samples of all processes, as `gather` returns them.
        num_images, num_texts: how many images and captions each process has encoded. It computes
            the ranks of their matches.

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
    # images are the queries, captions the candidates
    first_captions = MatchRule(indices, owners.where(is_first, -1))
    equal_captions = MatchRule(
        caption_ids[is_first], caption_ids.where(is_first, -1), ties_ahead=True
    )
    all_captions = MatchRule(indices, owners)
    out |= _direction_metrics(
        image,
        text,
        num_images,
        {
            "image_to_text_R": first_captions,
            "dedup_image_to_text_R": equal_captions,
            "text_retrieval_recall": all_captions,
        },
    )
    out |= _direction_metrics(
        text,
        image,
        num_texts,
        {
            "text_to_image_R": first_captions.reversed(),
            "dedup_text_to_image_R": equal_captions.reversed(),
            "image_retrieval_recall": all_captions.reversed(),
        },
    )
    return out


def _direction_metrics(
    all_queries: Tensor, candidates: Tensor, num_queries: list[int], rules: dict[str, MatchRule]
) -> dict[str, float]:
    """Compute the metrics of one direction. Collective.

    Args:
        all_queries: features of all processes, [N, D] or [T, D].
        candidates: features of all processes, of the other kind.
        num_queries: how many queries each process ranks.
        rules: each by the prefix of its metrics' names. Queries of group -1 are left out.
    """
    process = dist.rank()
    queries = all_queries.split(num_queries)[process]
    own_rules = [
        rule._replace(query_groups=rule.query_groups.split(num_queries)[process])
        for rule in rules.values()
    ]
    own_ranks = dist.agreed(partial(ranks_of_matches, queries, candidates, own_rules))
    out: dict[str, float] = {}
    for (name, rule), ranks in zip(rules.items(), own_ranks, strict=True):
        all_ranks = dist.gather_rows(ranks, num_queries)[rule.query_groups >= 0].double()
        for k in (1, 5, 10):
            out[f"{name}@{k}"] = (all_ranks <= k).double().mean().item()
        if name in ("image_to_text_R", "text_to_image_R"):
            prefix = name.removesuffix("_R")
            out[f"{prefix}_mean_rank"] = all_ranks.mean().item()
            out[f"{prefix}_median_rank"] = all_ranks.quantile(0.5).floor().item()
    return out


def validation_loss(image: Tensor, text: Tensor, logit_scale: Tensor, batch_size: int) -> float:
    """Compute the mean contrastive loss over N pairs, whose negatives are the other pairs of their
    batch: OpenCLIP's `clip_val_loss` in `open_clip_train.train.evaluate`. Always without a bias.

    image, text: [N, D].
    """
    total = torch.zeros((), dtype=torch.float64, device=image.device)
    batches = zip(image.split(batch_size), text.split(batch_size), strict=True)
    for batch_image, batch_text in batches:
        logits = logit_scale * batch_image @ batch_text.T  # [b, b]
        indices = torch.arange(len(batch_image), device=image.device)
        loss = (F.cross_entropy(logits, indices) + F.cross_entropy(logits.T, indices)) / 2
        total += loss * len(batch_image)
    return total.item() / len(image)
