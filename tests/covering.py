"""All pairs instead of all combinations: few cases in which any two values of two axes meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any


def pairwise(
    *axes: Sequence[Any], keep: Callable[[tuple], bool] = lambda case: True
) -> list[tuple]:
    """Some of the product's cases that `keep` allows: any two values that meet in one of those meet in one of these.

    Greedy and deterministic: always the first case with the most pairs that are still missing.
    """
    cases, pairs = [], []
    for numbered in itertools.product(*map(enumerate, axes)):
        case = tuple(value for _, value in numbered)
        if keep(case):
            cases.append(case)
            places = [
                (axis, number) for axis, (number, _) in enumerate(numbered)
            ]  # values need no hash
            pairs.append(set(itertools.combinations(places, min(2, len(axes)))))
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs[i] & missing))
        chosen.append(cases[best])
        missing -= pairs[best]
    return chosen
