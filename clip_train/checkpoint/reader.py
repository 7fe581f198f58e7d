"""Reads any range of any parameter's state from a checkpoint, however many ranks cut it in whatever way."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clip_train.checkpoint import layout
from clip_train.errors import CheckpointError


class _Piece(NamedTuple):
    start: int  # first element, in the flattened parameter
    end: int  # one after the last
    file: str
    key: str


class FragmentReader:
    """A `FragmentSource` over the files of one checkpoint.

    Only the files' headers are read at first; `read` takes the bytes it needs and no more. The files stay
    mapped as long as the reader lives, so retention may remove the checkpoint under it.
    """

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        """folder: of the attempt, on a local disk; files: in it. CheckpointError if one cannot be read."""
        from safetensors import safe_open

        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[tuple[str, str], list[_Piece]] = {}
        for name in files:
            try:
                handle = safe_open(self.folder / name, framework="pt", device="cpu")
                shapes = json.loads((handle.metadata() or {}).get("shapes", "{}"))
            except Exception as e:  # SafetensorError is not an OSError
                raise CheckpointError(f"{self.folder / name}: {type(e).__name__}: {e}") from e
            self._open[name] = handle
            for param, shape in shapes.items():
                known = self._shapes.setdefault(param, tuple(shape))
                if known != tuple(shape):
                    raise CheckpointError(
                        f"{self.folder / name}: {param} has shape {tuple(shape)}, but {known} elsewhere"
                    )
            for key in handle.keys():  # noqa: SIM118  (not a dict)
                self._index(name, key, handle)
        for pieces in self._pieces.values():
            pieces.sort()

    def _index(self, file: str, key: str, handle: Any) -> None:
        parsed = layout.parse_fragment_key(key)
        if parsed is None:
            return
        name, slot, start = parsed
        (numel,) = handle.get_slice(key).get_shape()
        if numel:
            self._pieces.setdefault((name, slot), []).append(_Piece(start, start + numel, file, key))

    def names(self) -> dict[str, tuple[int, ...]]:
        """Every parameter in the checkpoint with its shape."""
        return dict(self._shapes)

    def slots(self) -> set[str]:
        """What is stored per parameter: "param" and the optimizer's slots."""
        return {slot for _, slot in self._pieces}

    def read(self, name: str, slot: str, start: int, numel: int) -> Tensor:
        """Elements `[start, start + numel)` of the flattened parameter, [numel], in host memory.

        CheckpointError if the checkpoint has no such parameter or slot, or lacks a part of the range.
        """
        if name not in self._shapes:
            raise CheckpointError(f"{self.folder}: no parameter {name!r} in this checkpoint")
        parts: list[Tensor] = []
        done, end = start, start + numel  # [start, done) is in `parts`
        for piece in self._pieces.get((name, slot), []):
            if done >= end or piece.start > done:
                break
            if piece.end > done:
                upto = min(end, piece.end)
                view = self._open[piece.file].get_slice(piece.key)
                parts.append(view[done - piece.start : upto - piece.start])
                done = upto
        if done < end:
            raise CheckpointError(
                f"{self.folder}: {slot!r} of {name} {list(self._shapes[name])} lacks element {done}; "
                f"[{start}, {end}) was asked for, the checkpoint has {sorted(self.slots())}"
            )
        if not parts:
            return torch.empty(0)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def full_state(self) -> dict[str, Tensor]:
        """Every parameter whole, as in the model's state dict (fp32): for export and evaluation."""
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
        if file not in self._open:
            raise CheckpointError(f"{self.folder}: no file {file} in this checkpoint")
        handle = self._open[file]
        named = {key: parse(key) for key in handle.keys()}  # noqa: SIM118
        return {name: handle.get_tensor(key) for key, name in named.items() if name is not None}
