"""Late interaction: the score of a query and a document is a sum of maxima over their tokens.

    S_ij = sum_q w_iq max_t <Q_iq, D_jt>          (ColBERT, arXiv 2004.12832; ColPali, 2407.01449)

The loss of the scores is that of `clip_train.losses.ranking.Ranking`. Tokens' similarities exist for
one tile of queries and documents at a time: nothing has N x M x tokens x tokens entries. Between the
scores and their gradient, the places of the maxima are kept, in one or two bytes each; they are not
computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from clip_train import dist
from clip_train.losses.ranking import Ranking, Scores, Shares, Side
from clip_train.losses.tiles import accumulation_dtype
from clip_train.task import Features

# similarities in a tile: 16 MiB stay in a CPU's caches, 256 MiB keep a GPU busy
TILE_ON_CPU = 2**22
TILE_ON_GPU = 2**26


class MaxSim(Ranking):
    """`Ranking` over features of tokens.

    The model returns `query` [b, Lq, D], `document` [m b, Ld, D] and `logit_scale` (unless `scale`
    is given), and where tokens are padding, `query_mask` [b, Lq] and `document_mask` [m b, Ld], which
    are 0 there. Ranks may pad to different lengths.

    Args:
        mean: whether a score is the mean over the query's tokens, in place of their sum.
        padding: how padding of a document counts. "lowest": not at all (ColBERT,
            sentence-transformers). "zero": as a similarity of 0, below which no maximum of a padded
            document falls (ColPali, PyLate).
        options: those of `Ranking`.

    Raises ValueError for arguments outside these.
    """

    feature_dims = 3

    def __init__(
        self,
        *,
        mean: bool = False,
        padding: Literal["lowest", "zero"] = "lowest",
        tile: int | None = None,
        **options: Any,
    ) -> None:
        """tile: token similarities that exist at once; None: by the device."""
        super().__init__(**options)
        if padding not in ("lowest", "zero"):
            raise ValueError(f"padding ({padding}) must be 'lowest' or 'zero'")
        self.mean = mean
        self.padding = padding
        self.tile = tile

    def score(self, queries: Side, documents: Side, shares: Shares) -> Scores:
        dtype = accumulation_dtype(queries.features, documents.features)
        features = queries.features.to(dtype)
        n, length, width = features.shape
        weights = features.new_ones(n, length) if queries.mask is None else queries.mask.to(dtype)
        if self.mean:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
        if len(shares.counts) > 1:
            # on the device, since a process group may have no backend for the CPU
            lengths = dist.all_gather(torch.tensor([length], device=features.device))
            longest = int(lengths.max().item())
            features = F.pad(features, (0, 0, 0, longest - length))
            weights = F.pad(weights, (0, longest - length))
        # one collective for both
        together = shares.gather(torch.cat([features.flatten(1), weights], dim=1))
        features_all = together[:, : -weights.shape[1]].unflatten(1, (-1, width))
        return Maxima(
            features_all,
            together[:, -weights.shape[1] :],
            documents.features.to(dtype),
            None if documents.mask is None else documents.mask.bool(),
            floor=0.0 if self.padding == "zero" else -torch.inf,
            tile=self.tile or (TILE_ON_GPU if features.is_cuda else TILE_ON_CPU),
        )

    def _shares(self, features: Features, queries: Side, documents: Side, context: Any) -> Shares:
        shares = super()._shares(features, queries, documents, context)
        for kind, side in (("queries", queries), ("documents", documents)):
            shape = [*side.features.shape]
            if side.mask is not None and [*side.mask.shape] != shape[:2]:
                raise ValueError(
                    f"the mask of the {kind} is {[*side.mask.shape]}, and must be {shape[:2]}, one "
                    "number for each token"
                )
        return shares


class Maxima(Scores):
    """The sums of maxima, and their places.

    Args:
        queries: [N, Lq, D].
        weights: [N, Lq], of the queries' tokens; 0 for padding.
        documents: [M, Ld, D].
        keep: bool [M, Ld], false for padding; None: there is none.
        floor: the similarity with padding.
        tile: similarities that exist at once.
    """

    def __init__(
        self,
        queries: Tensor,
        weights: Tensor,
        documents: Tensor,
        keep: Tensor | None,
        *,
        floor: float,
        tile: int,
    ) -> None:
        self._queries, self._weights, self._documents = queries, weights, documents
        self._keep, self._tile = keep, tile
        N, Lq, _ = queries.shape
        M, Ld, _ = documents.shape
        self.matrix = queries.new_empty(N, M)
        # of the maxima, among a document's tokens
        places_dtype = smallest_dtype(Ld)
        self._places = torch.empty(N, Lq, M, dtype=places_dtype, device=queries.device)
        for rows, columns in self._tiles():
            similarities = self._tokens(rows) @ documents[columns].flatten(0, 1).T
            similarities = similarities.unflatten(1, (-1, Ld))  # [r Lq, c, Ld]
            if keep is not None:
                similarities.masked_fill_(~keep[columns], floor)
            maxima, places = similarities.max(-1)
            maxima = maxima.unflatten(0, (-1, Lq))  # [r, Lq, c]
            weight = weights[rows, :, None]
            # a maximum may be infinite
            weighted = torch.where(weight == 0, 0.0, maxima * weight)
            self.matrix[rows, columns] = weighted.sum(1)
            self._places[rows, :, columns] = places.unflatten(0, (-1, Lq)).to(places_dtype)

    def _tokens(self, rows: slice) -> Tensor:
        """[r Lq, D]"""
        return self._queries[rows].flatten(0, 1)

    def _tiles(self) -> Iterator[tuple[slice, slice]]:
        """Queries and documents of each tile, which is about square in tokens."""
        (N, Lq, _), (M, Ld, _) = self._queries.shape, self._documents.shape
        side = int(self._tile**0.5)
        r = max(1, min(N, side // Lq))
        c = max(1, min(M, self._tile // (r * Lq * Ld)))
        for i in range(0, N, r):
            for j in range(0, M, c):
                yield slice(i, min(i + r, N)), slice(j, min(j + c, M))

    def gradients(self, d_matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Each token of a query and each document have one pair of tokens with a gradient, so the two
        products become sums of rows."""
        d_queries = torch.zeros_like(self._queries)
        d_documents = torch.zeros_like(self._documents)
        Ld, width = self._documents.shape[1:]
        for rows, columns in self._tiles():
            tokens = self._tokens(rows)  # [r Lq, D]
            of_documents = self._documents[columns].flatten(0, 1)  # [c Ld, D]
            num_documents = len(of_documents) // Ld
            firsts = torch.arange(0, len(of_documents), Ld, device=tokens.device)
            pairs = self._places[rows, :, columns].flatten(0, 1).long() + firsts  # [r Lq, c]
            weights = (self._weights[rows, :, None] * d_matrix[rows, None, columns]).flatten(0, 1)
            if self._keep is not None:  # a maximum that is the floor depends on no token
                weights = weights * self._keep[columns].flatten()[pairs]
            d_queries[rows].view(-1, width).add_(
                F.embedding_bag(pairs, of_documents, per_sample_weights=weights, mode="sum")
            )
            # the same pairs, sorted by the document's token
            by_token, order = pairs.flatten().sort(stable=True)
            starts = torch.searchsorted(
                by_token, torch.arange(len(of_documents), device=tokens.device)
            )
            d_documents[columns].view(-1, width).add_(
                F.embedding_bag(
                    order // num_documents,
                    tokens,
                    starts,
                    per_sample_weights=weights.flatten()[order],
                    mode="sum",
                )
            )
        return d_queries, d_documents


def smallest_dtype(count: int) -> torch.dtype:
    """The smallest type of the whole numbers below `count`."""
    for dtype in (torch.uint8, torch.int16):
        if count <= torch.iinfo(dtype).max + 1:
            return dtype
    return torch.int32
