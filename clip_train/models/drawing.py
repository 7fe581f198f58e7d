"""Draw a model's initial weights tensor by tensor: the whole model is never in memory.

The constructor runs twice. The first run draws nothing into large tensors: it records which
operation on each of them is the last. The second run draws in the constructor's own order, so the
numbers are those of a whole model. It drops each large tensor's memory after the last operation.

Both runs are on the CPU. On the meta device some constructors initialize nothing (transformers 5),
and a small tensor whose value decides what a constructor does has no value there.
"""

import mmap
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from clip_train.torch_internals import DispatchMode, storage_key, tree_leaves

LARGE = 1 << 20  # bytes; smaller tensors keep their memory until the model is built
OVERWRITING = ("normal_", "uniform_", "zero_", "fill_")
# A tensor's bytes, then the numbers of the operations on it except views, and whether each
# overwrites all of it.
Uses = list[tuple[int, bool]]


class _Operations(DispatchMode):
    """Records the operations on large tensors. Without `done` it executes none that changes them.

    record: the uses of the first run. done: called with a place in it and the tensor's memory,
    after the last operation.
    """

    def __init__(
        self,
        large: int,
        record: list[Uses] | None = None,
        done: Callable[[int, torch.UntypedStorage], None] | None = None,
    ) -> None:
        super().__init__()
        self._large, self._record, self._done, self._count = large, record or [], done, 0
        self._places: dict[int, int] = {}  # by address, which no other tensor has while it is held
        self.held: list[tuple[torch.UntypedStorage, mmap.mmap, Uses]] = []

    def find(self, values: Any) -> list[int]:
        """The places in `held` of the tensors in a tree of values."""
        tensors = (x for x in tree_leaves(values) if isinstance(x, Tensor))
        places = (self._places.get(storage_key(x.untyped_storage())) for x in tensors)
        return [*dict.fromkeys(place for place in places if place is not None)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        skipped = self._done is None and name.endswith("_") and self.find(args[:1])
        out = args[0] if skipped else func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        if name.startswith(("empty", "new_empty")) and out.is_cpu and out.is_floating_point():
            size = out.untyped_storage().nbytes()
            if size >= self._large:
                pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
                storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
                out.set_(storage, 0, out.shape, out.stride())
                self._places[storage_key(storage)] = len(self.held)
                self.held.append((storage, pages, [(size, True)]))
        self._count += 1
        for place in self.find((args, kwargs, out)):
            storage, pages, uses = self.held[place]
            uses.append((self._count, name in OVERWRITING and args[0].nbytes == len(pages)))
            recorded = self._record[place] if place < len(self._record) else []
            if uses == recorded and self._done is not None:
                self._done(place, storage)
            later = recorded[len(uses) :]
            # the next operation overwrites it, or there is none
            if not later or later[0][1]:
                pages.madvise(mmap.MADV_DONTNEED)
        return out


class Drawn:
    """The state of `build()` as drawn on the CPU from `seed`. large: bytes of a large tensor."""

    def __init__(self, build: Callable[[], nn.Module], seed: int, large: int = LARGE) -> None:
        """The first run; errors are those of `build`."""
        self._build, self._seed, self._large = build, seed, large
        operations = _Operations(large)
        self._layouts = [
            (name, operations.find(t), t.dtype, (t.storage_offset(), t.shape, t.stride()))
            for name, t in self.whole(operations).items()
        ]
        self._record = [uses for *_, uses in operations.held]

    def whole(self, operations: _Operations | None = None) -> dict[str, Tensor]:
        """The state in memory, drawn under `operations`."""
        with torch.random.fork_rng(devices=[]), operations or nullcontext():
            torch.manual_seed(self._seed)
            return self._build().state_dict()

    def draw(self, take: Callable[[str, Tensor], None]) -> bool:
        """Call `take(name, tensor)` for each entry of the state, whose memory is freed afterwards.

        False where the second run differs from the first: the tensors are wrong.
        """

        def done(place: int, storage: torch.UntypedStorage) -> None:
            for name, places, dtype, layout in self._layouts:
                if places == [place]:
                    take(name, torch.empty(0, dtype=dtype).set_(storage, *layout))

        operations = _Operations(self._large, self._record, done)
        state = self.whole(operations)
        same = [uses for *_, uses in operations.held] == self._record
        for name, places, *_ in self._layouts if same else ():
            if not places:
                take(name, state[name])
        return same


def undrawn_buffers(build: Callable[[], nn.Module], large: int = LARGE) -> dict[str, Tensor]:
    """The buffers of `build()`, such as masks: large parameters get no memory for them."""
    with _Operations(large) as operations:
        buffers = dict(build().named_buffers())
    return dict(build().named_buffers()) if operations.find(buffers) else buffers


def fill_buffers(model: nn.Module, build: Callable[[], nn.Module]) -> None:
    """After `to_empty`: compute the buffers that no checkpoint holds (masks, rotations) again.

    build: makes the same model.
    """
    saved = model.state_dict().keys()
    empty = {name: buffer for name, buffer in model.named_buffers() if name not in saved}
    if empty:
        with torch.device("cpu"):
            twin = undrawn_buffers(build)
        for name, buffer in empty.items():
            buffer.copy_(twin[name])
