"""Where images are collated: in shared memory that workers fill and the trainer reads, over and over.

Sent through the loader's queue, every piece would be copied once more, into fresh pages that the kernel has to clear:
a quarter of what a 256 px image costs in all.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import get_worker_info


class ImageMemory:
    """[workers, slots, capacity, 3, S, S] of uint8 in shared memory; it travels to a worker as a file descriptor.

    A worker fills its slots in turn. It is asked for its k-th piece when the trainer has fetched piece k - prefetch,
    and the trainer is done with that one before it fetches the next: prefetch + 1 slots are enough.

    Args:
        capacity: samples in the largest piece.
    """

    def __init__(self, workers: int, prefetch: int, capacity: int, image_size: int) -> None:
        shape = (workers, prefetch + 1, capacity, 3, image_size, image_size)
        storage = torch.UntypedStorage._new_shared(torch.Size(shape).numel())  # as torch's own collate allocates
        self._images = torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
        self._filled = 0  # pieces, by this worker

    def next(self, count: int) -> tuple[Tensor, tuple[int, int]]:
        """In a worker: where its next piece goes, [count, 3, S, S], and that place's name for `at`."""
        info = get_worker_info()
        assert info is not None
        place = (info.id, self._filled % self._images.shape[1])
        self._filled += 1
        return self.at(place, count), place

    def at(self, place: tuple[int, int], count: int) -> Tensor:
        """[count, 3, S, S], valid until the next batch is asked for."""
        worker, slot = place
        return self._images[worker, slot, :count]
