"""`mine_hard_negatives` against brute force in float64, which shares no code with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from clip_train.errors import UserError
from clip_train.mine import HardNegatives, Selection, mine_hard_negatives


def brute_force(
    queries: np.ndarray,
    candidates: np.ndarray,
    positives: list[list[int]],
    selection: Selection,
    excluded: list[set[int]] | None = None,
) -> list[list[int]]:
    """For each query, in float64: the candidates that pass all rules, the best first. `top` takes the
    first ones of such a list, `random` any."""
    lists = []
    for i, query in enumerate(queries):
        scores = candidates @ query
        positive = min(scores[j] for j in positives[i])
        ceiling = math.inf
        if selection.absolute_margin is not None:
            ceiling = min(ceiling, positive - selection.absolute_margin)
        if selection.relative_margin is not None:
            ceiling = min(ceiling, positive - abs(positive) * selection.relative_margin)
        if selection.max_score is not None:
            ceiling = min(ceiling, selection.max_score)
        floor = -math.inf if selection.min_score is None else selection.min_score
        own = [*positives[i], *(excluded[i] if excluded else ())]
        ranked = np.lexsort((np.arange(len(scores)), -scores))
        ranked = ranked[~np.isin(ranked, own)][: selection.range_max]
        ranked = ranked[(scores[ranked] >= floor) & (scores[ranked] <= ceiling)]
        lists.append(ranked[selection.range_min :].tolist())
    return lists


def unit(rows: int, width: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((rows, width))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def whole(rows: int, width: int, seed: int) -> np.ndarray:
    """Small whole numbers: float32 computes their products exactly, and many are equal."""
    return np.random.default_rng(seed).integers(-2, 3, (rows, width)).astype(np.float64)


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(array).float() for array in arrays]


def lists_of(found: HardNegatives) -> list[list[int]]:
    return [[j for j in row if j >= 0] for row in found.indices.tolist()]


def test_equal_to_brute_force_on_20_000_texts():
    """All negatives of all queries, in float64 on both sides: rounding then swaps no two of them."""
    num = 20_000
    texts = unit(num, 16, 1)
    queries = texts + 0.2 * unit(num, 16, 2)
    selection = Selection(num_negatives=5, relative_margin=0.25, range_min=1, min_score=0.7)
    found = mine_hard_negatives(
        torch.from_numpy(queries), torch.from_numpy(texts), range(num), selection
    )
    assert 10_000 < int(found.counts.sum()) < 90_000  # the rules leave some, and not all
    for start in range(0, num, 500):
        rows = np.arange(500)
        scores = queries[start : start + 500] @ texts.T
        positive = scores[rows, start + rows][:, None]
        scores[(scores > 0.75 * positive) | (scores < 0.7)] = -np.inf  # also the positive itself
        best = np.argpartition(-scores, 6, axis=1)[:, :6]
        best = best[rows[:, None], np.argsort(-scores[rows[:, None], best], axis=1)][:, 1:]
        best_scores = scores[rows[:, None], best]
        expected = np.where(best_scores > -np.inf, best, -1)
        assert np.array_equal(found.indices[start : start + 500].numpy(), expected)
        mined = found.scores[start : start + 500].numpy()
        assert np.allclose(mined[expected >= 0], best_scores[expected >= 0], rtol=0, atol=1e-12)


OPTIONS = [
    {},
    {"num_negatives": 1},
    {"num_negatives": 400},  # more than there are
    {"absolute_margin": 0.0},
    {"absolute_margin": 3.0, "range_min": 2},
    {"relative_margin": 0.25},
    {"relative_margin": 0.25, "absolute_margin": 2.0, "max_score": 5.0, "min_score": 1.0},
    {"max_score": 4.0, "range_min": 5, "range_max": 80},
    {"min_score": 3.0, "range_min": 1, "range_max": 40, "num_negatives": 7},
    {"relative_margin": 0.25, "absolute_margin": 2.0, "range_min": 2, "range_max": 31},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tile", [7, 64, 1024])
def test_every_option_is_brute_force_and_ties_go_lower(options, tile):
    """Also with tiles that cut the candidates between equal scores, and with several blocks of queries."""
    queries, candidates = whole(230, 6, 3), whole(130, 6, 4)
    positives = [[i % 130, (7 * i) % 130] if i % 3 else [i % 130] for i in range(230)]
    selection = Selection(**options)
    steps: list[tuple[int, int]] = []
    found = mine_hard_negatives(
        *tensors(queries, candidates),
        positives,
        selection,
        tile=tile,
        progress=lambda done, total: steps.append((done, total)),
    )
    expected = brute_force(queries, candidates, positives, selection)
    wanted = [ranked[: selection.num_negatives] for ranked in expected]
    assert lists_of(found) == wanted and found.counts.tolist() == [len(each) for each in wanted]
    own = [min(candidates[j] @ queries[i] for j in positives[i]) for i in range(230)]
    assert found.positive_scores.tolist() == own
    assert [done for done, _ in steps] == [*range(1, steps[-1][1] + 1)]


def test_random_draws_without_repetition_from_the_window():
    queries, candidates = whole(230, 6, 5), whole(300, 6, 6)
    positives = [[i] for i in range(230)]

    def mined(seed: int, tile: int = 64, **options: int) -> list[list[int]]:
        selection = Selection(sampling_strategy="random", seed=seed, absolute_margin=1.0, **options)
        return lists_of(
            mine_hard_negatives(*tensors(queries, candidates), positives, selection, tile=tile)
        )

    window = Selection(range_min=3, range_max=23, absolute_margin=1.0)
    expected = brute_force(queries, candidates, positives, window)
    drawn = mined(0, range_min=3, range_max=23, num_negatives=4)
    for ranked, negatives in zip(expected, drawn, strict=True):
        places = [ranked.index(j) for j in negatives]
        assert places == sorted(set(places)) and len(places) == min(4, len(ranked))
    # as often from one end of the window as from the other
    places = [ranked.index(j) for ranked, row in zip(expected, drawn, strict=True) for j in row]
    assert abs(np.mean(places) - np.mean([(len(r) - 1) / 2 for r in expected if r])) < 1
    assert drawn == mined(0, tile=7, range_min=3, range_max=23, num_negatives=4)
    assert drawn != mined(1, range_min=3, range_max=23, num_negatives=4)
    # the whole window: nothing is left to draw
    assert mined(0, range_min=3, range_max=23, num_negatives=20) == expected
    by_default = brute_force(
        queries, candidates, positives, Selection(range_max=20, absolute_margin=1.0)
    )
    assert all(
        set(row) <= set(ranked)
        for row, ranked in zip(mined(0, num_negatives=2), by_default, strict=True)
    )


def test_planted_negatives_are_found_planted_positives_not():
    """Around each query: its positive at a cosine of 0.9, an unmarked copy of it at 0.89, three hard
    negatives at 0.8 to 0.7. All else is random, in 64 dimensions."""
    num, width = 500, 64
    queries = unit(num, width, 7)

    def at(cosine: float, seed: int) -> np.ndarray:
        other = unit(num, width, seed)
        other -= (other * queries).sum(1, keepdims=True) * queries
        other /= np.linalg.norm(other, axis=1, keepdims=True)
        return cosine * queries + math.sqrt(1 - cosine**2) * other

    groups = [
        at(0.9, 8),
        at(0.89, 9),
        at(0.8, 10),
        at(0.75, 11),
        at(0.7, 12),
        unit(5000, width, 13),
    ]
    found = mine_hard_negatives(
        *tensors(queries, np.concatenate(groups)), range(num), Selection(relative_margin=0.05)
    )
    planted = [[i + 2 * num, i + 3 * num, i + 4 * num] for i in range(num)]
    recall = np.mean([set(p) == set(m) for p, m in zip(planted, lists_of(found), strict=True)])
    assert recall > 0.99
    assert found.dropped == {"positive": num, "relative_margin": num, "range_min": 0}
    assert found.scores[0].tolist() == pytest.approx([0.8, 0.75, 0.7], abs=1e-6)


def test_candidates_of_the_same_id_or_text_are_no_negatives():
    """Ids 0 to 19; a text occurs five times, some with another case; a negative id equals no other."""
    num = 200
    queries, candidates = whole(num, 6, 14), whole(num, 6, 15)
    rng = np.random.default_rng(16)
    query_ids, candidate_ids = rng.integers(-3, 20, num), rng.integers(-3, 20, num)
    numbers = rng.integers(0, num // 5, num)
    texts = [f"A  text {n}" if i % 2 else f"a text {n} " for i, n in enumerate(numbers)]
    excluded = []
    for i in range(num):
        of_id = {j for j in range(num) if candidate_ids[j] == query_ids[i] >= 0}
        same_text = {numbers[j] for j in {i} | of_id}
        copies = {j for j in range(num) if numbers[j] in numbers[:j]}
        excluded.append(copies | {j for j in range(num) if numbers[j] in same_text})
    selection = Selection(num_negatives=6)
    found = mine_hard_negatives(
        *tensors(queries, candidates),
        torch.arange(num),
        selection,
        texts=texts,
        query_ids=query_ids.tolist(),
        candidate_ids=torch.from_numpy(candidate_ids),
        tile=33,
    )
    expected = brute_force(queries, candidates, [[i] for i in range(num)], selection, excluded)
    assert lists_of(found) == [ranked[:6] for ranked in expected]
    assert found.dropped["positive"] == num and found.dropped["id"] > num


def test_embeddings_of_16_bits_are_compared_in_float32():
    """And arrays, such as the view of a file, are read as tensors are."""
    queries, candidates = unit(40, 32, 17), unit(60, 32, 18)
    half = [each.half() for each in tensors(queries, candidates)]
    found = mine_hard_negatives(*half, range(40))
    again = mine_hard_negatives(*[each.numpy() for each in half], range(40))
    assert found.scores.dtype == torch.float32 and found.indices.equal(again.indices)
    products = half[1].double()[found.indices[:, 0]] * half[0].double()
    assert found.scores[:, 0].double().tolist() == pytest.approx(products.sum(1).tolist(), abs=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_negatives": 0}, r"num_negatives \(0\) must be at least 1"),
        ({"range_min": -1}, r"range_min \(-1\)"),
        ({"range_min": 2, "range_max": 4}, r"range_max \(4\) must be at least range_min \(2\) \+"),
        ({"min_score": 0.5, "max_score": 0.4}, r"min_score \(0.5\) must not be above max_score"),
        ({"relative_margin": -0.1}, r"relative_margin \(-0.1\) must be at least 0"),
        ({"sampling_strategy": "best"}, r"sampling_strategy \(best\) must be top or random"),
    ],
)
def test_options_that_cannot_be_right(options, message):
    with pytest.raises(UserError, match=message):
        Selection(**options)


def test_mistakes_name_the_argument():
    queries, candidates = tensors(unit(4, 8, 19), unit(5, 8, 20))
    own = range(4)
    for arguments, keywords, message in [
        ((queries, candidates[:, :7], own), {}, "queries have 8 values each and candidates 7"),
        ((queries[0], candidates, own), {}, r"queries must be a matrix .* \[8\]"),
        ((queries, candidates[:0], own), {}, r"candidates must be a matrix .* \[0, 8\]"),
        ((queries, candidates, [0, 1, 2]), {}, "positives has 3 entries for 4 queries"),
        ((queries, candidates, [0, 1, 2, 5]), {}, "positives has the index 5, and there are 5"),
        ((queries, candidates, [[0], [1], [], [2]]), {}, "positives: query 2 has none"),
        ((queries, candidates, own), {"texts": ["a"]}, "texts has 1 texts for 5 candidates"),
        ((queries, candidates, own), {"query_ids": [1] * 4}, "must be given together"),
        (
            (queries, candidates, own),
            {"query_ids": [1] * 4, "candidate_ids": [1]},
            "candidate_ids has 1 ids for 5 rows",
        ),
        (
            (queries, candidates, own, Selection(max_score=-2)),
            {},
            "no candidate is left .*max_score",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            mine_hard_negatives(*arguments, **keywords)
    candidates[3, 2] = math.nan
    with pytest.raises(UserError, match="candidates: row 3 has values that are not finite"):
        mine_hard_negatives(queries, candidates, own)
