"""How `contrastive_step` cuts a model's inputs into micro-batches.

Inputs are tensors, sequences, or mappings of them, with one row for each sample, or m rows. Ragged
inputs, such as the patches of images of any size, have another number of rows for each sample:
`split_by` gives these numbers.
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

    Attributes:
        sizes: by argument: its number of samples, or m times as many. A ragged argument has the
            size of the input that counts its rows.

    Raises:
        ValueError: inputs that cannot be cut.
    """

    def __init__(self, by_key: Mapping[Any, Any], split_by: SplitBy) -> None:
        self._by_key = by_key
        known = names_in(by_key)
        unknown = [name for name in split_by if name not in known]
        if unknown:
            raise ValueError(f"split_by names {unknown}, which are not inputs; those are {known}")
        # For each ragged input, by the id of its mapping and its name:
        # the name of the input that has its numbers of rows, or these numbers themselves
        self._counted_by: dict[tuple[int, Any], Any] = {}
        # the first row of each part, and the end of the last
        self._row_starts: dict[tuple[int, Any], list[int]] = {}
        self._find_ragged(by_key, split_by, "")
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
        return self._has_ragged(self._by_key, key)

    def _has_ragged(self, level: Mapping[Any, Any], key: Any) -> bool:
        """As `is_ragged`, for a value of any mapping."""
        value = level[key]
        if self._is_ragged(level, key):
            return True
        return isinstance(value, Mapping) and any(self._has_ragged(value, name) for name in value)

    def _is_ragged(self, level: Mapping[Any, Any], key: Any) -> bool:
        """Whether `split_by` counts the rows of a value itself, not of a part of it."""
        return (id(level), key) in self._counted_by

    def _find_ragged(self, level: Mapping[Any, Any], split_by: SplitBy, prefix: str) -> None:
        """Note what counts the rows of each ragged input. An entry of `split_by` applies to every
        input of that name; an entry with dots, such as `query.input_ids`, to one."""
        for key, value in level.items():
            path = f"{prefix}{key}"
            if path in split_by:
                self._counted_by[id(level), key] = split_by[path]
            elif key in split_by:
                self._counted_by[id(level), key] = split_by[key]
            elif isinstance(value, Mapping):
                self._find_ragged(value, split_by, f"{path}.")

    def _sizes(self, level: Mapping[Any, Any], prefix: str) -> dict[Any, int]:
        """The samples of each value of a mapping."""
        sizes: dict[Any, int] = {}
        pending = []
        for key, value in level.items():
            name = f"{prefix}.{key}" if prefix else f"input {key}"
            if self._is_ragged(level, key):
                pending.append((key, name))
            elif isinstance(value, Mapping):
                parts = self._sizes(value, name)
                if len(set(parts.values())) != 1:
                    raise ValueError(
                        f"{name}: all values need the same first dimension, not {parts}; give the "
                        "numbers of rows of ragged ones with split_by"
                    )
                sizes[key] = next(iter(parts.values()))
            else:
                sizes[key] = num_rows(name, value)
                if self._is_cumulative(level, key):
                    sizes[key] -= 1  # the 0 at the start
        # An input is sized after the one that counts it, which may be ragged too.
        while pending:
            ready = []
            for key, name in pending:
                counted_by = self._counted_by[id(level), key]
                if not is_key(counted_by) or counted_by in sizes:
                    ready.append((key, name))
            if not ready:
                names = [name for _, name in pending]
                wanted = [self._counted_by[id(level), key] for key, _ in pending]
                raise ValueError(
                    f"split_by: {names} are counted by {wanted}, which are not inputs beside them; "
                    f"those are {[*map(str, level)]}"
                )
            for key, name in ready:
                sizes[key] = self._ragged_size(level, key, name, sizes)
                pending.remove((key, name))
        return sizes

    def _ragged_size(
        self, level: Mapping[Any, Any], key: Any, name: str, sizes: Mapping[Any, int]
    ) -> int:
        """The samples of a ragged input. Notes its `_row_starts`."""
        counted_by = self._counted_by[id(level), key]
        if is_key(counted_by):
            size = sizes[counted_by]
            starts = self._starts_by_input(level, counted_by, name)
        else:
            starts = [*itertools.accumulate(row_counts(name, counted_by), initial=0)]
            size = len(starts) - 1
            counted_by = "a list"
        rows = num_rows(name, level[key])
        falls = any(stop < start for start, stop in itertools.pairwise(starts))
        if starts[-1] != rows or falls:
            raise ValueError(
                f"{name} has {rows} rows, and split_by ({counted_by}) counts {starts[-1]} in "
                f"{len(starts) - 1} parts: they must be equal, and no part below 0"
            )
        self._row_starts[id(level), key] = starts
        return size

    def _starts_by_input(self, level: Mapping[Any, Any], counted_by: Any, name: str) -> list[int]:
        """The first row of each part of input `name`, and the end of the last."""
        numbers = row_counts(name, level[counted_by])
        if not self._is_cumulative(level, counted_by):
            return [*itertools.accumulate(numbers, initial=0)]
        if numbers[0] != 0:
            raise ValueError(
                f"{name} is counted by {counted_by}, which begins with {numbers[0]}: it must begin "
                "with 0 and have the end of each sample after it"
            )
        return numbers

    def _is_cumulative(self, level: Mapping[Any, Any], key: Any) -> bool:
        """Whether an input has a 0, and then the end of each part of another input, as
        `cu_seqlens`: its name begins with `cu_`, and it counts that input."""
        if not isinstance(key, str) or not key.startswith("cu_"):
            return False
        for other in level:
            if self._is_ragged(level, other):
                counted_by = self._counted_by[id(level), other]
                if is_key(counted_by) and counted_by == key:
                    return True
        return False

    def _cut(self, level: Mapping[Any, Any], key: Any, start: int, stop: int) -> Any:
        """The rows of the samples [start, stop) of a value of a mapping."""
        value = level[key]
        if self._is_ragged(level, key):
            first, end = self._ragged_rows(level, key, start, stop)
            return value[first:end]
        if isinstance(value, Mapping):
            return {name: self._cut(value, name, start, stop) for name in value}
        if self._is_cumulative(level, key):
            ends = value[start : stop + 1]
            if isinstance(ends, Tensor):
                return ends - ends[0]
            return [end - ends[0] for end in ends]
        return value[start:stop]

    def _ragged_rows(
        self, level: Mapping[Any, Any], key: Any, start: int, stop: int
    ) -> tuple[int, int]:
        """The first row and the end of samples [start, stop) of a ragged input."""
        counted_by = self._counted_by[id(level), key]
        if is_key(counted_by) and self._is_ragged(level, counted_by):
            # the parts of this input are the rows of the one that counts it, not the samples
            start, stop = self._ragged_rows(level, counted_by, start, stop)
        starts = self._row_starts[id(level), key]
        return starts[start], starts[stop]


def names_in(inputs: Mapping[Any, Any]) -> list[Any]:
    """The names of inputs, and of those in mappings, with and without the mapping's own."""
    names = [*inputs]
    for key, value in inputs.items():
        if isinstance(value, Mapping):
            inner = names_in(value)
            names += [*inner, *(f"{key}.{name}" for name in inner)]
    return names


def is_key(counted_by: Any) -> bool:
    """Whether a value of `split_by` names an input; if not, it has the numbers of rows."""
    return isinstance(counted_by, (str, int))


def num_rows(name: str, value: Any) -> int:
    """ValueError if a value cannot be cut."""
    has_rows = value.ndim > 0 if hasattr(value, "ndim") else hasattr(value, "__len__")
    if isinstance(value, (str, bytes)) or not has_rows:
        raise ValueError(
            f"{name} is a {type(value).__name__} without samples: give tensors, sequences or "
            "dicts of them, and bind anything else to the model (functools.partial)"
        )
    return len(value)


def row_counts(name: str, counts: Any) -> list[int]:
    """The numbers in `counts`, one for each part of input `name`.

    counts: [n], or [n, f]: factors to be multiplied, as `image_grid_thw`. ValueError for anything
    else.
    """
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
