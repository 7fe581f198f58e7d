"""Reads any range of any parameter's state from a checkpoint, however many ranks cut it in whatever way."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from clip_train.checkpoint import layout
from clip_train.checkpoint.files import ByteSource
from clip_train.checkpoint.shares import Ranges, merged
from clip_train.checkpoint.snapshot import DTYPES
from clip_train.errors import CheckpointError
from clip_train.protocols import Wanted

_TORCH = {name: dtype for dtype, name in DTYPES.items()}


class _Piece(NamedTuple):
    start: int  # first element, in the flattened parameter
    end: int  # one after the last
    file: str
    key: str


class _Place(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int  # byte offset in the file


class Header(NamedTuple):
    """What a file says of itself at its beginning."""

    shapes: dict[str, tuple[int, ...]]  # of whole parameters
    places: dict[str, _Place]


class FragmentReader:
    """A `FragmentSource` over the files of one checkpoint.

    Only the files' headers are read at first; `read` takes the bytes it needs and no more. Local files stay
    mapped as long as the reader lives, so retention may remove the checkpoint under it.

    files: by their name in the attempt's folder. headers: of those files, where they have been read already.
    bring: takes what is going to be read of each file, all of it at once.
    """

    def __init__(
        self,
        files: Mapping[str, ByteSource],
        where: str = "the checkpoint",
        headers: Mapping[str, Header] | None = None,
        bring: Callable[[dict[str, Ranges]], None] | None = None,
    ) -> None:
        """CheckpointError if a file makes no sense."""
        self._where = where
        self._files = files
        self._bring = bring
        self._places: dict[str, dict[str, _Place]] = {}  # file -> key -> place
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[tuple[str, str], list[_Piece]] = {}
        for name, source in files.items():
            shapes, self._places[name] = headers[name] if headers is not None else read_header(source)
            for param, shape in shapes.items():
                known = self._shapes.setdefault(param, shape)
                if known != shape:
                    raise CheckpointError(f"{source.where}: {param} has shape {shape}, but {known} elsewhere")
            for key, place in self._places[name].items():
                parsed = layout.parse_fragment_key(key)
                if parsed is not None and (numel := math.prod(place.shape)):
                    param, slot, start = parsed
                    self._pieces.setdefault((param, slot), []).append(_Piece(start, start + numel, name, key))
        for pieces in self._pieces.values():
            pieces.sort()

    def _tensor(self, file: str, key: str, start: int, end: int) -> Tensor:
        """Elements `[start, end)` of a stored tensor, flattened."""
        place = self._places[file][key]
        width = place.dtype.itemsize
        if start >= end:
            return torch.empty(0, dtype=place.dtype)
        data = self._files[file].read(place.at + start * width, place.at + end * width)
        return torch.frombuffer(data, dtype=place.dtype)

    def names(self) -> dict[str, tuple[int, ...]]:
        """Every parameter in the checkpoint with its shape."""
        return dict(self._shapes)

    def slots(self) -> set[str]:
        """What is stored per parameter: "param" and the optimizer's slots."""
        return {slot for _, slot in self._pieces}

    def prepare(self, wanted: Iterable[Wanted]) -> None:
        """Where files lie in the store or on other ranks' disks: bring these ranges now.

        All ranks together. CheckpointError, on all of them.
        """
        ranges: dict[str, Ranges] = defaultdict(list)
        for name, slot, start, numel in wanted:
            for piece in self._overlapping(name, slot, start, start + numel):
                first, last = max(start, piece.start), min(start + numel, piece.end)
                self._add(ranges, piece.file, piece.key, first - piece.start, last - piece.start)
        self._prepare(ranges)

    def prepare_named(self, rank: int | None) -> None:
        """The same for `rank_tensors(rank)` (None: of no rank) and `shared_tensors()`."""
        ranges: dict[str, Ranges] = defaultdict(list)
        parsers: list[tuple[int, Callable[[str], str | None]]] = [(0, layout.parse_shared_tensor_key)]
        if rank is not None:
            parsers.append((rank, layout.parse_rank_tensor_key))
        for of, parse in parsers:
            file = layout.rank_file(of)
            for key, place in self._places.get(file, {}).items():
                if parse(key) is not None:
                    self._add(ranges, file, key, 0, math.prod(place.shape))
        self._prepare(ranges)

    def _add(self, ranges: dict[str, Ranges], file: str, key: str, start: int, end: int) -> None:
        """The bytes of elements `[start, end)` of a stored tensor."""
        place = self._places[file][key]
        width = place.dtype.itemsize
        ranges[file].append((place.at + start * width, place.at + end * width))

    def _prepare(self, ranges: dict[str, Ranges]) -> None:
        if self._bring is not None:
            self._bring({file: merged(each) for file, each in ranges.items()})

    def _overlapping(self, name: str, slot: str, start: int, end: int) -> list[_Piece]:
        return [piece for piece in self._pieces.get((name, slot), []) if piece.start < end and piece.end > start]

    def read(self, name: str, slot: str, start: int, numel: int) -> Tensor:
        """Elements `[start, start + numel)` of the flattened parameter, [numel], in host memory.

        CheckpointError if the checkpoint has no such parameter or slot, or lacks a part of the range.
        """
        if name not in self._shapes:
            raise CheckpointError(f"{self._where}: no parameter {name!r} in this checkpoint")
        parts: list[Tensor] = []
        done, end = start, start + numel  # [start, done) is in `parts`
        for piece in self._overlapping(name, slot, start, end):
            if done >= end or piece.start > done:
                break
            if piece.end > done:
                upto = min(end, piece.end)
                parts.append(self._tensor(piece.file, piece.key, done - piece.start, upto - piece.start))
                done = upto
        if done < end:
            raise CheckpointError(
                f"{self._where}: {slot!r} of {name} {list(self._shapes[name])} lacks element {done}; "
                f"[{start}, {end}) was asked for, the checkpoint has {sorted(self.slots())}"
            )
        if not parts:
            return torch.empty(0)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def full_state(self) -> dict[str, Tensor]:
        """Every parameter whole, as in the model's state dict (fp32): for export and evaluation."""
        self.prepare(Wanted(name, "param", 0, math.prod(shape)) for name, shape in self._shapes.items())
        return {
            name: self.read(name, "param", 0, math.prod(shape)).reshape(shape) for name, shape in self._shapes.items()
        }

    def rank_tensors(self, rank: int) -> dict[str, Tensor]:
        """What rank `rank` saved for itself (its random state)."""
        return self._named(rank, layout.parse_rank_tensor_key)

    def shared_tensors(self) -> dict[str, Tensor]:
        """What was the same on all ranks (memory banks); readable on any number of them."""
        return self._named(0, layout.parse_shared_tensor_key)

    def _named(self, rank: int, parse: Callable[[str], str | None]) -> dict[str, Tensor]:
        file = layout.rank_file(rank)
        if file not in self._files:
            raise CheckpointError(f"{self._where}: no file {file} in this checkpoint")
        out = {}
        for key, place in self._places[file].items():
            name = parse(key)
            if name is not None:
                # a copy: the caller may keep it for long, and write to it
                out[name] = self._tensor(file, key, 0, math.prod(place.shape)).reshape(place.shape).clone()
        return out


def read_header(source: ByteSource) -> Header:
    """CheckpointError where it is none."""
    try:
        return _parse_header(source)
    except (ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{source.where}: not a safetensors file: {type(e).__name__}: {e}") from e


def _parse_header(source: ByteSource) -> Header:
    """ValueError, KeyError, TypeError for anything else."""
    if source.size < 8:
        raise ValueError(f"{source.size} bytes")
    begin = 8 + int.from_bytes(source.read(0, 8), "little")
    if begin > source.size:
        raise ValueError("its header is longer than the file")
    header = json.loads(bytes(source.read(8, begin)))
    metadata = header.pop("__metadata__", {})
    places = {}
    for key, told in header.items():
        place = _Place(_TORCH[told["dtype"]], tuple(told["shape"]), begin + told["data_offsets"][0])
        end = begin + told["data_offsets"][1]
        if end > source.size or end - place.at != math.prod(place.shape) * place.dtype.itemsize:
            raise ValueError(f"{key} lies outside of the file")
        places[key] = place
    shapes = {name: tuple(shape) for name, shape in json.loads(metadata.get("shapes", "{}")).items()}
    return Header(shapes, places)
