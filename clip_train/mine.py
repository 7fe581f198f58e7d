"""Hard negatives from stored embeddings: for each query the candidates with the highest scores that
are not its positives.

The search is exact and works in tiles, on the CPU or a GPU: an N x M matrix of scores never exists.
The options have the names and meanings of sentence-transformers' `mine_hard_negatives`; the margins
are those of NV-Retriever (arXiv 2407.15831).

Below: N queries, M candidates, D values in an embedding, K candidates kept for each query.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from clip_train.data.fields import without_case
from clip_train.errors import UserError, raise_all
from clip_train.step import matmul_precision

# queries and candidates whose scores are computed at once, by the type of device: 4 and 256 MiB
TILES = {"cpu": 1024, "cuda": 8192}
TILES_IN_BLOCK = 32  # tiles of queries that stay on the device while all candidates pass
PAIRS_AT_ONCE = 4096  # queries and positives whose scores are computed at once
# candidates for each negative that `sampling_strategy="random"` draws from if `range_max` is None
DRAWN_FROM = 10


class Rows(Protocol):
    """A matrix that is read by rows: a tensor, an array, or a view of files."""

    @property
    def shape(self) -> Any: ...

    def __getitem__(self, rows: Any) -> Any:
        """The rows of a slice, or of an int64 array of indices."""


@dataclass(frozen=True)
class Selection:
    """Which candidates become negatives of a query. UserError if the options contradict each other.

    All filters use the dot product of the query's and the candidate's embedding, the score. A
    query's positive score is the lowest of its positives' scores.
    """

    num_negatives: int = 3
    """Negatives of each query, at most."""
    range_min: int = 0
    """Skip so many of the best candidates that the scores and margins below leave."""
    range_max: int | None = None
    """Consider only so many candidates with the highest scores, before the rules below. None: all,
    and with `sampling_strategy="random"` range_min + 10 num_negatives."""
    max_score: float | None = None
    """The highest score of a negative."""
    min_score: float | None = None
    """The lowest score of a negative."""
    absolute_margin: float | None = None
    """A negative's score is at most the positive score minus this."""
    relative_margin: float | None = None
    """A negative's score is at most positive * (1 - this); below zero, positive * (1 + this)."""
    sampling_strategy: Literal["top", "random"] = "top"
    """"top": the best of these candidates. "random": drawn from all of them, by `seed`."""
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.num_negatives < 1:
            problems.append(f"num_negatives ({self.num_negatives}) must be at least 1")
        if self.range_min < 0:
            problems.append(f"range_min ({self.range_min}) must be at least 0")
        if self.range_max is not None and self.range_max - self.range_min < self.num_negatives:
            problems.append(
                f"range_max ({self.range_max}) must be at least range_min ({self.range_min}) + "
                f"num_negatives ({self.num_negatives}): there are too few ranks between them"
            )
        if (
            self.min_score is not None
            and self.max_score is not None
            and self.min_score > self.max_score
        ):
            problems.append(
                f"min_score ({self.min_score}) must not be above max_score ({self.max_score})"
            )
        for name in ("absolute_margin", "relative_margin"):
            margin = getattr(self, name)
            if margin is not None and margin < 0:
                problems.append(
                    f"{name} ({margin}) must be at least 0: below, negatives could score higher "
                    "than the positive"
                )
        if self.sampling_strategy not in ("top", "random"):
            problems.append(f"sampling_strategy ({self.sampling_strategy}) must be top or random")
        raise_all(problems)

    @property
    def num_considered(self) -> int | None:
        """The candidates of each query that are considered; None: all."""
        if self.range_max is None and self.sampling_strategy == "random":
            return self.range_min + DRAWN_FROM * self.num_negatives
        return self.range_max

    @property
    def num_kept(self) -> int:
        """K: the best candidates of each query that the search must keep."""
        return self.num_considered or self.range_min + self.num_negatives


@dataclass(frozen=True)
class HardNegatives:
    """The result for N queries, n = `num_negatives`."""

    indices: Tensor  # int64 [N, n]: candidates, the hardest first; -1 behind the last one
    scores: Tensor  # [N, n]: their scores; -inf where there is none
    positive_scores: Tensor  # [N]: the lowest score of each query's positives
    # pairs of a query and a candidate that were dropped, by the first reason that applies
    dropped: dict[str, int]

    @property
    def counts(self) -> Tensor:
        """int64 [N]: the number of negatives of each query."""
        return (self.indices >= 0).sum(1)


