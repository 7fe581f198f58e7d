"""Losses of embedders: each query chooses its document among those of the global batch.

    Z_ij = s / t_i (S_ij - margin_i [j is i's own]),    L = 1/N sum_i [ lse_j(Z_ij) - Z_i,own ]

S is the matrix of scores: `query . document` in `Ranking`, and a sum of maxima over tokens in
`clip_train.losses.maxsim.MaxSim`. Further documents of a query are negatives of all queries.

Ranks gather the queries. Documents stay on their ranks, because they are more numerous and longer:
each rank computes the columns of its own documents, [N, m n]. Network per step: the queries' features in one
all-gather, their gradients in one reduce-scatter, and a few numbers for each query. Memory: three
matrices of [N, m n].
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from clip_train import dist
from clip_train.losses.exchange import gathered_ids, share_counts
from clip_train.losses.tiles import accumulation_dtype, softplus
from clip_train.task import NO_CONTEXT, Context, Features, LossOutput, Objective

GUIDES = ("guide_query", "guide_document")


@dataclass(frozen=True)
class Shares:
    """Which queries and documents of the global batch this rank has."""

    counts: Sequence[int]  # queries of every rank
    m: int  # documents of each query; the first is its own, the positive

    @property
    def first(self) -> int:
        """The index of this rank's first query in the global batch."""
        return sum(self.counts[: dist.rank()])

    @property
    def n(self) -> int:
        return self.counts[dist.rank()]

    @property
    def size(self) -> int:
        """N: queries of the global batch."""
        return sum(self.counts)

    def gather(self, x: Tensor) -> Tensor:
        """[n, ...] -> [N, ...]. Collective."""
        return dist.gather_rows(x, self.counts)

    def sum_to_owners(self, x: Tensor) -> Tensor:
        """[N, ...] on every rank -> [n, ...], the sum over ranks of its own rows. Collective."""
        return dist.reduce_scatter_rows(x, self.counts)

    def own_positives(self, matrix: Tensor) -> Tensor:
        """The entries [n] of a matrix [N, m n] at this rank's queries and their own documents, as a
        view."""
        rows = matrix[self.first : self.first + self.n]
        return rows[:, :: self.m].diagonal()

    def own_candidates(self, matrix: Tensor) -> Tensor:
        """The entries [n, m] of a matrix [N, m n] at this rank's queries and all of their documents,
        as a view."""
        rows = matrix[self.first : self.first + self.n]
        return rows.unflatten(1, (self.n, self.m)).diagonal(dim1=0, dim2=1).T


@dataclass(frozen=True)
class Side:
    """The features of queries or of documents."""

    features: Tensor  # [rows, D], or [rows, tokens, D]
    mask: Tensor | None = None  # [rows, tokens]: 0 at tokens that do not count


class Scores(abc.ABC):
    """The scores of all queries with this rank's documents."""

    matrix: Tensor  # [N, m n]

    @abc.abstractmethod
    def gradients(self, d_matrix: Tensor) -> tuple[Tensor, Tensor]:
        """From the gradient of the matrix those of all queries' features, which are this rank's share
        of a sum, and of this rank's documents."""


class DotProducts(Scores):
    """`query . document`, from features [N, D] and [m n, D]."""

    def __init__(self, queries: Tensor, documents: Tensor) -> None:
        self._queries, self._documents = queries, documents
        self.matrix = queries @ documents.T

    def gradients(self, d_matrix: Tensor) -> tuple[Tensor, Tensor]:
        return d_matrix @ self._documents, d_matrix.T @ self._queries


@dataclass
class LossOfScores:
    """A loss, its gradient by the scores, and this rank's share of its derivative by the scale."""

    loss: Tensor  # [], float64, the same on all ranks
    d_matrix: Tensor  # [N, m n]
    d_scale: Tensor  # [], float64
    metrics: dict[str, Tensor | float] = field(default_factory=dict)


