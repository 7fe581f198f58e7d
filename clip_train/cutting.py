"""How `contrastive_step` cuts a model's inputs into micro-batches.

Inputs are tensors, sequences, or mappings of them, with one row for each sample, or m rows. `split_by`
says of ragged inputs, such as the patches of images of any size, which rows are whose.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

SplitBy = Mapping[Any, Any]


class Inputs:
    """The inputs of a step.

    Args:
        by_key: the model's arguments, by position or name.
        split_by: as of `contrastive_step`.

    `sizes` has for each argument the samples that it holds, or m times as many: of ragged inputs, the
    samples of what counts them. Raises ValueError for inputs that cannot be cut.
    """

    def __init__(self, by_key: Mapping[Any, Any], split_by: SplitBy) -> None:
        self._by_key, self._split_by = by_key, split_by
        self._starts: dict[tuple[int, Any], list[int]] = {}  # of ragged inputs, by mapping and name
        known = names_in(by_key)
        unknown = [name for name in split_by if name not in known]
        if unknown:
            raise ValueError(f"split_by names {unknown}, which are no inputs; those are {known}")
        self.sizes = self._sizes(by_key, "")

    def cut(self, samples: slice, n: int, keys: Collection[Any]) -> dict[Any, Any]:
        """Some of n samples, of the arguments with these keys."""
        arguments = {}
        for key in keys:
            rows = self.sizes[key] // n  # of each sample
            start, stop = samples.start * rows, samples.stop * rows
            arguments[key] = self._cut(self._by_key, key, start, stop)
        return arguments

    def is_ragged(self, key: Any) -> bool:
        """Whether `split_by` says how an argument, or a part of it, is cut."""
        if key in self._split_by:
            return True
        value = self._by_key[key]
        return isinstance(value, Mapping) and any(name in self._split_by for name in value)

    def _sizes(self, level: Mapping[Any, Any], prefix: str) -> dict[Any, int]:
        """The samples of each value of a mapping."""
        sizes: dict[Any, int] = {}
        later = []
        for key, value in level.items():
            name = f"{prefix}.{key}" if prefix else f"input {key}"
            if key in self._split_by:
                later.append((key, name))
            elif isinstance(value, Mapping):
                parts = self._sizes(value, name)
                if len(set(parts.values())) != 1:
                    raise ValueError(
                        f"{name}: all values need the same first dimension, not {parts}"
                    )
                sizes[key] = next(iter(parts.values()))
            else:
                sizes[key] = num_rows(name, value) - self._is_cumulative(key)
        while later:
            # one that counts another may itself be ragged
            ready = [
                (key, name)
                for key, name in later
                if not is_key(self._split_by[key]) or self._split_by[key] in sizes
            ]
            if not ready:
                names = [name for _, name in later]
                raise ValueError(
                    f"split_by: {names} are counted by {[self._split_by[key] for key, _ in later]}, "
                    f"which are no inputs beside them; those are {[*map(str, level)]}"
                )
            for key, name in ready:
                sizes[key] = self._ragged_size(level, key, name, sizes)
                later.remove((key, name))
        return sizes

    def _ragged_size(
        self, level: Mapping[Any, Any], key: Any, name: str, sizes: Mapping[Any, int]
    ) -> int:
        """The samples of a ragged input. Notes where the rows of each begin."""
        owner = self._split_by[key]
        counted_by_input = is_key(owner)
        counts = row_counts(name, level[owner] if counted_by_input else owner)
        if counted_by_input and self._is_cumulative(owner):
            starts = counts
        else:
            starts = [*itertools.accumulate(counts, initial=0)]
        rows = num_rows(name, level[key])
        if starts[0] != 0 or starts[-1] != rows or min(map(int.__sub__, starts[1:], starts)) < 0:
            raise ValueError(
                f"{name} has {rows} rows, and split_by ({owner if counted_by_input else 'counts'}) "
                f"counts {starts[-1]} in {len(starts) - 1} parts: they must be equal"
            )
        self._starts[id(level), key] = starts
        return sizes[owner] if counted_by_input else len(starts) - 1

    def _is_cumulative(self, key: Any) -> bool:
        """Whether an input has the ends of all parts, after a 0, as `cu_seqlens`."""
        counts_another = any(owner == key for owner in self._split_by.values() if is_key(owner))
        return counts_another and isinstance(key, str) and key.startswith("cu_")

    def _cut(self, level: Mapping[Any, Any], key: Any, start: int, stop: int) -> Any:
        """The rows of the samples [start, stop) of a value of a mapping."""
        value = level[key]
        if key in self._split_by:
            first, end = self._ragged_rows(level, key, start, stop)
            return value[first:end]
        if isinstance(value, Mapping):
            return {name: self._cut(value, name, start, stop) for name in value}
        if self._is_cumulative(key):
            return value[start : stop + 1] - value[start]
        return value[start:stop]

    def _ragged_rows(
        self, level: Mapping[Any, Any], key: Any, start: int, stop: int
    ) -> tuple[int, int]:
        """The first row and the end of samples [start, stop) of a ragged input."""
        owner = self._split_by[key]
        if is_key(owner) and owner in self._split_by:
            start, stop = self._ragged_rows(level, owner, start, stop)
        starts = self._starts[id(level), key]
        return starts[start], starts[stop]


def names_in(inputs: Mapping[Any, Any]) -> list[Any]:
    """The names of inputs, and of those in mappings."""
    names = [*inputs]
    for value in inputs.values():
        if isinstance(value, Mapping):
            names += names_in(value)
    return names


def is_key(owner: Any) -> bool:
    """Whether a value of `split_by` names an input; if not, it has the counts."""
    return isinstance(owner, (str, int))


def num_rows(name: str, value: Any) -> int:
    """ValueError if a value cannot be cut."""
    if isinstance(value, (str, bytes)) or not getattr(value, "ndim", hasattr(value, "__len__")):
        raise ValueError(
            f"{name} is a {type(value).__name__} without samples: give tensors, sequences or "
            "dicts of them, and bind anything else to the model (functools.partial)"
        )
    return len(value)


def row_counts(name: str, counts: Any) -> list[int]:
    """The rows that each entry of `counts` stands for: a number, or the product of several, as
    `image_grid_thw` has them. ValueError for something else."""
    if isinstance(counts, Tensor):
        if counts.is_floating_point() or counts.ndim not in (1, 2):
            raise ValueError(
                f"split_by: {name} is counted by {counts.dtype} {list(counts.shape)}: give whole "
                "numbers, one for each sample, or a row of factors"
            )
        if counts.ndim == 2:
            counts = counts.prod(1)
        return counts.tolist()
    if not isinstance(counts, Sequence) or not all(isinstance(count, int) for count in counts):
        raise ValueError(
            f"split_by: {name} is counted by a {type(counts).__name__}: give the name of an input, "
            "or a whole number for each sample"
        )
    return [*counts]
