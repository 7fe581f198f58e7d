"""Samples as columns: values by name, one for each sample.

A decoded sample is a mapping from names to values. A worker's piece, a rank's batch, a micro-batch
and the context of a loss hold `Columns`. The decoder (`clip_train/data/decode.py: Decoder`) gives a
column its name, and the loss reads it by that name. No code between them knows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Column = Tensor | list[Any]


class Columns:
    """The values of n samples.

    A column is a tensor with one row for each sample, [n, ...], or a list of n values. Tensors are
    copied to the device; lists, such as the samples' keys, stay on the host.

    ValueError if columns have different lengths.
    """

    def __init__(self, **by_name: Column) -> None:
        sizes = {name: len(column) for name, column in by_name.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"all columns need one row for each sample, but their rows are {sizes}"
            )
        self.by_name = by_name
        self._size = next(iter(sizes.values()), 0)

    @classmethod
    def stacked(cls, samples: Sequence[Mapping[str, Any]]) -> Columns:
        """The columns of samples that all have the same names. No samples: no columns.

        Tensors of one shape become rows of a tensor, int becomes int64 [n], and float becomes
        float32 [n]. Columns of any other type are lists.

        ValueError if names differ between samples, or the types or shapes of a column's values.
        """
        by_name = {}
        for name in _common_names(samples):
            by_name[name] = _column(name, [sample[name] for sample in samples])
        return cls(**by_name)

    @classmethod
    def cat(cls, parts: Sequence[Columns]) -> Columns:
        """The samples of all parts, one part after another. A single part is not copied.

        parts: each with at least one sample. ValueError if they differ in names, types or shapes.
        """
        if len(parts) == 1:
            return parts[0]
        by_name: dict[str, Column] = {}
        for name in _common_names([part.by_name for part in parts]):
            columns: list[Any] = [part[name] for part in parts]
            _check_alike(name, [column[0] for column in columns])
            if isinstance(columns[0], Tensor):
                by_name[name] = torch.cat(columns)
            else:
                by_name[name] = [value for column in columns for value in column]
        return cls(**by_name)

    def __len__(self) -> int:
        """n, the number of samples."""
        return self._size

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def __getitem__(self, name: str) -> Any:
        """A column. KeyError if there is none of this name."""
        if name not in self.by_name:
            raise KeyError(f"the samples have no column {name}, only {[*self.by_name]}")
        return self.by_name[name]

    def get(self, name: str) -> Any:
        """A column; None if there is none of this name."""
        return self.by_name.get(name)

    def plus(self, **by_name: Column) -> Columns:
        """These columns and others. A column replaces the one of its name."""
        return Columns(**{**self.by_name, **by_name})

    def without(self, *names: str) -> Columns:
        """These columns, except for some."""
        return Columns(**{name: x for name, x in self.by_name.items() if name not in names})

    def cut(self, start: int, stop: int) -> Columns:
        """The samples `[start, stop)`. Tensors are views."""
        return Columns(**{name: column[start:stop] for name, column in self.by_name.items()})

    def take(self, rows: Sequence[int], rows_on_device: Tensor) -> Columns:
        """The samples at `rows`, as copies.

        rows_on_device: int64, the same numbers on the device of the tensors.
        """
        by_name: dict[str, Column] = {}
        for name, column in self.by_name.items():
            if isinstance(column, Tensor):
                by_name[name] = column[rows_on_device]
            else:
                by_name[name] = [column[row] for row in rows]
        return Columns(**by_name)

    def pin(self) -> Columns:
        """The same columns with their tensors in pinned memory."""
        return self._with_tensors({name: x.pin_memory() for name, x in self._tensors()})

    def to(self, device: torch.device) -> Columns:
        """The same columns with their tensors on `device` (asynchronously from pinned memory)."""
        return self._with_tensors(
            {name: x.to(device, non_blocking=True) for name, x in self._tensors()}
        )

    def record_stream(self, stream: Any) -> None:
        """Keep the tensors' memory until `stream` has done the work that it has been given."""
        for _, tensor in self._tensors():
            tensor.record_stream(stream)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, column in self.by_name.items():
            if isinstance(column, Tensor):
                yield name, column

    def _with_tensors(self, tensors: Mapping[str, Tensor]) -> Columns:
        return Columns(**{**self.by_name, **tensors})


def _common_names(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of all samples. ValueError if they differ."""
    if not samples:
        return []
    names = samples[0].keys()
    for sample in samples:
        if sample.keys() != names:
            raise ValueError(
                f"one sample has the columns {sorted(names)}, and another one has "
                f"{sorted(sample)}: decode every sample to the same columns"
            )
    return [*names]


def _column(name: str, values: list[Any]) -> Column:
    """ValueError if the values differ in type or shape."""
    _check_alike(name, values)
    first = values[0]
    if isinstance(first, Tensor):
        return torch.stack(values)
    if type(first) is int:
        return torch.tensor(values, dtype=torch.int64)
    if type(first) is float:
        return torch.tensor(values, dtype=torch.float32)
    return values


def _kind(value: Any) -> str:
    """The type of one sample's value, with the shape of a tensor."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def _check_alike(name: str, values: Sequence[Any]) -> None:
    kinds = {_kind(value) for value in values}
    if len(kinds) > 1:
        raise ValueError(
            f"the values of the column {name} are {' and '.join(sorted(kinds))}: decode every "
            "sample to one type and shape"
        )
