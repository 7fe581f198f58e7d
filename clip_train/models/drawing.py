"""What a model's constructor draws, tensor by tensor: the whole model is never in memory.

The constructor runs twice. The first run draws nothing into large tensors: it records which
operation on each of them is the last. The second run draws in the constructor's own order, so the
numbers are those of a whole model. It drops each large tensor's memory after the last operation.
"""

import contextlib
import mmap
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGE = 1 << 20  # bytes; smaller tensors keep their memory until the model is built
OVERWRITING = ("normal_", "uniform_", "zero_", "fill_")
# A tensor's bytes; then the operations on it but for views: their numbers, and whether they
# overwrite all of it.
Uses: TypeAlias = list[tuple[int, bool]]


class _Large(NamedTuple):
    """A tensor that begins as `torch.empty`."""

    storage: torch.UntypedStorage
    pages: mmap.mmap
    uses: Uses


class _Operations(TorchDispatchMode):
    """Records the operations on large tensors. Without an earlier record it executes none that
    changes them."""

    def __init__(
        self,
        record: list[Uses] | None = None,
        done: Callable[[int, torch.UntypedStorage], None] | None = None,
    ) -> None:
        """done: called with a place in `record` and a tensor's memory, after its last operation."""
        super().__init__()
        self.large: list[_Large] = []
        self._record, self._done, self._count = record or [], done, 0
        self._places: dict[int, int] = {}  # by address; `large` keeps it from being used again

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import torch._dynamo, which takes seconds

    def find(self, values: Any) -> list[int]:
        """The places in `large` of the tensors in a tree of values."""
        tensors = (x for x in tree_leaves(values) if isinstance(x, Tensor))
        found = (self._places.get(x.untyped_storage()._cdata) for x in tensors)
        return [*dict.fromkeys(place for place in found if place is not None)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if self._done is None and name.endswith("_") and self.find(args[:1]):
            out = args[0]
        else:
            out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        if name.startswith(("empty", "new_empty")) and out.is_cpu and out.is_floating_point():
            storage = out.untyped_storage()
            if storage.nbytes() >= LARGE:
                pages = mmap.mmap(-1, storage.nbytes(), flags=mmap.MAP_PRIVATE)
                storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
                out.set_(storage, 0, out.shape, out.stride())
                self._places[storage._cdata] = len(self.large)
                self.large.append(_Large(storage, pages, [(storage.nbytes(), True)]))
        self._count += 1
        for place in self.find((args, kwargs, out)):
            storage, pages, uses = self.large[place]
            whole = name in OVERWRITING and args[0].nbytes == storage.nbytes()
            uses.append((self._count, whole))
            seen = next(iter(self._record[place : place + 1]), [])
            if uses == seen and self._done is not None:
                self._done(place, storage)
            later = seen[len(uses) :]
            if not later or later[0][1]:  # else the next operation reads it
                pages.madvise(mmap.MADV_DONTNEED)
        return out


class Drawn:
    """The state of `build()` as drawn on the CPU from `seed`."""

    def __init__(self, build: Callable[[], nn.Module], seed: int) -> None:
        """The first run; errors are those of `build`."""
        self._build, self._seed, operations = build, seed, _Operations()
        self._names: dict[int, dict[str, Any]] = {}
        for name, tensor in self._run(operations).items():
            for place in operations.find(tensor):
                layout = tensor.storage_offset(), tensor.shape, tensor.stride()
                self._names.setdefault(place, {})[name] = tensor.dtype, layout
        self._record = [each.uses for each in operations.large]

    def _run(self, operations: Any) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]), operations:
            torch.manual_seed(self._seed)
            return self._build().state_dict()

    def whole(self) -> dict[str, Tensor]:
        return self._run(contextlib.nullcontext())

    def draw(self, take: Callable[[str, Tensor], None]) -> bool:
        """Call `take(name, tensor)` for each entry of the state, whose memory is freed afterwards.

        False where the second run differs from the first: what was taken is wrong.
        """
        taken = set()

        def done(place: int, storage: torch.UntypedStorage) -> None:
            for name, (dtype, layout) in self._names.get(place, {}).items():
                take(name, torch.empty(0, dtype=dtype).set_(storage, *layout))
                taken.add(name)

        operations = _Operations(self._record, done)
        state = self._run(operations)
        same = [each.uses for each in operations.large] == self._record
        for name, tensor in state.items() if same else ():
            if name not in taken:
                take(name, tensor)
        return same


def undrawn_buffers(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """The buffers of `build()`, such as masks: large parameters get no memory for them."""
    with _Operations() as operations:
        buffers = dict(build().named_buffers())
    return dict(build().named_buffers()) if operations.find(buffers) else buffers