class Ranking(Objective):
    """InfoNCE from queries to documents, with what embedders add to it.

    The model returns a dict of

    - `query` [b, D] and `document` [m b, D], normalized, or `image` and `text`, or a tuple of both:
      the documents of a query follow one another, its positive first. Every query has m of them;
    - `logit_scale`, a number, unless `scale` is given;
    - perhaps `margin` [b, 1], one for each query, in place of the argument;
    - perhaps `temperature` [b, 1], by which the logits of a query are divided;
    - perhaps `guide_query` [b, E] and `guide_document` [m b, E], the features of a guide, which finds
      false negatives in place of the model itself (GISTEmbed, arXiv 2402.16829);
    - with `distill`: `scores` [b, m], a teacher's scores of each query's documents.

    Args:
        scale: the factor of the scores, one divided by the temperature; None: the model's
            `logit_scale`.
        symmetric: whether each positive chooses its query, too. The loss is the mean of both.
        margin: subtracted from the positive's score.
        exclude_above: a document is no negative of a query if its score is above a bound. With the
            positive's score p, the bound is `p - exclude_above`, or, if `exclude_by` is "relative",
            `p (1 - exclude_above)` (NV-Retriever, arXiv 2407.15831). None: there is no bound.
        exclude_by: "absolute" or "relative".
        distill: a further loss over each query's own m documents. "kl": the divergence of the
            model's softmax of `s S` from the softmax of `scores`. "margin_mse": the squared error
            of `S_own - S_j` (arXiv 2010.02666), which uses no scale.
        contrastive_weight, distill_weight: factors of the two losses.

    With `contrastive_step(..., ids=...)`, a document is no negative of a query whose own document has
    the same id.

    Raises ValueError for arguments outside these.
    """

    takes_ids = True
    own_names = True
    feature_names = ("query", "document", "image", "text")
    constants = (
        "query_mask",
        "document_mask",
        "image_mask",
        "text_mask",
        "margin",
        "temperature",
        "scores",
        *GUIDES,
    )

    def __init__(
        self,
        *,
        scale: float | None = None,
        symmetric: bool = False,
        margin: float = 0.0,
        exclude_above: float | None = None,
        exclude_by: Literal["absolute", "relative"] = "absolute",
        distill: Literal["kl", "margin_mse"] | None = None,
        contrastive_weight: float = 1.0,
        distill_weight: float = 1.0,
    ) -> None:
        if scale is not None and not scale > 0:
            raise ValueError(f"scale ({scale}) must be above 0; for a temperature of 0.05 it is 20")
        if exclude_by not in ("absolute", "relative"):
            raise ValueError(f"exclude_by ({exclude_by}) must be 'absolute' or 'relative'")
        if distill not in (None, "kl", "margin_mse"):
            raise ValueError(f"distill ({distill}) must be 'kl', 'margin_mse' or None")
        self.scale = scale
        self.symmetric = symmetric
        self.margin = margin
        self.exclude_above = exclude_above
        self.exclude_by = exclude_by
        self.distill = distill
        self.contrastive_weight = contrastive_weight
        self.distill_weight = distill_weight

    @torch.no_grad()
    def __call__(self, features: Features, context: Context = NO_CONTEXT) -> LossOutput:
        query_name, document_name = names_of_sides(features)
        queries = Side(features[query_name], features.get(f"{query_name}_mask"))
        documents = Side(features[document_name], features.get(f"{document_name}_mask"))
        shares = self._shares(features, queries, documents, context)
        # scores in a caller's bfloat16 have ties and wrong maxima
        with torch.autocast(queries.features.device.type, enabled=False):
            scores = self.score(queries, documents, shares)
            result = self._loss(features, context, shares, scores.matrix)
            d_queries, d_documents = scores.gradients(result.d_matrix)
        d_own = shares.sum_to_owners(d_queries)
        if d_own.ndim == 3:  # other ranks may have longer queries
            d_own = d_own[:, : queries.features.shape[1]]
        gradients = {query_name: d_own, document_name: d_documents}
        if self.scale is None:
            gradients["logit_scale"] = result.d_scale.to(d_documents.dtype).reshape(1)
        return LossOutput(result.loss, gradients, metrics=result.metrics)

    def score(self, queries: Side, documents: Side, shares: Shares) -> Scores:
        """The scores of all queries with this rank's documents. Collective."""
        dtype = accumulation_dtype(queries.features, documents.features)
        return DotProducts(shares.gather(queries.features.to(dtype)), documents.features.to(dtype))

    def _shares(
        self, features: Features, queries: Side, documents: Side, context: Context
    ) -> Shares:
        """ValueError for features that do not fit, before any rank waits in a collective."""
        n = len(queries.features)
        m, left_over = divmod(len(documents.features), n)
        shapes = [*queries.features.shape], [*documents.features.shape]
        if left_over or m == 0 or shapes[0][-1] != shapes[1][-1]:
            raise ValueError(
                f"documents' features {shapes[1]} do not fit the queries' {shapes[0]}: return "
                "equally many, or m documents for each query one after another, of one width"
            )
        if "logit_bias" in features:
            raise ValueError("a loss with a softmax has no logit_bias: it would cancel the bias")
        if self.scale is None and "logit_scale" not in features:
            raise ValueError(
                "the model returns no logit_scale, and the loss has no scale: give "
                f"{type(self).__name__}(scale=20)"
            )
        expected = {"margin": [n, 1], "temperature": [n, 1], "scores": [n, m]}
        guides = [name for name in GUIDES if name in features]
        if guides:
            width = features[guides[0]].shape[-1]
            expected |= {"guide_query": [n, width], "guide_document": [n * m, width]}
        for name, shape in expected.items():
            if name in features and [*features[name].shape] != shape:
                raise ValueError(f"{name} is {[*features[name].shape]}, and must be {shape}")
        if self.distill is not None and "scores" not in features:
            raise ValueError(
                f"distill ({self.distill}) needs a teacher's scores: the model has to return "
                f"scores, {expected['scores']}"
            )
        if self.distill == "margin_mse" and m < 2:
            raise ValueError("distill (margin_mse) needs at least two documents for each query")
        if len(guides) == 1 or (guides and self.exclude_above is None):
            raise ValueError(
                f"the model returns {guides}: a guide needs guide_query, guide_document and "
                "exclude_above="
            )
        return Shares(share_counts(n, context.global_size), m)

    def _loss(
        self, features: Features, context: Context, shares: Shares, matrix: Tensor
    ) -> LossOfScores:
        """The weighted sum of the losses of the scores. Collective."""
        scale = matrix.new_full((1,), self.scale) if self.scale else features["logit_scale"]
        factors = scale.to(matrix.dtype).expand(shares.n)
        if "temperature" in features:
            factors = factors / features["temperature"].squeeze(1)
        margins = matrix.new_full((shares.n,), self.margin)
        if "margin" in features:
            margins = features["margin"].squeeze(1).to(matrix.dtype)
        # a rank has the columns of its documents and the rows of all queries
        factors_all = shares.gather(factors)
        excluded = self._excluded(features, context, shares, matrix)
        loss, d_logits = self._info_nce(shares, matrix, factors_all, margins, excluded)
        loss, d_logits = loss * self.contrastive_weight, d_logits.mul_(self.contrastive_weight)
        # the logits are linear in the scale; the margin is part of the positives' logits
        relative = factors / scale.to(matrix.dtype)
        d_scale = -(shares.own_positives(d_logits) * margins * relative).double().sum()
        metrics: dict[str, Tensor | float] = {}
        d_squares = None
        if self.distill is not None:
            own = shares.own_candidates(matrix)
            if self.distill == "kl":
                terms, d_own = kl_divergence(own * factors[:, None], features["scores"])
                shares.own_candidates(d_logits).add_(d_own * (self.distill_weight / shares.size))
            else:
                terms, d_own = margin_mse(own, features["scores"])
                d_squares = d_own * (self.distill_weight / shares.size)
            distilled = dist.all_reduce_sum(terms.double().sum()) / shares.size
            metrics = {"contrastive_loss": loss, "distill_loss": distilled * self.distill_weight}
            loss = loss + distilled * self.distill_weight
        if excluded is not None:
            metrics["excluded_negatives"] = dist.all_reduce_sum(excluded.sum()) / shares.size
        d_scale += weighted_sum(matrix, d_logits, factors_all / scale.to(matrix.dtype))
        d_matrix = d_logits.mul_(factors_all[:, None])
        if d_squares is not None:
            shares.own_candidates(d_matrix).add_(d_squares)
        return LossOfScores(loss, d_matrix, d_scale, metrics)

    def _excluded(
        self, features: Features, context: Context, shares: Shares, matrix: Tensor
    ) -> Tensor | None:
        """bool [N, m n]: documents that are no negatives of a query. None: all are. Collective."""
        excluded = None
        all_ids = gathered_ids(context, shares.counts, shares.m)
        if all_ids is not None:
            of_positives = all_ids[:: shares.m]  # [N]
            first = shares.first * shares.m
            own_ids = all_ids[first : first + shares.n * shares.m]
            excluded = (of_positives[:, None] == own_ids) & (of_positives >= 0)[:, None]
        if self.exclude_above is not None:
            judged = matrix
            if "guide_query" in features:
                judged = shares.gather(features["guide_query"]) @ features["guide_document"].T
            positive = shares.gather(shares.own_positives(judged))
            if self.exclude_by == "absolute":
                bound = positive - self.exclude_above
            else:
                bound = positive * (1 - self.exclude_above)
            above = judged > bound[:, None]
            excluded = above if excluded is None else excluded | above
        if excluded is not None:
            shares.own_positives(excluded).fill_(False)
        return excluded

    def _info_nce(
        self,
        shares: Shares,
        matrix: Tensor,
        factors: Tensor,
        margins: Tensor,
        excluded: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The loss, float64 [], and its gradient by the logits Z, [N, m n]. Collective.

        The sums leave the positive out, so that loss and gradient stay precise when the loss is tiny.
        """
        logits = matrix * factors[:, None]
        own_factors = factors[shares.first : shares.first + shares.n]
        positive = (shares.own_positives(logits) - margins * own_factors).double()  # [n]
        if excluded is not None:
            logits.masked_fill_(excluded, -torch.inf)
        shares.own_positives(logits).fill_(-torch.inf)
        positive_all = shares.gather(positive)  # [N]
        of_ranks = dist.all_gather(logits.logsumexp(1).double()[None])  # [W, N]
        row_gap = of_ranks.logsumexp(0) - positive_all  # 1 - p is its sigmoid
        loss = softplus(row_gap).mean()
        columns = logits[:, :: shares.m].clone() if self.symmetric else None  # [N, n]
        row_lse = positive_all + softplus(row_gap)
        d_logits = logits.sub_(row_lse.to(logits.dtype)[:, None]).exp_()
        own_gap = row_gap[shares.first : shares.first + shares.n]
        shares.own_positives(d_logits).copy_(-own_gap.sigmoid())
        if columns is not None:
            column_gap = columns.logsumexp(0).double() - positive
            column_loss = dist.all_reduce_sum(softplus(column_gap).sum()) / shares.size
            loss = (loss + column_loss) / 2
            d_columns = columns.sub_((positive + softplus(column_gap)).to(columns.dtype)).exp_()
            d_columns[shares.first : shares.first + shares.n].diagonal().copy_(
                -column_gap.sigmoid()
            )
            d_logits[:, :: shares.m] += d_columns
            d_logits /= 2
        return loss, d_logits.div_(shares.size)


def names_of_sides(features: Features) -> tuple[str, str]:
    """The names of queries and documents. ValueError if there are none."""
    for names in (("query", "document"), ("image", "text")):
        if {*names} <= features.keys():
            return names
    raise ValueError(
        f"the model returns {[*features]}: name its features query and document, or image and text"
    )


def kl_divergence(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """The divergence of softmax(logits) from softmax(teacher), both [n, m]: terms [n], and the
    gradient of their sum by the logits."""
    log_p = logits.log_softmax(1)
    log_target = teacher.to(logits.dtype).log_softmax(1)
    target = log_target.exp()
    return (target * (log_target - log_p)).sum(1), log_p.exp() - target


def margin_mse(scores: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """The mean squared error of the first column's lead over each other one, both [n, m]: terms [n],
    and the gradient of their sum by the scores."""
    lead = scores[:, :1] - scores[:, 1:]
    error = lead - (teacher[:, :1] - teacher[:, 1:]).to(scores.dtype)
    d_lead = 2 * error / error.shape[1]
    return error.square().mean(1), torch.cat([d_lead.sum(1, keepdim=True), -d_lead], dim=1)


def weighted_sum(matrix: Tensor, weights: Tensor, of_rows: Tensor) -> Tensor:
    """sum_ij of_rows_i weights_ij matrix_ij, float64 []; entries without a weight may be infinite."""
    total = matrix.new_zeros((), dtype=torch.float64)
    for start in range(0, len(matrix), 1024):  # without another whole matrix
        part = slice(start, start + 1024)
        products = torch.where(weights[part] == 0, 0.0, matrix[part] * weights[part])
        total += (products.sum(1).double() * of_rows[part].double()).sum()
    return total
