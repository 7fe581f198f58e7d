"""Measure the memory that each sample adds: count the bytes of every live tensor during a step.

The step runs on fake tensors: no memory, no arithmetic, no weights.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from clip_train.engines.base import surrogate
from clip_train.memory.plan import Profile
from clip_train.task import IMAGE_TEXT, MicroBatch
from clip_train.torch_internals import DispatchMode, FakeTensorMode, storage_key, tree_leaves

# In samples: so many that constant parts (gradients of the weights) are negligible.
FAKE_SIZE = 2**30


class LiveBytes(DispatchMode):
    """While this mode is on, counts the bytes of all new tensors that are still alive."""

    def __init__(self, known: Iterable[Tensor] = ()):
        """known: tensors that exist already; views of them are not counted."""
        super().__init__()
        self.live = 0
        self.highest = 0  # of this phase
        self._seen: dict[int, Any] = {}
        for tensor in known:
            self._add(tensor.untyped_storage(), 0)

    def start_phase(self) -> None:
        """Count the highest number of bytes anew."""
        self.highest = self.live

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage_key(storage)
        if key in self._seen:
            return

        def on_freed(_: Any) -> None:
            self._seen.pop(key, None)
            self.live -= size

        self._seen[key] = weakref.ref(storage, on_freed)
        self.live += size
        self.highest = max(self.highest, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = [out] if isinstance(out, Tensor) else tree_leaves(out)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._add(storage, storage.nbytes())
        return out


def fake_profile(
    make_model: Callable[[], torch.nn.Module], micro_batch: Callable[[int], MicroBatch]
) -> Profile:
    """The profile of `make_model()` in training, on fake tensors: allocates nothing."""
    with torch.random.fork_rng(devices=[]), FakeTensorMode():
        model, inputs = make_model().train(), micro_batch(FAKE_SIZE)
        batch = (inputs.images, inputs.texts, inputs.sample_seeds)
        with LiveBytes([*model.parameters(), *model.buffers(), *batch]) as count:
            # pass 1: without a graph
            with torch.no_grad():
                out = IMAGE_TEXT.features(model, inputs)
            forward = count.highest
            del out
            # pass 2: forward with a graph
            count.start_phase()
            features = IMAGE_TEXT.features(model, inputs)
            graph = count.live
            building = count.highest
            # pass 2: backward
            count.start_phase()
            total = surrogate(features, {name: torch.ones_like(x) for name, x in features.items()})
            del features
            total.backward()
            backward = count.highest
    return Profile(
        forward=round(forward / FAKE_SIZE),
        graph=round(graph / FAKE_SIZE),
        building=round(building / FAKE_SIZE),
        backward=round(backward / FAKE_SIZE),
    )