def mine_hard_negatives(
    queries: Rows,
    candidates: Rows,
    positives: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    selection: Selection | None = None,
    *,
    texts: Sequence[str] | None = None,
    query_ids: Sequence[int] | Tensor | None = None,
    candidate_ids: Sequence[int] | Tensor | None = None,
    device: torch.device | str = "cpu",
    tile: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> HardNegatives:
    """For each query, find the candidates with the highest scores that are not its positives.

    A candidate is never a negative of a query if it is one of the query's positives, has the
    query's id, or has the same text as such a candidate. Of candidates with the same text, the
    first one stands for all. Texts that differ in case and blanks alone are the same.

    The result is the same each time, and does not depend on `tile` beyond the rounding of scores.
    Of candidates with equal scores, the one with the lower index comes first. Scores are computed
    in float32 without TF32, or in float64 if the embeddings are. Memory on the device: a few tiles
    of scores, and for 32 `tile` queries their embeddings and K candidates.

    Args:
        queries: [N, D].
        candidates: [M, D].
        positives: for each query the index of its positive among the candidates, or several.
        selection: the options (default: the 3 best candidates).
        texts: of the M candidates.
        query_ids, candidate_ids: whole numbers; one below 0 is equal to no other.
        device: where scores are computed. Embeddings may be anywhere.
        tile: queries and candidates whose scores are computed at once (default: 1024 on the CPU,
            8192 on a GPU).
        progress: called with the number of pairs of tiles that are done, and their total.

    Raises:
        UserError: shapes that do not fit, an index that does not exist, a query without a positive,
            values that are not finite, or no negative for any query.
    """
    selection = selection or Selection()
    num_queries, num_candidates = checked_shapes(queries, candidates)
    device = torch.device(device)
    tile = tile or TILES.get(device.type, TILES["cpu"])
    dtype = torch.float32
    if torch.float64 in (dtype_of(queries), dtype_of(candidates)):
        dtype = torch.float64
    first = first_of_each_text(texts, num_candidates)
    pairs = positive_pairs(positives, num_queries, num_candidates)
    # By reason: the candidates that a group excludes, and the group of each query. Each query is a
    # group of its own for its positives.
    exclusions = {"positive": Exclusion(pairs.queries, first[pairs.candidates], num_candidates)}
    groups = {"positive": torch.arange(num_queries)}
    if (query_ids is None) != (candidate_ids is None):
        raise UserError("query_ids and candidate_ids must be given together")
    if query_ids is not None and candidate_ids is not None:
        groups["id"] = checked_ids("query_ids", query_ids, num_queries)
        ids = checked_ids("candidate_ids", candidate_ids, num_candidates)
        known = ids >= 0
        exclusions["id"] = Exclusion(ids[known], first[known], num_candidates)
    is_copy = first != torch.arange(num_candidates)

    search = Search(selection, device, dtype, min(selection.num_kept, num_candidates))
    rng = np.random.default_rng(selection.seed)
    parts: list[HardNegatives] = []
    block_starts = range(0, num_queries, TILES_IN_BLOCK * tile)
    candidate_tiles = [*spans(0, num_candidates, tile)]
    total = -(-num_queries // tile) * len(candidate_tiles)
    done = 0
    with torch.no_grad(), matmul_precision("highest"), torch.autocast(device.type, enabled=False):
        for block_start in block_starts:
            block_stop = min(block_start + block_starts.step, num_queries)
            features = search.load(queries, slice(block_start, block_stop), "queries")
            positive_scores = lowest_scores(
                search, features, block_start, pairs.within(block_start, block_stop), candidates
            )
            search.start(positive_scores)
            query_tiles = [*spans(0, len(features), tile)]
            for columns in candidate_tiles:
                candidate_features = search.load(candidates, columns, "candidates")
                copies = is_copy[columns].to(device)
                for rows in query_tiles:
                    scores = features[rows] @ candidate_features.T
                    scores.masked_fill_(copies, -torch.inf)
                    for name, exclusion in exclusions.items():
                        of_rows = groups[name][block_start:block_stop][rows].to(device)
                        search.exclude(scores, name, exclusion.within(of_rows, columns))
                    search.add(scores, rows, columns.start)
                    done += 1
                    if progress is not None:
                        progress(done, total)
            parts.append(search.finish(rng))
    result = joined(parts)
    if int(result.counts.sum()) == 0:
        raise UserError(
            f"no candidate is left for any of {num_queries} queries among {num_candidates} "
            f"candidates; dropped pairs, by reason: {result.dropped}. Use smaller margins, a smaller "
            "range_min, or other limits of the score"
        )
    return result


# -- the search


class Search:
    """The best K candidates of each query of a block, while tiles of scores are added."""

    def __init__(
        self, selection: Selection, device: torch.device, dtype: torch.dtype, num_kept: int
    ) -> None:
        self.selection = selection
        self.device, self.dtype = device, dtype
        self.num_kept = num_kept

    def load(self, rows: Rows, span: slice | np.ndarray, name: str) -> Tensor:
        """Rows of embeddings, on the device. UserError if a value is not finite."""
        part = rows[span]
        if not isinstance(part, Tensor):
            part = torch.from_numpy(np.array(part))  # a copy: a file's view cannot be written to
        features = part.to(self.device, self.dtype)
        if not features.isfinite().all():
            broken = int((~features.isfinite().all(1)).nonzero()[0])
            row = span.start + broken if isinstance(span, slice) else int(span[broken])
            raise UserError(
                f"{name}: row {row} has values that are not finite; embed again with a model "
                "whose features are"
            )
        return features

    def start(self, positive_scores: Tensor) -> None:
        """Start a block with q queries. positive_scores: [q]."""
        size = (len(positive_scores), self.num_kept)
        # [q, K], the best first; of equal scores, the lower index
        self.scores = positive_scores.new_full(size, -torch.inf)
        self.indices = torch.full(size, -1, device=self.device)
        self.positive_scores = positive_scores
        self.dropped: dict[str, Tensor] = {}
        chosen = self.selection
        # the highest score that each rule allows, for each query
        self.ceilings: dict[str, Tensor] = {}
        if chosen.absolute_margin is not None:
            self.ceilings["absolute_margin"] = positive_scores - chosen.absolute_margin
        if chosen.relative_margin is not None:
            distance = positive_scores.abs() * chosen.relative_margin
            self.ceilings["relative_margin"] = positive_scores - distance
        if chosen.max_score is not None:
            self.ceilings["max_score"] = torch.full_like(positive_scores, chosen.max_score)

    def exclude(self, scores: Tensor, reason: str, places: tuple[Tensor, Tensor]) -> None:
        """Drop the candidates at these rows and columns of a tile."""
        rows, columns = places
        self._count(reason, scores[rows, columns] > -torch.inf)
        scores[rows, columns] = -torch.inf

    def add(self, scores: Tensor, rows: slice, first_index: int) -> None:
        """Keep the best of a tile's scores. Changes `scores`.

        scores: [rows, c], of the candidates from `first_index` on; -inf for excluded ones. The
        candidates of all tiles come in the order of their indices.
        """
        if self.selection.num_considered is None:
            self._filter(scores, rows)
        values, columns = largest(scores, self.num_kept)
        # Earlier candidates first: a stable sort then leaves equal scores in the order of indices.
        together = torch.cat([self.scores[rows], values], dim=1)
        indices = torch.cat([self.indices[rows], columns + first_index], dim=1)
        together, order = together.sort(dim=1, descending=True, stable=True)
        self.scores[rows] = together[:, : self.num_kept]
        self.indices[rows] = indices.gather(1, order)[:, : self.num_kept]

    def finish(self, rng: np.random.Generator) -> HardNegatives:
        """The negatives of the block's queries."""
        chosen = self.selection
        scores, indices = self.scores, self.indices
        if chosen.num_considered is not None:
            self._filter(scores, slice(None))
            scores, order = scores.sort(dim=1, descending=True, stable=True)
            indices = indices.gather(1, order)
        self._count("range_min", scores[:, : chosen.range_min] > -torch.inf)
        scores = scores[:, chosen.range_min :].cpu()
        indices = indices[:, chosen.range_min :].cpu()
        if chosen.sampling_strategy == "random":
            draws = torch.from_numpy(rng.random(scores.shape))
            draws[scores == -torch.inf] = 2.0  # the last
            drawn = draws.argsort(dim=1, stable=True)[:, : chosen.num_negatives]
            order = drawn.sort(dim=1).values
            scores, indices = scores.gather(1, order), indices.gather(1, order)
        size = (len(scores), chosen.num_negatives)
        width = min(scores.shape[1], chosen.num_negatives)
        result = HardNegatives(
            torch.full(size, -1),
            torch.full(size, -torch.inf, dtype=self.dtype),
            self.positive_scores.cpu(),
            {name: int(count) for name, count in self.dropped.items()},
        )
        result.scores[:, :width] = scores[:, :width]
        result.indices[:, :width] = indices[:, :width]
        result.indices[result.scores == -torch.inf] = -1
        return result

    def _filter(self, scores: Tensor, rows: slice) -> None:
        """Drop candidates by their scores. scores: [rows, ...], changed in place."""
        for name, ceiling in self.ceilings.items():
            self._drop(name, scores, scores > ceiling[rows, None])
        if self.selection.min_score is not None:
            self._drop("min_score", scores, scores < self.selection.min_score)

    def _drop(self, reason: str, scores: Tensor, mask: Tensor) -> None:
        self._count(reason, mask & (scores > -torch.inf))
        scores.masked_fill_(mask, -torch.inf)

    def _count(self, reason: str, mask: Tensor) -> None:
        """Add to `dropped`, on the device: a GPU's queue is not waited for."""
        self.dropped[reason] = self.dropped.get(reason, 0) + mask.sum()


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row with their columns, in the order of the columns.

    Of equal scores the lower columns are taken. `topk` takes any of them, so rows in which the
    first score that is left out equals the last one that is taken are sorted instead.

    scores: [q, c] -> two [q, min(count, c)].
    """
    if count < scores.shape[1]:
        values, columns = scores.topk(count + 1, dim=1)
        last = values[:, count - 1]
        tied = (last == values[:, count]) & (last > -torch.inf)
        values, columns = values[:, :count], columns[:, :count]
        if tied.any():
            ordered = scores[tied].sort(dim=1, descending=True, stable=True)
            values[tied], columns[tied] = ordered.values[:, :count], ordered.indices[:, :count]
    else:
        values, columns = scores, torch.arange(scores.shape[1], device=scores.device)
        columns = columns.expand_as(scores)
    columns, order = columns.sort(dim=1)
    return values.gather(1, order), columns


def lowest_scores(
    search: Search, features: Tensor, first_query: int, pairs: "Pairs", candidates: Rows
) -> Tensor:
    """The lowest score of each query's positives: [q].

    features: [q, D], of the queries from `first_query` on. pairs: of these queries.
    """
    lowest = features.new_full((len(features),), torch.inf)
    for span in spans(0, len(pairs.queries), PAIRS_AT_ONCE):
        rows = (pairs.queries[span] - first_query).to(search.device)
        positive = search.load(candidates, pairs.candidates[span].numpy(), "candidates")
        scores = (features[rows] * positive).sum(1)
        lowest.scatter_reduce_(0, rows, scores, "amin")
    return lowest


# -- which candidates are not negatives


@dataclass(frozen=True)
class Pairs:
    """Queries and their positives, in the order of the queries."""

    queries: Tensor  # int64 [P]
    candidates: Tensor  # int64 [P]

    def within(self, start: int, stop: int) -> "Pairs":
        """Those of the queries from `start` to `stop`."""
        edges = torch.searchsorted(self.queries, torch.tensor([start, stop])).tolist()
        return Pairs(self.queries[slice(*edges)], self.candidates[slice(*edges)])


class Exclusion:
    """Candidates that are excluded by group: a query gets none that its group excludes.

    groups, members: int64 [P], pairs of a group and a candidate.
    """

    def __init__(self, groups: Tensor, members: Tensor, num_candidates: int) -> None:
        self.num_candidates = num_candidates
        self.keys = (groups * num_candidates + members).unique()  # sorted

    def within(self, groups: Tensor, span: slice) -> tuple[Tensor, Tensor]:
        """The rows and columns of the excluded pairs in a tile.

        groups: int64 [q], of the tile's queries; span: its candidates.
        """
        self.keys = self.keys.to(groups.device)
        first_keys = groups * self.num_candidates
        low = torch.searchsorted(self.keys, first_keys + span.start)
        counts = torch.searchsorted(self.keys, first_keys + span.stop) - low
        rows = torch.arange(len(groups), device=groups.device).repeat_interleave(counts)
        before = counts.cumsum(0) - counts
        places = torch.arange(len(rows), device=groups.device) - before[rows] + low[rows]
        return rows, self.keys[places] - first_keys[rows] - span.start


def first_of_each_text(texts: Sequence[str] | None, num_candidates: int) -> Tensor:
    """int64 [M]: for each candidate the index of the first one with its text."""
    if texts is None:
        return torch.arange(num_candidates)
    if len(texts) != num_candidates:
        raise UserError(f"texts has {len(texts)} texts for {num_candidates} candidates")
    first: dict[str, int] = {}
    indices = [first.setdefault(without_case(text), index) for index, text in enumerate(texts)]
    return torch.tensor(indices)


def positive_pairs(
    positives: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    num_queries: int,
    num_candidates: int,
) -> Pairs:
    """UserError for a query without a positive, and for an index that does not exist."""
    if len(positives) != num_queries:
        raise UserError(f"positives has {len(positives)} entries for {num_queries} queries")
    counts = torch.ones(num_queries, dtype=torch.int64)
    if isinstance(positives, Tensor):
        candidates = positives.cpu().long()
    else:
        lists = [each if isinstance(each, Sequence) else [each] for each in positives]
        counts = torch.tensor([len(each) for each in lists])
        candidates = torch.tensor([*itertools.chain.from_iterable(lists)], dtype=torch.int64)
    if (counts == 0).any():
        query = int((counts == 0).nonzero()[0])
        raise UserError(f"positives: query {query} has none; leave such queries out")
    wrong = (candidates < 0) | (candidates >= num_candidates)
    if wrong.any():
        raise UserError(
            f"positives has the index {int(candidates[wrong][0])}, and there are "
            f"{num_candidates} candidates, from 0 on"
        )
    return Pairs(torch.arange(num_queries).repeat_interleave(counts), candidates)


# -- small parts


def checked_shapes(queries: Rows, candidates: Rows) -> tuple[int, int]:
    """N and M. UserError if they are not [N, D] and [M, D]."""
    for name, rows in {"queries": queries, "candidates": candidates}.items():
        if len(rows.shape) != 2 or 0 in rows.shape:
            raise UserError(
                f"{name} must be a matrix with a row for each one, and has the shape "
                f"{[*rows.shape]}"
            )
    if queries.shape[1] != candidates.shape[1]:
        raise UserError(
            f"queries have {queries.shape[1]} values each and candidates {candidates.shape[1]}: "
            "embed both with one model"
        )
    return queries.shape[0], candidates.shape[0]


def checked_ids(name: str, ids: Sequence[int] | Tensor, count: int) -> Tensor:
    """int64 [count] on the CPU. UserError for another number of ids."""
    if len(ids) != count:
        raise UserError(f"{name} has {len(ids)} ids for {count} rows")
    return torch.as_tensor(ids).cpu().long()


def dtype_of(rows: Rows) -> Any:
    """The torch dtype of some rows."""
    part = rows[0:1]
    return part.dtype if isinstance(part, Tensor) else torch.from_numpy(np.array(part)).dtype


def spans(start: int, stop: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` from `start` to `stop`."""
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))


def joined(parts: Sequence[HardNegatives]) -> HardNegatives:
    """The results of all blocks as one."""
    dropped: dict[str, int] = {}
    for part in parts:
        for name, count in part.dropped.items():
            dropped[name] = dropped.get(name, 0) + count
    return HardNegatives(
        torch.cat([part.indices for part in parts]),
        torch.cat([part.scores for part in parts]),
        torch.cat([part.positive_scores for part in parts]),
        dropped,
    )
