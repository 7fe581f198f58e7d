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
        self._by_key = by_key
        known = names_in(by_key)
        unknown = [name for name in split_by if name not in known]
        if unknown:
            raise ValueError(f"split_by names {unknown}, which are no inputs; those are {known}")
        # of ragged inputs, by mapping and name: what counts them, and where the rows of each begin
        self._owners: dict[tuple[int, Any], Any] = {}
        self._starts: dict[tuple[int, Any], list[int]] = {}
        self._find_owners(by_key, split_by, "")
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
        return self._has_split(self._by_key, key)

    def _has_split(self, level: Mapping[Any, Any], key: Any) -> bool:
        value = level[key]
        if self._is_split(level, key):
            return True
        return isinstance(value, Mapping) and any(self._has_split(value, name) for name in value)

    def _is_split(self, level: Mapping[Any, Any], key: Any) -> bool:
        return (id(level), key) in self._owners

    def _find_owners(self, level: Mapping[Any, Any], split_by: SplitBy, prefix: str) -> None:
        """An entry is for a name in every mapping, or, as `query.input_ids`, in one."""
        for key, value in level.items():
            path = f"{prefix}{key}"
            if path in split_by:
                self._owners[id(level), key] = split_by[path]
            elif key in split_by:
                self._owners[id(level), key] = split_by[key]
            elif isinstance(value, Mapping):
                self._find_owners(value, split_by, f"{path}.")

    def _sizes(self, level: Mapping[Any, Any], prefix: str) -> dict[Any, int]:
        """The samples of each value of a mapping."""
        sizes: dict[Any, int] = {}
        later = []
        for key, value in level.items():
            name = f"{prefix}.{key}" if prefix else f"input {key}"
            if self._is_split(level, key):
                later.append((key, name))
            elif isinstance(value, Mapping):
                parts = self._sizes(value, name)
                if len(set(parts.values())) != 1:
                    raise ValueError(
                        f"{name}: all values need the same first dimension, not {parts}; say of "
                        "ragged ones with split_by what counts their rows"
                    )
                sizes[key] = next(iter(parts.values()))
            else:
                sizes[key] = num_rows(name, value) - self._is_cumulative(level, key)
        while later:
            # one that counts another may itself be ragged
            ready = []
            for key, name in later:
                owner = self._owners[id(level), key]
                if not is_key(owner) or owner in sizes:
                    ready.append((key, name))
            if not ready:
                names = [name for _, name in later]
                owners = [self._owners[id(level), key] for key, _ in later]
                raise ValueError(
                    f"split_by: {names} are counted by {owners}, which are no inputs beside them; "
                    f"those are {[*map(str, level)]}"
                )
            for key, name in ready:
                sizes[key] = self._ragged_size(level, key, name, sizes)
                later.remove((key, name))
        return sizes

    def _ragged_size(
        self, level: Mapping[Any, Any], key: Any, name: str, sizes: Mapping[Any, int]
    ) -> int:
        """The samples of a ragged input. Notes where the rows of each begin."""
        owner = self._owners[id(level), key]
        counted_by = owner if is_key(owner) else "a list"
        counts = row_counts(name, level[owner] if is_key(owner) else owner)
        if is_key(owner) and self._is_cumulative(level, owner):
            starts = counts
            if starts[0] != 0:
                raise ValueError(
                    f"{name} is counted by {owner}, which begins with {starts[0]}: it must begin "
                    "with 0 and have the end of each sample after it"
                )
        else:
            starts = [*itertools.accumulate(counts, initial=0)]
        rows = num_rows(name, level[key])
        falls = any(stop < start for start, stop in itertools.pairwise(starts))
        if starts[-1] != rows or falls:
            raise ValueError(
                f"{name} has {rows} rows, and split_by ({counted_by}) counts {starts[-1]} in "
                f"{len(starts) - 1} parts: they must be equal, and no part below 0"
            )
        self._starts[id(level), key] = starts
        return sizes[owner] if is_key(owner) else len(starts) - 1

    def _is_cumulative(self, level: Mapping[Any, Any], key: Any) -> bool:
        """Whether an input has the ends of all parts, after a 0, as `cu_seqlens`."""
        if not isinstance(key, str) or not key.startswith("cu_"):
            return False
        owners = [self._owners[id(level), other] for other in level if self._is_split(level, other)]
        return any(is_key(owner) and owner == key for owner in owners)

    def _cut(self, level: Mapping[Any, Any], key: Any, start: int, stop: int) -> Any:
        """The rows of the samples [start, stop) of a value of a mapping."""
        value = level[key]
        if self._is_split(level, key):
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
        owner = self._owners[id(level), key]
        if is_key(owner) and self._is_split(level, owner):
            start, stop = self._ragged_rows(level, owner, start, stop)
        starts = self._starts[id(level), key]
        return starts[start], starts[stop]


def names_in(inputs: Mapping[Any, Any]) -> list[Any]:
    """The names of inputs, and of those in mappings, with and without the mapping's own."""
    names = [*inputs]
    for key, value in inputs.items():
        if isinstance(value, Mapping):
            inner = names_in(value)
            names += [*inner, *(f"{key}.{name}" for name in inner)]
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
